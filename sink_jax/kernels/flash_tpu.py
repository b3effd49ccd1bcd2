"""Pallas kernels for TPUs (Mosaic).

Tiles of scores are transposed, (keys, queries), so that quantities of rows lie along the
lanes, (1, queries): a column of statistics would fill one lane of 128. The last axes of every
grid run in order on a core and accumulate in scratch memory, while the next tiles are copied from
HBM; the axes before them are independent. Outputs of queries come as (Dh, queries) and are
transposed outside. The backward pass is two kernels, dq per tile of queries and dk, dv per tile
of keys, each of which computes the scores again. Letters in names: q and k are the sizes of a
tile, D is the head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.score_tile import ScoreTile, State
from sink_jax.kernels.tpu_layout import SUBLANES, KernelLayout


def unsupported(head_dim: int) -> str | None:
  """Why these kernels do not run, or None."""
  if head_dim % SUBLANES or head_dim > 256:
    return f'head_dim = {head_dim} is not a multiple of {SUBLANES} up to 256'
  return None


def forward(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
            v_BxTxHkvxDh: jax.Array, slopes_H: jax.Array | None = None,
            interpret: bool = False) -> tuple[jax.Array, ...]:
  """Returns rows (B, T, H, Dh) in the dtype of v, stat and power_stat (B, H, T) float32."""
  layout = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  out, stats = layout.over_queries(
      functools.partial(_forward_kernel, layout.tile),
      [layout.queries(q_BxTxHxDh), layout.keys(k_BxTxHkvxDh), layout.keys(v_BxTxHkvxDh)],
      [layout.per_query(v_BxTxHkvxDh.dtype), layout.per_row(2)],
      [layout.scratch(layout.head_dim, layout.block), *layout.state])
  return layout.tokens_first(out), *layout.split(stats)


def statistics(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
               slopes_H: jax.Array | None = None, interpret: bool = False) -> tuple[jax.Array, ...]:
  """Returns stat, power_stat and sum_j |f_ij| (B, H, T); the last is zero for exp."""
  layout = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret, sizes=True)
  stats, = layout.over_queries(
      functools.partial(_statistics_kernel, layout.tile),
      [layout.queries(q_BxTxHxDh), layout.keys(k_BxTxHkvxDh)], [layout.per_row(3)],
      layout.state)
  return layout.split(stats)


def backward(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
             v_BxTxHkvxDh: jax.Array, do_BxTxHxDh: jax.Array, *rows_BxHxT: jax.Array,
             slopes_H: jax.Array | None = None, interpret: bool = False) -> tuple[jax.Array, ...]:
  """Returns dq, dk, dv; the rows are those of `row_cotangents`."""
  layout = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  inputs = [layout.queries(q_BxTxHxDh), layout.keys(k_BxTxHkvxDh), layout.keys(v_BxTxHkvxDh),
            layout.queries(do_BxTxHxDh), layout.rows(rows_BxHxT)]
  dq, = layout.over_queries(
      functools.partial(_dq_kernel, layout.tile), inputs, [layout.per_query(q_BxTxHxDh.dtype)],
      [layout.scratch(layout.head_dim, layout.block)])
  dk, dv = layout.over_keys(
      functools.partial(_dkv_kernel, layout.tile), inputs,
      [layout.per_key(k_BxTxHkvxDh.dtype), layout.per_key(v_BxTxHkvxDh.dtype)],
      [layout.scratch(layout.block, layout.head_dim)] * 2)
  return (layout.tokens_first(dq), layout.tokens_first(dk, transposed=False),
          layout.tokens_first(dv, transposed=False))


def column_sums(spec: AttentionSpec, keys: int, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
                row_stats_BxHxT: jax.Array, *weights_BxHxT: jax.Array,
                slopes_H: jax.Array | None = None, interpret: bool = False
                ) -> tuple[jax.Array, ...]:
  """Sums over the rows i of the first `keys` keys, (B, H, keys) float32 each.

  Returns sum_i f_ij w_i of the first weight w, and sum_i |f_ij| w_i of a second one.
  """
  layout = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  # The weights are the left side of a product of matrices, whose rows fill eight sublanes.
  zeros = [jnp.zeros_like(row_stats_BxHxT)] * (SUBLANES - len(weights_BxHxT))
  sums, = layout.over_keys(
      functools.partial(_columns_kernel, layout.tile),
      [layout.queries(q_BxTxHxDh), layout.keys(k_BxTxHkvxDh), layout.rows([row_stats_BxHxT]),
       layout.rows([*weights_BxHxT, *zeros])],
      [layout.per_column()], [layout.scratch(SUBLANES, layout.block)],
      per_head=True, keys=keys)
  return tuple(sums[:, :, n, :keys] for n in range(len(weights_BxHxT)))


def _visit(ranges_ref: jax.Ref, own: jax.Array, t: jax.Array,
           step: Callable[[jax.Array, bool], None]) -> None:
  """Calls step(number of the other tile, is it masked?), if there is one at step t.

  The grid has as many steps as the tile that needs most; others do nothing in the last ones.
  """
  first, first_full, last_full, last = (ranges_ref[n, own] for n in range(4))
  other = first + t
  full = (first_full <= other) & (other < last_full)
  pl.when(full)(lambda: step(other, False))
  pl.when((other < last) & jnp.logical_not(full))(lambda: step(other, True))


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
  """Sums over the given axis of each; float32 inputs at full precision."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), precision=precision,
                         preferred_element_type=jnp.float32)


