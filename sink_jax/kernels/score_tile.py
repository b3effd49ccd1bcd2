"""The arithmetic inside a tile of scores, the same in every Pallas kernel.

A tile holds the products q.k of some queries and some keys; row statistics (one number per query)
have size one along the axis of the keys. A kernel calls the similarity and takes its derivative by
`jax.jvp`, so that a new similarity needs no change here.

Forward, a kernel calls `start`, then `update` for every tile of keys, then `finish`. Backward,
the row statistics are known: scores are computed again, tile by tile, and nothing of size
T x T is ever stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sink_jax.attention import MASKED, soft_cap, soft_cap_slope
from sink_jax.attention.reference import safe_power
from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.epilogue import PartialAttention

_LOG2E = math.log2(math.e)  # exp is computed in base 2
State = tuple[jax.Array, ...]  # of rows, see `ScoreTile.start`


@dataclasses.dataclass(frozen=True)
class ScoreTile:
  """Rows of attention, accumulated tile by tile; for every similarity but Softpick.

  Scores are in the units of the product, q.k + g sqrt(Dh), so that the scale and the change to base
  2 are one factor. axis: the keys' axis in `update`. length: number of tokens if arrays are padded.
  """

  spec: AttentionSpec
  head_dim: int
  axis: int
  length: int | None = None

  @property
  def scale(self) -> float:
    """1 / sqrt(Dh)."""
    return 1 / math.sqrt(self.head_dim)

  def scores(self, product: jax.Array, slope: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """q.k + g(i - j) sqrt(Dh), capped as the similarity says, given the slope of the head."""
    if self.spec.position.has_bias:
      product = product + slope / self.scale * self.spec.position.distance_bias(i - j)
    return soft_cap(product, self.spec.similarity.cap, self.scale)

  def keep(self, i: jax.Array, j: jax.Array) -> jax.Array:
    """Which scores count; padding sees nothing and is not seen."""
    keep = jnp.asarray(self.spec.mask.keep(i, j))
    return keep if self.length is None else keep & (i < self.length) & (j < self.length)

  # A back end may override these three.
  def reduce(self, f: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """f of every row of a tile, such as jnp.sum."""
    return f(x, self.axis, keepdims=True)

  def spread(self, row: jax.Array, x: jax.Array) -> jax.Array:
    """Rows, to be combined with a tile x."""
    return row

  def to_power(self, f: jax.Array, power: float) -> jax.Array:
    return safe_power(f, power)

  def start(self, shape: tuple[int, ...]) -> State:
    """The state of rows that have seen no key.

    It is (maximum, sum[, sum of powers]) for exp, else (the statistic,) or () without one.
    """
    power, zeros = self.spec.normalizer.power, jnp.zeros(shape, jnp.float32)
    if self.spec.similarity.kind == 'exponential':
      return (jnp.full(shape, MASKED, jnp.float32), zeros) + (zeros,) * (power != 1)
    return () if power is None else (zeros,)

  def update(
    self,
    state: State,
    s: jax.Array,
    keep: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array | None, State]:
    """Takes in a tile of scores.

    Args:
      keep: which scores count; None if all do.

    Returns:
      The weights of the values, the factor by which earlier sums are multiplied (None means 1), and
      the new state.
    """
    power, total = self.spec.normalizer.power, functools.partial(self.reduce, jnp.sum)
    if self.spec.similarity.kind == 'exponential':
      s = s if keep is None else jnp.where(keep, s, MASKED)
      # Online softmax: weights are relative to the largest score so far, and older sums are
      # rescaled when it grows, so that no exponential exceeds one. The difference is taken before
      # the factor, so that large scores lose no precision.
      old, *sums = state
      new = jnp.maximum(old, self.reduce(jnp.max, s))
      exponent, change = (x * (self.scale * _LOG2E) for x in (s - self.spread(new, s), old - new))
      p, factor = jnp.exp2(exponent), jnp.exp2(change)
      sums[0] = sums[0] * factor + total(p)
      if power is not None and power != 1:
        sums[1] = sums[1] * jnp.exp2(change * power) + total(jnp.exp2(exponent * power))
      return p, factor, (new, *sums)
    # The mask multiplies after f: f of a masked score is 0 even where f(-inf) is not.
    f = _where(keep, self.spec.similarity(s * self.scale))
    if power is None:
      return f, None, state
    added = f if power == 1 else _where(keep, self.to_power(f, power))
    return f, None, (state[0] + total(added),)

  def finish(self, state: State) -> tuple[jax.Array | None, ...]:
    """Returns (factor of the rows or None, stat, power_stat)."""
    power = self.spec.normalizer.power
    if self.spec.similarity.kind == 'exponential':
      assert power is not None, 'AttentionSpec refuses exp without a normalisation'
      maximum, *sums = state
      # A row that sees no key has summed its masked scores, or nothing: its output is zero.
      seen = maximum > MASKED
      lse, power_lse = (
        p * self.scale * maximum + jnp.log(jnp.where(seen, x, 1))
        for p, x in ((1, sums[0]), (power, sums[-1]))
      )
      return jnp.where(seen, 1 / sums[0], 0), lse, power_lse
    return None, *(state * 2 or (None, None))

  def cotangent(
    self,
    s: jax.Array,
    keep: jax.Array | None,
    dp: jax.Array,
    rows: Sequence[jax.Array],
  ) -> tuple[jax.Array, jax.Array]:
    """Weights and the cotangent of the scores, of a tile.

    Args:
      dp: the products do.v, the cotangent of the weights through the output.
      rows: from `row_cotangents`; they hold everything that comes through the statistics.
    """
    power = self.spec.normalizer.power
    if self.spec.similarity.kind == 'exponential':
      relative = lambda log, power: _where(
        keep, jnp.exp2((s * (self.scale * power) - log) * _LOG2E)
      )
      p = relative(rows[0], 1)
      # The softmax contributes p (dp - do.o). The statistic contributes p times the cotangent of
      # lse, since p is the derivative of lse. rows[1] holds both terms that are added to dp.
      ds = p * (dp + rows[1])
      if power != 1:
        ds = ds + relative(rows[2], power) * rows[3]
      if limit := self.spec.similarity.cap:
        # ds is the cotangent of the capped score; times the slope it is that of the product.
        ds = ds * soft_cap_slope(s, limit, self.scale)
      return p, ds
    s = s * self.scale
    f, df = jax.jvp(self.spec.similarity, (s,), (jnp.ones_like(s),))
    if power:  # no similarity changes the number of keys
      # The derivative of f^p is p f^(p - 1), and `row_cotangents` has multiplied by p already.
      dp = dp + (rows[0] if power == 1 else rows[0] * self.to_power(f, power - 1))
    # df is f', dp all that flows into f; masked scores have neither weight nor cotangent.
    return _where(keep, f), _where(keep, df * dp)


def _where(keep: jax.Array | None, x: jax.Array) -> jax.Array:
  return x if keep is None else jnp.where(keep, x, 0)


def row_cotangents(
  spec: AttentionSpec,
  result: PartialAttention,
  cotangents: PartialAttention,
) -> tuple[jax.Array, ...]:
  """The rows (B, H, T) that the backward pass of a tile needs.

  For exp, sum_j P_ij (do.v_j) = do.o, so that one number per row holds the cotangents of
  the output and of the statistic (the delta of FlashAttention, less one subtraction).
  """
  power = spec.normalizer.power
  dstat, dpower = cotangents.row_stats_BxHxT, cotangents.power_row_stats_BxHxT
  if spec.similarity.kind == 'additive':
    return ((dstat + dpower) * power,) if power else ()
  float32 = lambda x: x.astype(jnp.float32)
  delta = jnp.einsum(
    'bthd,bthd->bht', float32(cotangents.out_BxTxHxDh), float32(result.out_BxTxHxDh)
  )
  if power == 1:
    return result.row_stats_BxHxT, dstat + dpower - delta
  assert power is not None, 'AttentionSpec refuses exp without a normalisation'
  return result.row_stats_BxHxT, dstat - delta, result.power_row_stats_BxHxT, power * dpower
