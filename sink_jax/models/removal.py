"""A model without the attention biases that it was trained with (Section 7.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sink_jax.attention.extra_key_value import NoBias
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run


def learned_bias(config: ModelConfig) -> str:
  """The parameters that `without_bias` removes, in words; empty where there are none."""
  parts = [] if not config.sink_tokens else ['the learned sink token x*'] if (
      config.sink_tokens == 1) else [f'the {config.sink_tokens} learned sink tokens x*']
  parts.append(config.attention.kv_bias.description)
  return ' and '.join(filter(None, parts))


def without_bias(run: Run) -> Run:
  """The same model with neither biases in attention nor a learned sink token.

  Nothing else changes: a prefix or a window keeps its length.

  Raises:
    ValueError: the model has none of them.
  """
  if not learned_bias(run.config):
    raise ValueError('The model has no bias in attention and no learned sink token to remove.')
  config = dataclasses.replace(
      run.config, sink_tokens=0,
      attention=dataclasses.replace(run.config.attention, kv_bias=NoBias()))
  return dataclasses.replace(run, config=config, params=_without_bias(run.params))


def _without_bias(params: ParamTree) -> ParamTree:
  """The parameters that stay. The dicts are new, so that the given run keeps its parameters."""
  # At every depth: a pattern of several blocks has a level 'layer0', 'layer1', ... more.
  return {name: _without_bias(x) if isinstance(x, Mapping) else x for name, x in params.items()
          if name != 'sink_tokens' and not name.startswith('kv_bias_')}
