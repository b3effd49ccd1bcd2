"""Elementary functions inside a tile of scores.

Scores s are in the units of the product q.k; a scale 1 / sqrt(Dh) turns them into those that
a similarity takes. `Exact` runs on every back end. `Approximate` takes fewer instructions;
results/kernels/README.md lists its errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sink_jax.attention.similarity import Sigmoid, Similarity

LOG2E = math.log2(math.e)
# Up to here exp(x) - 1 is a series: its rest, x^3 / 24, and what a difference loses from here on,
# 2^-24 / x, are then about 2^-19 of the result.
_SERIES = 1 / 32
MASKED = -1e30  # finite, so that a row without any key so far stays finite


@dataclasses.dataclass(frozen=True)
class Exact:
  """Functions that are good to the last bits."""

  exp2: Callable[[jax.Array], jax.Array] = jnp.exp2

  def from_maximum(self, s: jax.Array, maximum: jax.Array, scale: float) -> jax.Array:
    """Logarithm in base 2 of exp((s - maximum) scale), given the largest score of a row.

    The difference comes before the factor: large scores then lose nothing.
    """
    return (s - maximum) * (scale * LOG2E)

  def from_log(self, s: jax.Array, log: jax.Array, scale: float) -> jax.Array:
    """Logarithm in base 2 of exp(s scale - log), given a statistic of a row."""
    return (s * scale - log) * LOG2E

  def less_one(self, s: jax.Array, scale: float, power: jax.Array, one: jax.Array) -> jax.Array:
    """(exp(s scale) - 1) one, given power = exp(s scale) one; `one` is a quantity of rows."""
    # The difference alone would lose all digits of small scores, which models start with.
    series = s * (one * scale) * (1 + s * (scale / 2 + s * (scale**2 / 6)))
    return jnp.where(jnp.abs(s) < _SERIES / scale, series, power - one)

  def weights(self, similarity: Similarity, s: jax.Array, scale: float) -> jax.Array:
    """f(s scale)."""
    return similarity(s * scale)

  def weights_and_slopes(self, similarity: Similarity, s: jax.Array,
                         scale: float) -> tuple[jax.Array, jax.Array]:
    """f and its derivative f' at s scale, by automatic differentiation."""
    s = s * scale
    return jax.jvp(similarity, (s,), (jnp.ones_like(s),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Approximate(Exact):
  """Functions of one instruction each, for weights that are rounded to bfloat16 next.

  Attributes:
    exp2, reciprocal: good to about 2^-22; they may flush subnormal numbers to zero.
    less_product: z - x y of (z, x, y), rounded once. With it an exponent is off by 2^-24 of the
      larger of its parts, by the same for all keys of a row while its maximum stays: that error
      cancels when the row is divided by its sum.
  """

  reciprocal: Callable[[jax.Array], jax.Array]
  less_product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

  def from_maximum(self, s: jax.Array, maximum: jax.Array, scale: float) -> jax.Array:
    # Rounding of a product as large as that of MASKED would be an exponent of any size.
    maximum = jnp.where(maximum > MASKED, maximum, 0)
    return self._scaled(s, scale * LOG2E, maximum * (-scale * LOG2E))

  def from_log(self, s: jax.Array, log: jax.Array, scale: float) -> jax.Array:
    return self._scaled(s, scale * LOG2E, log * -LOG2E)

  def weights(self, similarity: Similarity, s: jax.Array, scale: float) -> jax.Array:
    # By class, since a subclass may be another function.
    if type(similarity) is Sigmoid:  # far below zero 1 / (1 + inf) = 0
      exponent = s * (-scale * LOG2E)
      if similarity.bias:
        exponent = self._scaled(s, -scale * LOG2E, jnp.full_like(s, -similarity.bias * LOG2E))
      return self.reciprocal(1 + self.exp2(exponent))
    return super().weights(similarity, s, scale)

  def weights_and_slopes(self, similarity: Similarity, s: jax.Array,
                         scale: float) -> tuple[jax.Array, jax.Array]:
    if type(similarity) is Sigmoid:
      f = self.weights(similarity, s, scale)
      return f, self.less_product(f, f, f)  # f (1 - f)
    return super().weights_and_slopes(similarity, s, scale)

  def _scaled(self, s: jax.Array, factor: float, row: jax.Array) -> jax.Array:
    """factor s + row."""
    return self.less_product(jnp.broadcast_to(row, s.shape), s, jnp.full_like(s, -factor))


EXACT = Exact()