def _scores(tile: ScoreTile, slope: jax.Array, q_ref: jax.Ref, k_ref: jax.Ref, qi: jax.Array,
            kj: jax.Array, masked: bool) -> tuple[jax.Array, jax.Array | None]:
  """Scores (k, q) and which of them count, None for all."""
  block = q_ref.shape[0]
  i = qi * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
  j = kj * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
  product = _dot(k_ref[...], q_ref[...], (1, 1))
  return tile.scores(product, slope, i, j), tile.keep(i, j) if masked else None


def _forward_kernel(tile: ScoreTile, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
                    k_ref: jax.Ref, v_ref: jax.Ref, out_ref: jax.Ref, stats_ref: jax.Ref,
                    out_Dxq, *state: jax.Ref) -> None:
  # A program of the grid's parallel axes owns a tile of queries; step t is a tile of its keys.
  # out_Dxq and the state of the rows last over the steps, in scratch memory.
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start() -> None:
    out_Dxq[...] = jnp.zeros_like(out_Dxq)
    _start(tile, state)

  def step(kj: jax.Array, masked: bool) -> None:
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    p, factor, new = tile.update(_read(state), s, keep)
    before = out_Dxq[...] if factor is None else out_Dxq[...] * factor
    v = v_ref[...]
    out_Dxq[...] = before + _dot(v, p.astype(v.dtype), (0, 0))
    _write(state, new)

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish() -> None:
    factor, stat, power_stat, _ = tile.finish(_read(state))
    out = out_Dxq[...] if factor is None else out_Dxq[...] * factor
    out_ref[...] = out.astype(out_ref.dtype)
    _store_rows(stats_ref, stat, power_stat)


def _statistics_kernel(tile: ScoreTile, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
                       k_ref: jax.Ref, stats_ref: jax.Ref, *state: jax.Ref) -> None:
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]
  pl.when(t == 0)(lambda: _start(tile, state))

  def step(kj: jax.Array, masked: bool) -> None:
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    _write(state, tile.update(_read(state), s, keep)[2])

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish() -> None:
    _store_rows(stats_ref, *tile.finish(_read(state))[1:])


def _dq_kernel(tile: ScoreTile, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
               k_ref: jax.Ref, v_ref: jax.Ref, do_ref: jax.Ref, rows_ref: jax.Ref, dq_ref: jax.Ref,
               dq_Dxq) -> None:
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start() -> None:
    dq_Dxq[...] = jnp.zeros_like(dq_Dxq)

  def step(kj: jax.Array, masked: bool) -> None:
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    dp = _dot(v_ref[...], do_ref[...], (1, 1))
    _, ds = tile.cotangent(s, keep, dp, _rows(rows_ref))
    k = k_ref[...]
    dq_Dxq[...] += _dot(k, ds.astype(k.dtype), (0, 0))

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish() -> None:
    # ds is the cotangent of q.k / sqrt(Dh): the factor is applied once instead of in every step.
    dq_ref[...] = (dq_Dxq[...] * tile.scale).astype(dq_ref.dtype)


