"""Trials of the paper: its data, its protocols, and the budgets at which they can be trained.

`full`: everything as in the paper.

`tenth`: models, batches, learning rates, weight decays and windows as in the paper; a tenth of the steps
and of the unique tokens, so that epochs stay the same; a warm-up of 100 steps, as in the paper.

`desk`, for one CPU core, five to ten minutes a trial; `python -m configs.budget` prints it next to the
paper. These rules were written down before its runs:

  Steps, warm-up and clip are the paper's: 20,000 updates, of 16 x 64 tokens.
  The learning rate is that of five with the least validation loss of softmax (configs/grid.py). Sinks
  play no part in the choice.
  Weight decay is what keeps the paper's product of rate, decay and steps, 0.8. The trial
  weight-decay-0.5 says what more of it does.
  Unique tokens, if a trial limits them: the paper's share of all tokens seen. Windows: the paper's
  share of the sequence (32 of 2048 becomes 1 of 64).
  A trial that changes the rate, decay, steps or batch changes it by the paper's factor.
  Positions of fixed and random tokens, prefixes, norms of fixed values, learnable dimensions of k*: as in
  the paper, if they fit.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import base
from sink_jax.arguments import check_known
from sink_jax.attention.extra_key_value import ExtraKeyValue, KBias
from sink_jax.attention.mask import Mask, Window
from sink_jax.component import from_string
from sink_jax.data.token_edits import RandomTokens, TokenEdit
from sink_jax.io.terminal import text_table
from sink_jax.models.sizes import parameter_count
from sink_jax.train.config import NotExpressible, from_dict

# The Pile sample of the paper and the tokenizer of GPT-NeoX-20B; docs/experiments.md says how to get them.
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

  default: the budget if none is given; the protocol is 'paper' then. protocols: {name: changes}, for a file
  with other protocols than the paper's. task: the task in the label.

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
  # About twenty points make a curve, if the paper's interval does not give more.
  often = lambda section: min(config[section]['every'], steps // 20)
  return {'steps': steps, 'checkpoint_every': min(config['checkpoint_every'], steps // 10),
          'probe.every': often('probe'), 'validation.every': often('validation'),
          'data.max_tokens': round((config['data']['max_tokens'] or _UNIQUE_TOKENS) / 10)}


@dataclasses.dataclass(frozen=True)
class Small:
  """A budget for a CPU: how it scales the paper's default, and its replacements for the rest.

  batch: divisor of the paper's. rate: factor of its learning rate. heads: divisor of a number of
  heads that a trial states. edits: edits of the sequences, if a trial has none. large: sizes of the
  1B models.
  """
  batch: int
  rate: float
  context: int
  heads: int
  settings: Mapping[str, Any]
  edits: str = ''
  large: Mapping[str, int] | None = None

  def __call__(self, config: _Config) -> dict[str, Any]:
    data, optimizer, model = config['data'], config['optimizer'], config['model']
    batch = round(config['batch_size'] / self.batch)
    rate = optimizer['learning_rate'] * self.rate
    decay = optimizer['weight_decay'] / self.rate
    if rate * decay >= 1:  # decoupled weight decay multiplies every weight by 1 - rate * decay
      raise NotExpressible(f'a step would take away {rate * decay:.0%} of every weight')
    seen = config['steps'] * config['batch_size'] * data['context']
    changes = _SMALL | dict(self.settings) | {
        'batch_size': batch, 'data.context': self.context,
        'optimizer.learning_rate': rate, 'optimizer.weight_decay': decay,
        'data.max_tokens': round(
            data['max_tokens'] / seen * config['steps'] * batch * self.context),
        'data.interventions': self._edits(data['interventions']) or self.edits}
    if model['size'] == '1b':
      if self.large is None:
        raise NotExpressible('the 1B models')
      changes |= {f'model.{key}': value for key, value in self.large.items()}
    if model['heads']:  # if the trial states a number
      if model['heads'] < self.heads:
        raise NotExpressible(f"{model['heads']} of the paper's 8 heads would be less than one head")
      changes['model.heads'] = model['heads'] // self.heads
    return changes | self._attention(config['attention'], data['context'])

  def _attention(self, attention: _Config, context: int) -> dict[str, str]:
    """Components whose numbers mean something else in shorter sequences and narrower heads."""
    changes = {}
    mask = from_string(Mask, attention['mask'])
    extra = from_string(ExtraKeyValue, attention['kv_bias'])
    if isinstance(mask, Window):
      size = mask.size * self.context / context
      if size < 1:
        raise NotExpressible(
            f'a window of {mask.size} of {context} tokens would be {size:g} of {self.context}')
      changes['attention.mask'] = repr(Window(size=round(size)))
    if attention['position'].startswith('Learned('):
      changes['attention.position'] = f'Learned(max_length={self.context})'
    # Equal is refused, too: with all channels learned, a row of Table 13 would be the plain K bias.
    if isinstance(extra, KBias) and (extra.learnable_dims or 0) >= _HEAD_DIM:
      raise NotExpressible(f'{extra.learnable_dims} learnable dimensions; heads have {_HEAD_DIM}')
    return changes

  def _edits(self, text: str) -> str:
    """Edits of the sequences, for shorter ones and for the vocabulary of the small model."""
    if not text.startswith('RandomTokens('):
      return text
    edit = from_string(TokenEdit, text)
    assert isinstance(edit, RandomTokens)
    if edit.last >= self.context:
      raise NotExpressible(f'{edit.last} random tokens; sequences have {self.context} tokens')
    return repr(RandomTokens(first=edit.first, last=edit.last))


_HEAD_DIM = 16
_SMALL = {
    'model.size': 'tiny',
    'model.vocab_size': None,  # the vocabulary of the tokenizer, and not the padded one of the paper
    'model.dtype': 'float32',
    'checkpoints_kept': 1,
    'checkpoint_every': 2000,
    'validation.every': 200,
    'validation.batches': 20,
}
# Two blocks, d = 64, 4 heads, FFN 128. A fixed token begins every
# sequence if the trial edits none.
DESK = Small(batch=32, rate=20, context=64, heads=2, edits='FixedToken(position=1)', settings={
    'data.source': 'Stdlib()', 'data.tokenizer': 'TrainedBpe(vocab_size=512)', 'data.valid_fraction': 0.05,
    'probe.every': 200}, large={'layers': 4, 'd_model': 128, 'heads': 8, 'ffn_hidden': 352})
BUDGETS = {'full': lambda config: {}, 'tenth': _tenth, 'desk': DESK}


def main() -> None:
  """Prints the rules and the default trial of each budget."""
  columns = []
  for name in BUDGETS:
    run = from_dict(config({'default': {}}, f'default,budget={name}').to_dict())
    model, optimizer = run.model_before_data(), run.optimizer
    weights, tokens = parameter_count(model, embeddings=False), run.steps * run.tokens_per_step
    columns.append({
        'budget': name, 'million weights without embeddings': f'{weights / 1e6:.2f}',
        'blocks, width, heads': f'{model.layers}, {model.d_model}, {model.heads}',
        'steps': f'{run.steps:,}', 'sequences, tokens of each': f'{run.batch_size}, {run.data.context}',
        'million tokens': f'{tokens / 1e6:,.1f}', 'tokens per weight': f'{tokens / weights:.0f}',
        'learning rate': f'{optimizer.learning_rate:g}', 'weight decay': f'{optimizer.weight_decay:g}',
        'rate x decay x steps': f'{optimizer.learning_rate * optimizer.weight_decay * run.steps:.3g}',
        'warm-up': f'{optimizer.warmup_steps / run.steps:.2%}', 'clip': f'{optimizer.clip:g}'})
  print(__doc__)
  head, *rows = [[key, *(column[key] for column in columns)] for key in columns[0]]
  print(*text_table(head, rows), sep='\n')


if __name__ == '__main__':
  main()
