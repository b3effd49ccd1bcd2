"""What becomes of values between their projection and attention.

A cache keeps values in the form that attention mixes, and the norms that a record has are theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sink_jax.attention.param import AnyArray, Dims, Param
from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class Value(Component):
  """A change of the projected values of tokens; a learned v* beside them stays as it is."""

  def params(self, dims: Dims) -> dict[str, Param]:
    """The parameters of one layer, by name."""
    return {}

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    """The values that attention mixes, in their dtype."""
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

  def values(self, v_BxTxHkvxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    # In float32 and rounded once: c rounded to bfloat16 could not move by less than 2^-9.
    scaled = v_BxTxHkvxDh.astype(jnp.float32) * params['scale'][:, None]
    return scaled.astype(v_BxTxHkvxDh.dtype)