def _dkv_kernel(tile: ScoreTile, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
                k_ref: jax.Ref, v_ref: jax.Ref, do_ref: jax.Ref, rows_ref: jax.Ref, dk_ref: jax.Ref,
                dv_ref: jax.Ref, dk_kxD, dv_kxD) -> None:
  # A program owns a tile of keys; its steps are the query heads g of the group and their tiles of
  # queries, so that dk and dv of grouped heads are summed without atomics.
  kj, g, t = pl.program_id(2), pl.program_id(3), pl.program_id(4)
  slope = slopes_ref[pl.program_id(1) * pl.num_programs(3) + g]

  @pl.when((g == 0) & (t == 0))
  def start() -> None:
    dk_kxD[...] = jnp.zeros_like(dk_kxD)
    dv_kxD[...] = jnp.zeros_like(dv_kxD)

  def step(qi: jax.Array, masked: bool) -> None:
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    q, do = q_ref[...], do_ref[...]
    dp = _dot(v_ref[...], do, (1, 1))
    p, ds = tile.cotangent(s, keep, dp, _rows(rows_ref))
    dv_kxD[...] += _dot(p.astype(do.dtype), do, (1, 0))
    dk_kxD[...] += _dot(ds.astype(q.dtype), q, (1, 0))

  _visit(ranges_ref, kj, t, step)

  @pl.when((g == pl.num_programs(3) - 1) & (t == pl.num_programs(4) - 1))
  def finish() -> None:
    dk_ref[...] = (dk_kxD[...] * tile.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_kxD[...].astype(dv_ref.dtype)


def _columns_kernel(tile: ScoreTile, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
                    k_ref: jax.Ref, stat_ref: jax.Ref, weights_ref: jax.Ref, sums_ref: jax.Ref,
                    sums_8xk) -> None:
  # A program owns a tile of keys of one query head; its steps are the queries that see it.
  kj, t = pl.program_id(2), pl.program_id(4)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start() -> None:
    sums_8xk[...] = jnp.zeros_like(sums_8xk)

  def step(qi: jax.Array, masked: bool) -> None:
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    f = tile.weights(s, keep, stat_ref[...])
    # A product of matrices turns sums over lanes into rows: the first row holds the sums
    # of f, the second those of |f|.
    weights = weights_ref[...]
    sums = _dot(weights, f, (1, 1))
    if tile.spec.signed:
      row = lax.broadcasted_iota(jnp.int32, sums.shape, 0)
      sums = jnp.where(row == 0, sums, _dot(weights, jnp.abs(f), (1, 1)))
    sums_8xk[...] += sums

  _visit(ranges_ref, kj, t, step)

  @pl.when(t == pl.num_programs(4) - 1)
  def finish() -> None:
    sums_ref[...] = sums_8xk[...]


def _start(tile: ScoreTile, state: tuple[jax.Ref, ...]) -> None:
  if state:
    _write(state, tile.start(state[0].shape))


def _read(refs: tuple[jax.Ref, ...]) -> State:
  return tuple(ref[...] for ref in refs)


def _write(refs: tuple[jax.Ref, ...], values: State) -> None:
  for ref, value in zip(refs, values, strict=True):
    ref[...] = value


def _rows(rows_ref: jax.Ref) -> list[jax.Array]:
  return [rows_ref[n:n + 1, :] for n in range(rows_ref.shape[0])]


def _store_rows(stats_ref: jax.Ref, *stats: jax.Array | None) -> None:
  for n, stat in enumerate(stats):
    shape = 1, stats_ref.shape[1]
    stats_ref[n:n + 1, :] = jnp.zeros(shape, jnp.float32) if stat is None else stat
