"""A person's choice among the blocks of a model that have attention, and their heads."""

from __future__ import annotations

from sink_jax.models.config import ModelConfig


def check_choice(config: ModelConfig, layers, heads) -> None:
  """Are there such blocks with attention and such heads? From 0; None is any.

  Raises:
    ValueError: there are not; counts from 1, as the command line does.
  """
  from_1 = lambda numbers: ','.join(str(i + 1) for i in numbers)
  there = config.attention_layers
  if unknown := sorted(set(layers or ()) - set(there)):
    raise ValueError(f'--layers={from_1(unknown)}: no such block with attention; this model has '
                     f'it in {from_1(there)}.')
  if unknown := sorted(set(heads or ()) - set(range(config.heads))):
    raise ValueError(f'--heads={from_1(unknown)}: this model has the heads 1 to {config.heads}.')
