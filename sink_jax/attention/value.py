"""What becomes of values between their projection and attention.

A cache keeps values in the form that attention mixes, and the norms that a record has are theirs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.attention.param import AnyArray, Dims, Param
from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class Value(Component):
  """A change of the projected values of tokens; a learned v* beside them stays as it is."""

  reads_first: ClassVar[bool] = False  # does it mix in the projected values of the first block?

  def params(self, dims: Dims) -> dict[str, Param]:
    """The parameters of one layer, by name."""
    return {}

  def start_like(self, before: Value) -> dict[str, float] | None:
    """What all entries of new parameters start with to do what `before` did; None: no place."""
    return {} if self == before else None

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray],
             first_BxTxHkvxDh: jax.Array | None = None) -> jax.Array:
    """The values that attention mixes, in their dtype.

    Args:
      first_BxTxHkvxDh: the projected values of the first block; None in the first block.
    """
    return v_BxTxHkvxDh


@dataclasses.dataclass(frozen=True)
class PlainValue(Value):
  """Values as projected."""


@dataclasses.dataclass(frozen=True)
class ValueScale(Value):
  """v <- c v with one learned c per layer and key head, which starts at one (2603.17771).

  V-scale is meant for the backward pass: c multiplies the gradients of the value path, which sinks
  concentrate on their tokens. Read was the paper's abstract, which says that V-scale adjusts the
  gradients on the value path; that it is one parameter per layer and head is how others summarise
  the paper, whose equation was not read.
  """

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'scale': Param((dims.kv_heads,), 'ones')}

  def start_like(self, before: Value) -> dict[str, float] | None:
    return {'scale': 1.0} if before == PlainValue() else super().start_like(before)

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray],
             first_BxTxHkvxDh: jax.Array | None = None) -> jax.Array:
    # In float32 and rounded once: c rounded to bfloat16 could not move by less than 2^-9.
    scaled = v_BxTxHkvxDh.astype(jnp.float32) * params['scale'][:, None]
    return scaled.astype(v_BxTxHkvxDh.dtype)


@dataclasses.dataclass(frozen=True)
class ValueResidual(Value):
  """v <- a v + b v_1 in every block but the first, v_1 the values of block 1 (2410.17897).

  The authors' code (Zcchill/Value-Residual-Learning) has 0.5 v + 0.5 v_1 from the second block on
  and leaves the first as it is. Their paper also learns the two numbers of a block, of which its
  abstract and others' summaries were read: the start of the learned ones is that of the code.

  Attributes:
    own: a, or where it starts.
    first: b, or where it starts.
    learned: whether a and b are parameters of each layer, which the first block does not use.
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

  def start_like(self, before: Value) -> dict[str, float] | None:
    if before != PlainValue() or not self.learned:
      return super().start_like(before)
    return {'own': 1.0, 'first': 0.0}

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray],
             first_BxTxHkvxDh: jax.Array | None = None) -> jax.Array:
    if first_BxTxHkvxDh is None:
      return v_BxTxHkvxDh
    a, b = map(jnp.asarray, (params['own'], params['first']) if self.learned
               else (self.own, self.first))
    mixed = a * v_BxTxHkvxDh.astype(jnp.float32) + b * first_BxTxHkvxDh.astype(jnp.float32)
    return mixed.astype(v_BxTxHkvxDh.dtype)
