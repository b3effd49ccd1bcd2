"""Trials of the paper: its data, its protocols, and the budgets at which they can be trained.

`full`: everything as in the paper.

`tenth`: models, batches, learning rates, weight decays and windows as in the paper; a tenth of the steps
and of the unique tokens, so that epochs stay the same; a warm-up of 100 steps, as in the paper.

`desk`, for two CPU cores, about two minutes a trial:
  model: 2 blocks, d = 64, 4 heads of 16, FFN 128, float32 (1B: 4 blocks, d = 128, 8 heads, FFN 352)
  text: the standard library of the Python that runs, in sequences of 64 tokens of a byte-pair encoding of
    512; each begins with a fixed token, unless the trial itself edits sequences
  steps times 0.2 (20,000 become 4,000), sequences per batch times 1/32 (512 become 16)
  learning rate times 50, weight decay times 5: rate times decay times steps is 50 times the paper's
  unique tokens, where a trial limits them, and windows: the paper's share of all tokens seen, and of the
    sequence (32 of 2048 becomes 1 of 64); heads times 1/2
  positions of fixed and random tokens, prefixes, norms of fixed values, learnable dimensions of k*: as in
    the paper, where they fit into 64 tokens and heads of 16
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import base
from sink_jax.arguments import check_known
from sink_jax.attention.extra_key_value import ExtraKeyValue, KBias
from sink_jax.attention.mask import Mask, Window
from sink_jax.component import from_string
from sink_jax.data.token_edits import RandomTokens, TokenEdit
from sink_jax.train.config import NotExpressible

# The Pile sample of the paper and the tokenizer of GPT-NeoX-20B; BUILD.md says where from.
_PAPER_DATA = {
    'data.source': "Jsonl(path='data/pile')",
    'data.tokenizer': "HuggingFace(path='data/gpt-neox-20b/tokenizer.json')",
    'data.valid_fraction': 0.01,  # which leaves 5B of its 5.1B tokens for training
    'model.vocab_size': 50432,
}
_UNIQUE_TOKENS = 5_000_000_000  # of every trial that does not limit them further
PROTOCOLS = {
    'paper': {  # as the paper says
        'optimizer.schedule': 'cosine', 'model.init': 'tinyllama', 'probe.dtype': 'float32'},
    'released': {  # as the official implementation (sail-sg/Attention-Sink) does
        'optimizer.schedule': 'constant', 'model.init': 'torch_default',
        'probe.dtype': 'bfloat16'},
}
_Config = Mapping[str, Any]  # the nested config of a trial at the paper's scale


def config(trials: base.Trials, argument: str, default: str = 'full',
           protocols: base.Trials = PROTOCOLS, task: str = 'paper') -> ConfigDict:
  """The config that e.g. 'window-32,budget=desk,protocol=released' names.

  default: the budget where none is given; the protocol is 'paper' then. protocols: what each
  changes, of a file with protocols of its own. task: of the label.

  Raises:
    ValueError: unknown trial, option, budget or protocol; lists the choices.
    NotExpressible: the trial has no counterpart at the budget.
  """
  name, *options = argument.split(',')
  given = {key: value for key, _, value in (option.partition('=') for option in options)}
  budget, protocol = given.pop('budget', default), given.pop('protocol', 'paper')
  for key in given:
    check_known(key, ('budget', 'protocol'), 'Unknown option')
  check_known(protocol, protocols, 'Unknown protocol')
  check_known(budget, BUDGETS, 'Unknown budget')
  result = base.get_config()
  result.update_from_flattened_dict(_PAPER_DATA | dict(protocols[protocol]))
  result = base.trial(trials, name, task, result)
  if protocol == 'released':  # which draws random tokens from the padded vocabulary
    edits = result.to_dict()['data']['interventions']
    result.update_from_flattened_dict({'data.interventions': edits.replace(
        'RandomTokens(', f'RandomTokens(below={_PAPER_DATA["model.vocab_size"]}, ')})
  result.update_from_flattened_dict({'label.budget': budget, 'label.protocol': protocol})
  try:
    result.update_from_flattened_dict(BUDGETS[budget](result.to_dict()))
  except NotExpressible as error:
    error.label = result.to_dict()['label']  # a sweep records it where the trial would be
    raise
  return result


def _tenth(config: _Config) -> dict[str, Any]:
  steps = round(config['steps'] / 10)
  # About twenty points make a curve, if the paper's own interval does not give more.
  often = lambda section: min(config[section]['every'], steps // 20)
  return {'steps': steps, 'checkpoint_every': min(config['checkpoint_every'], steps // 10),
          'probe.every': often('probe'), 'validation.every': often('validation'),
          'data.max_tokens': round((config['data']['max_tokens'] or _UNIQUE_TOKENS) / 10)}


_CONTEXT, _HEAD_DIM = 64, 16
_DESK = {
    'model.size': 'tiny',
    'model.vocab_size': None,  # that of the tokenizer, and not the paper's padded one
    'model.dtype': 'float32',
    'data.source': 'Stdlib()',
    'data.tokenizer': 'TrainedBpe(vocab_size=512)',
    'data.context': _CONTEXT,
    'data.valid_fraction': 0.05,
    'checkpoints_kept': 1,
    'checkpoint_every': 500,
    'optimizer.warmup_steps': 100,
    'probe.every': 100,
    'validation.every': 500,
    'validation.batches': 20,
}


def _desk(config: _Config) -> dict[str, Any]:
  data, optimizer, model = config['data'], config['optimizer'], config['model']
  steps, batch = round(config['steps'] / 5), round(config['batch_size'] / 32)
  rate, decay = optimizer['learning_rate'] * 50, optimizer['weight_decay'] * 5
  if rate * decay >= 1:  # decoupled weight decay multiplies every weight by 1 - rate * decay
    raise NotExpressible(f'a step would take away {rate * decay:.0%} of every weight')
  seen = config['steps'] * config['batch_size'] * data['context']
  changes = _DESK | {
      'steps': steps, 'batch_size': batch,
      'optimizer.learning_rate': rate, 'optimizer.weight_decay': decay,
      'data.max_tokens': round(data['max_tokens'] / seen * steps * batch * _CONTEXT),
      # Without it no sink emerges in these steps: a chunk begins anywhere in a text.
      'data.interventions': _edits(data['interventions']) or 'FixedToken(position=1)'}
  if model['size'] == '1b':
    changes |= {'model.layers': 4, 'model.d_model': 128, 'model.heads': 8, 'model.ffn_hidden': 352}
  if model['heads']:  # where the trial says how many
    if model['heads'] < 2:
      raise NotExpressible(f"{model['heads']} of the paper's 8 heads would be half a head of 4")
    changes['model.heads'] = model['heads'] // 2
  return changes | _attention(config['attention'], data['context'])


def _attention(attention: _Config, context: int) -> dict[str, str]:
  """Components whose numbers mean something else in shorter sequences and narrower heads."""
  changes = {}
  mask = from_string(Mask, attention['mask'])
  extra = from_string(ExtraKeyValue, attention['kv_bias'])
  if isinstance(mask, Window):
    size = mask.size * _CONTEXT / context
    if size < 1:
      raise NotExpressible(f'a window of {mask.size} of {context} tokens would be {size:g} of {_CONTEXT}')
    changes['attention.mask'] = repr(Window(size=round(size)))
  if attention['position'].startswith('Learned('):
    changes['attention.position'] = f'Learned(max_length={_CONTEXT})'
  # Equal is refused, too: with all channels learned, a row of Table 13 would be the plain K bias.
  if isinstance(extra, KBias) and (extra.learnable_dims or 0) >= _HEAD_DIM:
    raise NotExpressible(f'{extra.learnable_dims} learnable dimensions; heads have {_HEAD_DIM}')
  return changes


def _edits(text: str) -> str:
  """Edits of the sequences, for shorter ones and for the vocabulary of the small model."""
  if not text.startswith('RandomTokens('):
    return text
  edit = from_string(TokenEdit, text)
  assert isinstance(edit, RandomTokens)
  if edit.last >= _CONTEXT:
    raise NotExpressible(f'{edit.last} random tokens; sequences have {_CONTEXT} tokens')
  return repr(RandomTokens(first=edit.first, last=edit.last))


BUDGETS = {'full': lambda config: {}, 'tenth': _tenth, 'desk': _desk}
