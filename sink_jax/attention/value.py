"""Changes of values between their projection and attention.

A cache stores the changed values, and the value norms of a record are those of the changed values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.attention.param import AnyArray, Dims, Param
from sink_jax.component import Component


class Value(Component):
  """A change of the projected values of tokens; it does not act on a learned extra value v*."""

  reads_first: ClassVar[bool] = False  # does it mix in the projected values of the first block?

  def params(self, dims: Dims) -> dict[str, Param]:
    """Returns the parameters of one layer, {name: Param}."""
    return {}

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray],
             first_BxTxHkvxDh: jax.Array | None = None) -> jax.Array:
    """Returns the values that attention mixes, in their dtype.

    Args:
      v_BxTxHkvxDh: the projected values of the tokens.
      params: the parameters of the layer, by name.
      first_BxTxHkvxDh: the projected values of the first block; None in the first block.
    """
    return v_BxTxHkvxDh


class PlainValue(Value):
  """No change: attention mixes the projected values."""


class ValueScale(Value):
  """v <- c v with one learned c per layer and key head, starting at one (arXiv 2603.17771).

  V-scale is meant for the backward pass: c multiplies the gradients of the value path, which sinks
  concentrate on their tokens. Only the abstract of the paper was read, not its equation. The
  abstract says that V-scale adjusts the gradients on the value path; that it is one parameter per
  layer and head is taken from summaries by others.
  """

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'scale': Param((dims.kv_heads,), 'ones')}

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray],
             first_BxTxHkvxDh: jax.Array | None = None) -> jax.Array:
    # In float32 and rounded once: c rounded to bfloat16 could not move by less than 2^-9.
    scaled = v_BxTxHkvxDh.astype(jnp.float32) * params['scale'][:, None]
    return scaled.astype(v_BxTxHkvxDh.dtype)


class ValueResidual(Value):
  """v <- a v + b v_1 in every block after the first, whose values are v_1 (arXiv 2410.17897).

  The authors' code (Zcchill/Value-Residual-Learning) computes 0.5 v + 0.5 v_1 from the second block
  on and does not change the first block. Their paper also learns a and b of each block. Only the
  abstract of the paper and summaries by others were read, so learned a and b start at the numbers
  of the code.

  Attributes:
    own: a, or its initial value if it is learned.
    first: b, or its initial value if it is learned.
    learned: whether a and b are parameters of each layer; the first block does not use its own.
  """

  own: float = 0.5
  first: float = 0.5
  learned: bool = True

  reads_first = True

  def __post_init__(self):
    if not (math.isfinite(self.own) and math.isfinite(self.first)):
      raise ValueError(f'{self}: own and first must be finite; 0.5 is usual.')

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'own': Param((), self.own), 'first': Param((), self.first)} if self.learned else {}

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray],
             first_BxTxHkvxDh: jax.Array | None = None) -> jax.Array:
    if first_BxTxHkvxDh is None:
      return v_BxTxHkvxDh
    a, b = map(jnp.asarray, (params['own'], params['first']) if self.learned
               else (self.own, self.first))
    mixed = a * v_BxTxHkvxDh.astype(jnp.float32) + b * first_BxTxHkvxDh.astype(jnp.float32)
    return mixed.astype(v_BxTxHkvxDh.dtype)
