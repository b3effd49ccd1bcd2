"""Checks a person's choice among the blocks of a model that have attention, and their heads."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.models.config import ModelConfig


def check_layers_and_heads(config: ModelConfig, layers: Sequence[int] | None,
                           heads: Sequence[int] | None) -> None:
  """Checks that a model has these blocks with attention, and these heads.

  Args:
    config: of the model.
    layers: numbers of blocks, from 0; None for all.
    heads: numbers of heads, from 0; None for all.

  Raises:
    ValueError: there is no such block or head. The message counts from 1, as the command line does.
  """
  from_1 = lambda numbers: ','.join(str(i + 1) for i in numbers)
  # A block with a Mamba mixer has no scores, so an analysis has nothing to show of it.
  existing = config.attention_layers
  if unknown := sorted(set(layers or ()) - set(existing)):
    raise ValueError(f'--layers={from_1(unknown)}: no such block with attention; this model has '
                     f'it in {from_1(existing)}.')
  if unknown := sorted(set(heads or ()) - set(range(config.heads))):
    raise ValueError(f'--heads={from_1(unknown)}: this model has the heads 1 to {config.heads}.')
