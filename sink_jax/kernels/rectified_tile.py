"""The tile of softpick, and the choice among the kinds of tiles.

Softpick sums |exp(s) - 1| and weighs values by the positive part of exp(s) - 1. Both are computed
relative to the largest score of a row, as softmax is. A masked score counts for nothing, and so
does a score of zero: the one is replaced by the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sink_jax.attention.normalizer import AbsSum
from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.arithmetic import EXACT, LOG2E, Exact
from sink_jax.kernels.score_tile import ScoreTile, State


@dataclasses.dataclass(frozen=True)
class RectifiedTile(ScoreTile):
  """Rows of softpick, accumulated tile by tile.

  The state of a row is (m, sum_j |exp(s_ij - m) - exp(-m)|[, the sum of the positive terms]), with
  m = max(0, max_j s_ij). Its statistic is L = m + log(sum + eps), and the weights of whole rows are
  max(exp(s - L) - exp(-L), 0).
  """

  def start(self, shape: tuple[int, ...]) -> State:
    # No maximum is below zero: exp(-m) would be beyond float32 in rows of very negative scores,
    # whose output is zero for any m.
    return (jnp.zeros(shape, jnp.float32),) * (2 + self.sizes)

  def update(self, state: State, s: jax.Array, keep: jax.Array | None = None
             ) -> tuple[jax.Array, jax.Array | None, State]:
    s, exp2 = self._where(keep, s), self.arithmetic.exp2
    total = lambda x: jnp.sum(x, self.axis, keepdims=True)
    old, *sums = state
    new = jnp.maximum(old, jnp.max(s, self.axis, keepdims=True))
    # Of two maxima the difference comes first: where they are equal nothing changes.
    factor = exp2(EXACT.from_maximum(old, new, self.scale))
    power = exp2(self.arithmetic.from_maximum(s, new, self.scale))
    f = self.arithmetic.less_one(s, self.scale, power, exp2(new * (-self.scale * LOG2E)))
    p = jnp.maximum(f, 0)
    sums = [old * factor + total(x) for old, x in zip(sums, (jnp.abs(f), p))]
    return p, factor, (new, *sums)

  def finish(self, state: State) -> tuple[jax.Array | None, ...]:
    """Returns (factor of the rows, L, m, sum of the weights or None)."""
    assert isinstance(self.spec.normalizer, AbsSum), 'AttentionSpec refuses others'
    maximum, total, *sizes = state
    # With eps in L, a row whose scores are all zero or masked has a finite L.
    total, m = total + self.spec.normalizer.eps, self.scale * maximum
    return 1 / total, m + jnp.log(total), m, sizes[0] / total if sizes else None

  def weights(self, s: jax.Array, keep: jax.Array | None = None,
              stat: jax.Array | None = None) -> jax.Array:
    """max(exp(s_ij - L_i) - exp(-L_i), 0), given stat = L_i."""
    return self._relative(self._where(keep, s), stat)[0]

  def cotangent(self, s: jax.Array, keep: jax.Array | None, dp: jax.Array,
                rows: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    s = self._where(keep, s)
    p, power = self._relative(s, rows[0])
    # The derivative of a weight is exp(s - L) where s > 0; that of L is sign(s) exp(s - L), and
    # rows[1] holds all that comes by way of L. At zero, and so where masked, both are zero.
    return p, power * jnp.where(s > 0, dp + rows[1], jnp.where(s < 0, -rows[1], 0))

  def _relative(self, s: jax.Array, log: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The weights and exp(s - L)."""
    assert log is not None, 'weights of softpick are relative to the statistic of their row'
    exp2 = self.arithmetic.exp2
    power = exp2(self.arithmetic.from_log(s, log, self.scale))
    return jnp.maximum(self.arithmetic.less_one(s, self.scale, power, exp2(log * -LOG2E)), 0), power


def make_tile(spec: AttentionSpec, head_dim: int, *, axis: int, length: int | None = None,
              sizes: bool = False, arithmetic: Exact = EXACT) -> ScoreTile:
  """The tile of a spec's kind; see `ScoreTile` for the arguments."""
  kind = RectifiedTile if spec.similarity.kind == 'rectified' else ScoreTile
  return kind(spec, head_dim, axis, length, sizes, arithmetic)
