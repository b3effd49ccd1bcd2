"""Inputs of a model: which token ids it has embeddings for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sink_jax.models.arrays import AnyArray
from sink_jax.models.config import ModelConfig


def check_ids(ids: AnyArray, vocab_size: int, name: str = 'tokens') -> None:
  """Raises a ValueError, which calls the ids by `name`, unless all are in the vocabulary."""
  # JAX would take the last embedding, or count from the end.
  if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
    raise ValueError(f'{name} reach from {ids.min()} to {ids.max()}, and the vocabulary has '
                     f'{vocab_size} entries: use the tokenizer of the model.')


def checked_inputs(config: ModelConfig, inputs: Any) -> jax.Array:
  """Inputs as an array of JAX, with ids in the vocabulary.

  Values are not looked at where they are not known, or lie on the devices of other processes. The
  model itself checks shape and dtype.
  """
  inputs = inputs if isinstance(inputs, jax.Array) else np.asarray(inputs)
  known = not isinstance(inputs, Tracer) and getattr(inputs, 'is_fully_addressable', True)
  if known and config.vocab_size and np.issubdtype(inputs.dtype, np.integer):
    check_ids(np.asarray(inputs), config.vocab_size)
  return jnp.asarray(inputs)
