"""What a slot asks the model to own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Dims:
  """Sizes of one attention layer: query heads, key/value heads, head dimension."""

  heads: int
  kv_heads: int
  head_dim: int


@dataclasses.dataclass(frozen=True)
class Param:
  """A parameter's shape and how it starts.

  `init` is one of 'linear' and 'embedding' (as the model starts its own linear
  layers and embeddings), 'bias' (normal with standard deviation 0.02, which the
  release uses for k* and v*), 'zeros' and 'ones'.
  """

  shape: tuple[int, ...]
  init: str


def rms_norm(x, gain, eps: float):
  """x / sqrt(mean(x^2) + eps) * gain over the last axis, in float32."""
  x32 = x.astype(jnp.float32)
  scale = jnp.reciprocal(jnp.sqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps))
  return (x32 * scale * gain).astype(x.dtype)
