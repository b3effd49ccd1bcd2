"""Similarity f(s) of a scaled score s = phi(q).phi(k)/sqrt(Dh) + g (Section 7.4)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class Similarity(Component):
  """A parameter-free scalar function of the score.

  It runs inside kernel tiles, so it uses only operations that lower everywhere.
  """

  signed = False  # may f(s) be negative?
  exponential = False  # is f = exp, so that rows are computed relative to a maximum?

  def __call__(self, s):
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Exp(Similarity):
  """f(s) = exp(s). With RowSum this is softmax attention (Eq. 4)."""

  exponential = True

  def __call__(self, s):
    return jnp.exp(s)


@dataclasses.dataclass(frozen=True)
class Sigmoid(Similarity):
  """f(s) = 1 / (1 + exp(-s)), without bias or length scaling, as released."""

  def __call__(self, s):
    return jax.nn.sigmoid(s)


@dataclasses.dataclass(frozen=True)
class Linear(Similarity):
  """f(s) = s: the similarity of every kernel ("linear") attention of Table 15."""

  signed = True

  def __call__(self, s):
    return s


def elu_plus_one(x):
  """elu(x) + 1, written without expm1, which does not lower on every backend."""
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
