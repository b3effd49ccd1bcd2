"""Arrays that models take: their types, checks of them, and the precision of matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sink_jax.attention import AnyArray
from sink_jax.foreign import as_array
from sink_jax.models.config import ModelConfig

# A tree of parameters as Flax makes it: nested mappings from names to arrays, or to their shapes.
ParamTree = Mapping[str, Any]
ArrayTree = Any  # any tree of arrays that JAX knows: a named tuple, a mapping, one array


def check_ids(ids: AnyArray, vocab_size: int, name: str = 'tokens') -> None:
  """Raises a ValueError unless all ids are in the vocabulary; name: their name in the message."""
  # JAX would take the last embedding, or count from the end.
  if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
    raise ValueError(
      f'{name} reach from {ids.min()} to {ids.max()}, and the vocabulary has '
      f'{vocab_size} entries: use the tokenizer of the model.'
    )


def checked_inputs(config: ModelConfig, inputs: Any, least: int = 1) -> jax.Array:
  """Returns ids (S, T), or features (S, T, F) of a model without a vocabulary.

  T is at least `least`. Ids are compared with the vocabulary unless they are traced or lie in other
  processes.
  """
  inputs = as_array(inputs, 'tokens')
  fits = (
    inputs.ndim == 2 and np.issubdtype(inputs.dtype, np.integer)
    if config.vocab_size
    else inputs.ndim == 3 and inputs.shape[-1] == config.input_features
  )
  if not fits or not inputs.shape[0] or inputs.shape[1] < least:
    expected = (
      'tokens must be integers of shape (S, T)'
      if config.vocab_size
      else f'inputs must have the shape (S, T, {config.input_features})'
    )
    raise ValueError(f'{expected}, T at least {least}, not {inputs.dtype} of shape {inputs.shape}.')
  known = not isinstance(inputs, Tracer) and getattr(inputs, 'is_fully_addressable', True)
  if known and config.vocab_size:
    check_ids(np.asarray(inputs), config.vocab_size)
  return jnp.asarray(inputs)


def matmul_precision(dtype: str) -> str:
  """The precision of matrix products of activations of a type: 'highest', or JAX's 'default'.

  The default multiplies float32 in TF32 on GPUs and in passes of bfloat16 on TPUs.
  """
  return 'highest' if dtype == 'float32' else 'default'


def precise(dtype: str) -> AbstractContextManager:
  """A context in which float32 products are traced in full float32, and others as by default.

  Use it inside a jitted function: around the call it would become part of jit's cache key.
  """
  return jax.default_matmul_precision('highest' if dtype == 'float32' else None)


# Is each entry along the first axis of each leaf finite? The values stay on their devices.
_finite = jax.jit(
  lambda params: jax.tree.map(lambda x: jnp.isfinite(x).all(tuple(range(1, x.ndim))), params)
)


def first_not_finite(params: ParamTree) -> str | None:
  """The first parameter with a value that is not finite, such as 'embed[5]'; None without one.

  The index is along the first axis, which in the blocks counts layers, from 0.
  """
  for path, finite in jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(params))):
    if not finite.all():
      name = '/'.join(str(getattr(key, 'key', key)) for key in path)
      return name + (f'[{finite.argmin()}]' if finite.ndim else '')
  return None
