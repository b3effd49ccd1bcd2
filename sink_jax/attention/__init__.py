"""Attention variants as values: their components, the spec that joins them, the definition.

A new variant is one class in one of these files, with its formula, its source and its parameters.
This package is the slow definition: `kernels` computes the same with less memory. Models hold the
parameters.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sink_jax.devices import platform

AnyArray = jax.Array | np.ndarray  # what public functions take
Arrays = Mapping[str, AnyArray]  # a component's parameters in one layer, by name
MASKED = -1e30  # the score of a hidden key: finite, so that a row without any key gives no NaN


@dataclasses.dataclass(frozen=True)
class Dims:
  """The sizes of one attention layer.

  heads: number of query heads. kv_heads: number of key and value heads, a divisor of `heads`;
  neighbouring query heads share a key head. head_dim: Dh. d_model: the width of the layer's input,
  which head gates may read; None if only queries and keys are known.
  """

  heads: int
  kv_heads: int
  head_dim: int
  d_model: int | None = None


@dataclasses.dataclass(frozen=True)
class Param:
  """A parameter: the shape of its array in one layer, and how it is initialised.

  init: 'linear' or 'embedding', as the model initialises its linear layers or embeddings; 'bias',
  normal with standard deviation 0.02, which the official code (sail-sg/Attention-Sink) uses for k*
  and v*; or a number that all entries start with.
  """

  shape: tuple[int, ...]
  init: str | float


class Learnable:
  """A component that may ask the model to keep parameters for it."""

  def params(self, dims: Dims) -> dict[str, Param]:
    """Returns the parameters of one layer, {name: Param}."""
    return {}


def require(component: object, holds: bool, rule: str) -> None:
  """Raises a ValueError with the rule of a component unless it holds."""
  if not holds:
    raise ValueError(f'{component}: {rule}.')


def rms_norm(
  x: jax.Array, gain: AnyArray, eps: float, axis: int | tuple[int, ...] = -1
) -> jax.Array:
  """x / sqrt(mean(x^2) + eps) * gain over one or several axes, in float32, rounded once."""
  x32 = x.astype(jnp.float32)
  scale = jnp.reciprocal(jnp.sqrt(jnp.mean(x32 * x32, axis, keepdims=True) + eps))
  return (x32 * scale * gain).astype(x.dtype)


def linear(x: jax.Array, kernel_IxO: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
  """x W for inputs (..., I), summed and returned in `dtype`, by default that of the inputs.

  On a CPU the product is taken on rows (n, I). With more axes the gradient of W contracts several:
  XLA's back end for CPUs then transposes the operands first, and takes twice to three times as
  long. Compiled for TPUs and GPUs, rows cost copies: the layouts of (B, T, I) and of rows differ.
  """
  if platform() != 'cpu':
    return jnp.einsum('...i,io->...o', x, kernel_IxO, preferred_element_type=dtype)
  *axes, width = x.shape
  out_nxO = jnp.matmul(x.reshape(-1, width), kernel_IxO, preferred_element_type=dtype)
  return out_nxO.reshape(*axes, kernel_IxO.shape[1])


def soft_cap(x: jax.Array, cap: float, scale: float = 1.0) -> jax.Array:
  """cap tanh(s / cap) / scale for the score s = scale x; x itself for a cap of 0."""
  return jnp.tanh(x * (scale / cap)) * (cap / scale) if cap else x


def soft_cap_slope(capped: jax.Array, cap: float, scale: float = 1.0) -> jax.Array:
  """The derivative 1 - tanh(s / cap)^2 of `soft_cap`, given its value; not for a cap of 0."""
  return 1 - (capped * (scale / cap)) ** 2
