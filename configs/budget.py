"""Trials of the paper: its data, its protocols, and a budget."""

import dataclasses

from ml_collections import ConfigDict

from configs import base
from sink_jax.arguments import check_known
from sink_jax.component import from_string
from sink_jax.data.token_edits import RandomTokens, TokenEdit
from sink_jax.paper.budgets import scaled
from sink_jax.train.config import NotExpressible

# The Pile sample of the paper and the tokenizer of GPT-NeoX-20B; BUILD.md says where from.
_PAPER_DATA = {
    'data.source': "Jsonl(path='data/pile')",
    'data.tokenizer': "HuggingFace(path='data/gpt-neox-20b/tokenizer.json')",
    'data.valid_fraction': 0.01,  # which leaves 5B of its 5.1B tokens for training
    'model.vocab_size': 50432,
}
PROTOCOLS = {
    'paper': {  # as the paper says
        'optimizer.schedule': 'cosine', 'model.init': 'tinyllama', 'probe.dtype': 'float32'},
    'released': {  # as the official implementation (sail-sg/Attention-Sink) does
        'optimizer.schedule': 'constant', 'model.init': 'torch_default',
        'probe.dtype': 'bfloat16'},
}


def config(trials: base.Trials, argument: str, default: str = 'full',
           protocols: base.Trials = PROTOCOLS) -> ConfigDict:
  """The config that e.g. 'window-32,budget=smoke,protocol=released' names.

  default: the budget where none is given; the protocol is 'paper' then. protocols: what each
  changes, of a file with protocols of its own.

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
  result = base.get_config()
  result.update_from_flattened_dict(_PAPER_DATA | dict(protocols[protocol]))
  result = base.trial(trials, name, result)
  values = result.to_dict()
  if protocol == 'released':
    result.update_from_flattened_dict({'data.interventions': _below_padding(
        values['data']['interventions'], values['model']['vocab_size'])})
  result.update_from_flattened_dict({'label.budget': budget, 'label.protocol': protocol})
  try:
    result.update_from_flattened_dict(scaled(result.to_dict(), budget))
  except NotExpressible as error:
    error.label = result.to_dict()['label']  # a sweep records it where the trial would be
    raise
  return result


def _below_padding(interventions: str, vocab_size: int) -> str:
  """Draws random tokens from the padded vocabulary, as the official implementation does."""
  parts = [part.strip() for part in interventions.split(';') if part.strip()]
  for i, part in enumerate(parts):
    edit = from_string(TokenEdit, part)
    if isinstance(edit, RandomTokens):
      parts[i] = repr(dataclasses.replace(edit, below=vocab_size))
  return '; '.join(parts)
