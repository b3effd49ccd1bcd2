"""Similarity f(s) of a scaled score s = phi(q).phi(k)/sqrt(Dh) + g (Section 7.4)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class Similarity(Component):
  """A parameter-free scalar function of the score.

  It runs inside kernel tiles, so it uses only operations that lower everywhere.
  """

  signed: ClassVar[bool] = False  # may f(s) be negative?
  # How rows are computed: 'additive' sums f as it is; 'exponential' is f = exp, whose rows are
  # computed relative to their maximum and cannot overflow.
  kind: ClassVar[Literal['additive', 'exponential']] = 'additive'

  def __call__(self, s: jax.Array) -> jax.Array:
    """f of float32 scores, elementwise; kernels take its derivative by `jax.jvp`."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Exp(Similarity):
  """f(s) = exp(s). With RowSum this is softmax attention (Eq. 4)."""

  kind = 'exponential'

  def __call__(self, s: jax.Array) -> jax.Array:
    return jnp.exp(s)


@dataclasses.dataclass(frozen=True)
class Sigmoid(Similarity):
  """f(s) = 1 / (1 + exp(-s)), without bias or length scaling, as in the official code."""

  def __call__(self, s: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(s)


@dataclasses.dataclass(frozen=True)
class Linear(Similarity):
  """f(s) = s: the similarity of every kernel ("linear") attention of Table 15."""

  signed = True

  def __call__(self, s: jax.Array) -> jax.Array:
    return s


def elu_plus_one(x: jax.Array) -> jax.Array:
  """elu(x) + 1, written without expm1, which does not lower on every backend."""
  # The minimum keeps exp finite where it is not used: a gradient through `where` takes both.
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
