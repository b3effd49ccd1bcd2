"""The parameters that a component asks the model to keep for it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

AnyArray = jax.Array | np.ndarray  # what public functions take


@dataclasses.dataclass(frozen=True)
class Dims:
  """The sizes of one attention layer.

  Attributes:
    heads: the number of query heads.
    kv_heads: the number of key/value heads, which divides `heads`.
    head_dim: the dimension Dh of a head.
    d_model: the width of the layer's input, which gates of heads may read; None where only queries
      and keys are known.
  """

  heads: int
  # Divides `heads`; query heads that share keys and values are neighbours, see `repeat_heads`.
  kv_heads: int
  head_dim: int
  d_model: int | None = None


@dataclasses.dataclass(frozen=True)
class Param:
  """A parameter's shape and how it is initialised.

  Attributes:
    shape: the shape of the array in one layer.
    init: 'linear' or 'embedding', as the model initialises its linear layers or embeddings; 'bias',
      normal with standard deviation 0.02, which the official code (sail-sg/Attention-Sink) uses
      for k* and v*; 'zeros'; 'ones'; or a number that all entries start with.
  """

  shape: tuple[int, ...]
  init: str | float


def rms_norm(x: jax.Array, gain: AnyArray, eps: float,
             axis: int | tuple[int, ...] = -1) -> jax.Array:
  """x / sqrt(mean(x^2) + eps) * gain over the last axis, or these, in float32."""
  # The gain multiplies before the rounding to the dtype of x, once.
  x32 = x.astype(jnp.float32)
  scale = jnp.reciprocal(jnp.sqrt(jnp.mean(x32 * x32, axis, keepdims=True) + eps))
  return (x32 * scale * gain).astype(x.dtype)


def soft_cap(x: jax.Array, cap: float, scale: float = 1.0) -> jax.Array:
  """cap tanh(x / cap) of an x in units of 1 / scale, in those units; x itself for a cap of 0."""
  return jnp.tanh(x * (scale / cap)) * (cap / scale) if cap else x


def soft_cap_slope(capped: jax.Array, cap: float, scale: float = 1.0) -> jax.Array:
  """The derivative 1 - tanh(x / cap)^2 of `soft_cap`, given its value; not for a cap of 0."""
  return 1 - (capped * (scale / cap)) ** 2
