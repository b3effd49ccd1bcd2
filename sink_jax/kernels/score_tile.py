"""The arithmetic inside a tile of scores, the same in every kernel.

A tile holds the products q.k of some queries and some keys; quantities of rows (queries)
have size one along the axis of the keys. A similarity is used as it is and its derivative is
taken by `jax.jvp` in the kernel, so that a new one needs no change here; for which of them
there is a shorter form is decided by the `arithmetic`.

Forward, a kernel calls `start`, then `update` for every tile of keys, then `finish`. Backward,
the statistics of whole rows are known: scores are computed again, tile by tile, and nothing of
size T x T is ever stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sink_jax.attention import soft_cap, soft_cap_slope
from sink_jax.attention.reference import safe_power
from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.arithmetic import EXACT, MASKED, Exact
from sink_jax.kernels.epilogue import PartialAttention

State = tuple[jax.Array, ...]  # of rows, see `ScoreTile.start`


@dataclasses.dataclass(frozen=True)
class ScoreTile:
  """Rows of attention, accumulated tile by tile.

  Attributes:
    axis: the axis of the keys; a TPU kernel has it first, the others last.
    length: the number of tokens where arrays are padded, else None.
    sizes: accumulate sum_j |f_ij| as well (for similarities other than exp).
    arithmetic: the elementary functions.

  Scores are in the units of the product, q.k + g sqrt(Dh), so that the scale and the change
  to base 2, in which exp is computed, are one factor.
  """

  spec: AttentionSpec
  head_dim: int
  axis: int
  length: int | None = None
  sizes: bool = False
  arithmetic: Exact = EXACT

  @property
  def scale(self) -> float:
    """1 / sqrt(Dh)."""
    return 1 / math.sqrt(self.head_dim)

  def scores(self, product: jax.Array, slope: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """q.k + g(i - j) sqrt(Dh) of queries i and keys j, given the slope of the head.

    Where the similarity has a limit, the scores are within it.
    """
    if self.spec.position.has_bias:
      # Divided by the scale, as `arithmetic` multiplies the whole score by it.
      product = product + slope / self.scale * self.spec.position.distance_bias(i - j)
    return soft_cap(product, self.spec.similarity.limit, self.scale)

  def keep(self, i: jax.Array, j: jax.Array) -> jax.Array:
    """Which scores count; padding sees nothing and is seen by nobody."""
    keep = jnp.asarray(self.spec.mask.keep(i, j))
    return keep if self.length is None else keep & (i < self.length) & (j < self.length)

  # Forward. A row's state is (maximum, sum[, sum of powers]) for exp, else the statistics
  # that are asked for.

  def start(self, shape: tuple[int, ...]) -> State:
    """The state of rows that have seen no key."""
    power, zeros = self.spec.normalizer.power, jnp.zeros(shape, jnp.float32)
    if self.spec.similarity.kind == 'exponential':
      return (jnp.full(shape, MASKED, jnp.float32), zeros) + (zeros,) * (power != 1)
    return (zeros,) * ((power is not None) + self.sizes)

  def update(self, state: State, s: jax.Array, keep: jax.Array | None = None
             ) -> tuple[jax.Array, jax.Array | None, State]:
    """Takes in a tile of scores.

    Args:
      keep: which scores count; None where all of the tile do.

    Returns:
      The weights of the values, the factor of what was summed before (None for one), and the
      new state.
    """
    power, total = self.spec.normalizer.power, lambda x: jnp.sum(x, self.axis, keepdims=True)
    if self.spec.similarity.kind == 'exponential':
      s = s if keep is None else jnp.where(keep, s, MASKED)
      # Online softmax: weights are relative to the largest score so far, and older sums are
      # rescaled when it grows, so that no exponential exceeds one.
      old, *sums = state
      new = jnp.maximum(old, jnp.max(s, self.axis, keepdims=True))
      exp2, exponent = self.arithmetic.exp2, self.arithmetic.from_maximum(s, new, self.scale)
      # Of two maxima the difference comes first: where they are equal nothing changes.
      change = EXACT.from_maximum(old, new, self.scale)
      p, factor = exp2(exponent), exp2(change)
      sums[0] = sums[0] * factor + total(p)
      if power is not None and power != 1:
        sums[1] = sums[1] * exp2(change * power) + total(exp2(exponent * power))
      return p, factor, (new, *sums)
    f = self.weights(s, keep)
    added = [] if power is None else [f if power == 1 else self._where(keep, safe_power(f, power))]
    added += [jnp.abs(f)] * self.sizes
    return f, None, tuple(old + total(new) for old, new in zip(state, added))

  def finish(self, state: State) -> tuple[jax.Array | None, ...]:
    """Returns (factor of the rows or None, stat, power_stat, sizes or None)."""
    power = self.spec.normalizer.power
    if self.spec.similarity.kind == 'exponential':
      assert power is not None, 'AttentionSpec refuses exp without a normalisation'
      maximum, *sums = state
      # A row that sees no key has summed its masked scores, or nothing: its output is zero.
      seen = maximum > MASKED
      lse, power_lse = (p * self.scale * maximum + jnp.log(jnp.where(seen, x, 1))
                        for p, x in ((1, sums[0]), (power, sums[-1])))
      return jnp.where(seen, 1 / sums[0], 0), lse, power_lse, None
    sums = list(state)
    total = None if power is None else sums.pop(0)
    return None, total, total, sums.pop() if self.sizes else None

  # Whole rows are known: backward, and sums over columns.

  def weights(self, s: jax.Array, keep: jax.Array | None = None,
              stat: jax.Array | None = None) -> jax.Array:
    """f_ij; for exp exp(s_ij - lse_i), given stat = lse_i."""
    if self.spec.similarity.kind == 'exponential':
      return self._exp(keep, s, stat)
    # The mask multiplies after f: f of a masked score is 0, whatever f(-inf) may be.
    return self._where(keep, self.arithmetic.weights(self.spec.similarity, s, self.scale))

  def cotangent(self, s: jax.Array, keep: jax.Array | None, dp: jax.Array,
                rows: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Weights and the cotangent of the scores, of a tile.

    Args:
      dp: the products do.v, the cotangent of the weights by way of the output.
      rows: those of `row_cotangents`, which hold everything that comes by way of the statistics.
    """
    power = self.spec.normalizer.power
    if self.spec.similarity.kind == 'exponential':
      assert power is not None, 'AttentionSpec refuses exp without a normalisation'
      p = self.weights(s, keep, rows[0])
      # p (dp - do.o) comes by way of the softmax, and p times the cotangent of lse, whose
      # derivative is p, by way of the statistic; rows[1] holds both terms beside dp.
      ds = p * (dp + rows[1])
      if power != 1:
        ds = ds + self._exp(keep, s, rows[2], power) * rows[3]
      if limit := self.spec.similarity.limit:
        # So far it is the cotangent of the limited score; that of the product goes by the slope.
        ds = ds * soft_cap_slope(s, limit, self.scale)
      return p, ds
    f, df = self.arithmetic.weights_and_slopes(self.spec.similarity, s, self.scale)
    if power:  # no similarity changes the number of keys
      # The derivative of f^p is p f^(p - 1), and `row_cotangents` has multiplied by p already.
      dp = dp + (rows[0] if power == 1 else rows[0] * safe_power(f, power - 1))
    # df is f', dp all that flows into f; masked scores have neither weight nor cotangent.
    return self._where(keep, f), self._where(keep, df * dp)

  def _exp(self, keep: jax.Array | None, s: jax.Array, log, power: float = 1) -> jax.Array:
    exponent = self.arithmetic.from_log(s, log, self.scale * power)
    return self._where(keep, self.arithmetic.exp2(exponent))

  def _where(self, keep: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if keep is None else jnp.where(keep, x, 0)


def row_cotangents(spec: AttentionSpec, result: PartialAttention,
                   cotangents: PartialAttention) -> tuple[jax.Array, ...]:
  """The rows (B, H, T) that the backward pass of a tile needs.

  For exp, sum_j P_ij (do.v_j) = do.o, so that one number per row holds the cotangents of
  the output and of the statistic (the delta of FlashAttention, less one subtraction). The same
  holds for softpick, whose second statistic has no gradient.
  """
  power = spec.normalizer.power
  dstat, dpower = cotangents.row_stats_BxHxT, cotangents.power_row_stats_BxHxT
  if spec.similarity.kind == 'additive':
    if not power:
      return ()
    return ((dstat + dpower) * (1 if power == 1 else power),)
  float32 = lambda x: x.astype(jnp.float32)
  assert power is not None, 'AttentionSpec refuses exp without a normalisation'
  delta = jnp.einsum('bthd,bthd->bht', float32(cotangents.out_BxTxHxDh),
                     float32(result.out_BxTxHxDh))
  if spec.similarity.kind == 'rectified':
    return result.row_stats_BxHxT, dstat - delta
  if power == 1:
    return result.row_stats_BxHxT, dstat + dpower - delta
  return result.row_stats_BxHxT, dstat - delta, result.power_row_stats_BxHxT, power * dpower
