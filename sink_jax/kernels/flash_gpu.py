"""Pallas kernels for NVIDIA GPUs from Ampere on.

A program owns one tile of queries or keys of one head and goes through tiles of the other
kind in a loop, with what it accumulates in registers. No atomics: every program owns what it
writes, so that results repeat bit for bit. The backward pass is two kernels for the same reason:
dq belongs to queries, dk and dv to keys, and the scores are computed in both.

Arrays keep the axes (B, T, H, Dh) of the model; a tile is loaded with the stride of its head.
What the sizes of tiles are, and why, stands in `gpu_layout.BLOCKS`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.gpu_layout import Index, KernelLayout, products, weighted
from sink_jax.kernels.score_tile import State


def unsupported(head_dim: int) -> str | None:
  """Why these kernels do not run, or None."""
  if head_dim % 16 or head_dim > 256:
    return f'head_dim = {head_dim} is not a multiple of 16 up to 256'
  return None


def forward(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
            v_BxTxHkvxDh: jax.Array, slopes_H: jax.Array | None = None,
            interpret: bool = False) -> tuple[jax.Array, ...]:
  """Returns rows (B, T, H, Dh) in the dtype of v, stat and power_stat (B, H, T) float32."""
  q, k, v = q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh
  layout = KernelLayout('forward', spec, q, k, slopes_H, interpret)
  out, *stats = layout.over_queries(
      _forward_kernel, [layout.own(q), layout.whole(k), layout.whole(v)],
      [layout.own(q, dtype=v.dtype), layout.own_row(), layout.own_row()])
  return layout.tokens(out) + layout.rows(*stats)


def statistics(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
               slopes_H: jax.Array | None = None, interpret: bool = False) -> tuple[jax.Array, ...]:
  """Returns stat, power_stat and sum_j |f_ij| (B, H, T); the last is zero for exp."""
  layout = KernelLayout('forward', spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret, sizes=True)
  return layout.rows(*layout.over_queries(
      _statistics_kernel, [layout.own(q_BxTxHxDh), layout.whole(k_BxTxHkvxDh)],
      [layout.own_row()] * 3))


def backward(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
             v_BxTxHkvxDh: jax.Array, do_BxTxHxDh: jax.Array, *rows_BxHxT: jax.Array,
             slopes_H: jax.Array | None = None, interpret: bool = False) -> tuple[jax.Array, ...]:
  """Returns dq, dk, dv; the rows are those of `row_cotangents`."""
  q, k, v, do = q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, do_BxTxHxDh
  layout = KernelLayout('dq', spec, q, k, slopes_H, interpret)
  dq = layout.tokens(*layout.over_queries(
      _dq_kernel, [layout.own(q), layout.whole(k), layout.whole(v), layout.own(do),
                   *map(layout.own_row, rows_BxHxT)], [layout.own(q)]))
  layout = KernelLayout('dkv', spec, q, k, slopes_H, interpret)
  return dq + layout.tokens(*layout.over_keys(
      _dkv_kernel, [layout.group(q), layout.own(k), layout.own(v), layout.group(do),
                    *map(layout.group_row, rows_BxHxT)], [layout.own(k), layout.own(v)]))


def column_sums(spec: AttentionSpec, keys: int, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
                row_stats_BxHxT: jax.Array, *weights_BxHxT: jax.Array,
                slopes_H: jax.Array | None = None, interpret: bool = False
                ) -> tuple[jax.Array, ...]:
  """Sums over the rows i of the first `keys` keys, (B, H, keys) float32 each.

  Returns sum_i f_ij w_i of the first weight w, and sum_i |f_ij| w_i of a second one.
  """
  layout = KernelLayout('columns', spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  layout.only(keys)
  sums = layout.over_keys(
      _columns_kernel, [layout.whole(q_BxTxHxDh), layout.own(k_BxTxHkvxDh),
                        *map(layout.whole_row, (row_stats_BxHxT, *weights_BxHxT))],
      [layout.part()] * len(weights_BxHxT))
  return tuple(x.sum(2)[..., :keys] for x in sums)  # over the parts, in a fixed order


def _forward_kernel(layout: KernelLayout, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
                    k_ref: jax.Ref, v_ref: jax.Ref, out_ref: jax.Ref, *stat_refs: jax.Ref) -> None:
  slope, i, bounds = layout.own_queries(ranges_ref, slopes_ref)
  q = layout.load(q_ref, 0, layout.blocks.own)

  # The parts of the head dimension are separate arrays (q, d), see `gpu_layout`.
  def step(kj: jax.Array, masked: bool, carry: tuple[list[jax.Array], State],
           ) -> tuple[list[jax.Array], State]:
    out, state = carry
    s, keep = layout.scores(slope, q, layout.other(k_ref, kj), i, layout.others(kj), masked)
    p, factor, state = layout.tile.update(state, s, keep)
    v = layout.other(v_ref, kj)
    # Weights are rounded to the dtype of v, for the tensor cores; their sums were taken before.
    added = weighted(p.astype(v_ref.dtype), v)
    return [o + x if factor is None else o * factor + x for o, x in zip(out, added)], state

  start = layout.zeros(), layout.tile.start((layout.blocks.own, 1))
  out, state = layout.loop(bounds, step, start)
  factor, stat, power_stat, _ = layout.tile.finish(state)
  layout.store(out_ref, out if factor is None else [o * factor for o in out])
  _store_rows(stat_refs, stat, power_stat)


def _statistics_kernel(layout: KernelLayout, ranges_ref: jax.Ref, slopes_ref: jax.Ref,
                       q_ref: jax.Ref, k_ref: jax.Ref, *stat_refs: jax.Ref) -> None:
  slope, i, bounds = layout.own_queries(ranges_ref, slopes_ref)
  q = layout.load(q_ref, 0, layout.blocks.own)

  def step(kj: jax.Array, masked: bool, state: State) -> State:
    s, keep = layout.scores(slope, q, layout.other(k_ref, kj), i, layout.others(kj), masked)
    return layout.tile.update(state, s, keep)[2]

  state = layout.loop(bounds, step, layout.tile.start((layout.blocks.own, 1)))
  _store_rows(stat_refs, *layout.tile.finish(state)[1:])


def _dq_kernel(layout: KernelLayout, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
               k_ref: jax.Ref, v_ref: jax.Ref, do_ref: jax.Ref, *refs: jax.Ref) -> None:
  *row_refs, dq_ref = refs
  # A program owns a tile of queries and computes its scores again, from the rows' statistics.
  slope, i, bounds = layout.own_queries(ranges_ref, slopes_ref)
  q, do = (layout.load(ref, 0, layout.blocks.own) for ref in (q_ref, do_ref))
  rows = [ref[...][:, None] for ref in row_refs]

  def step(kj: jax.Array, masked: bool, dq: list[jax.Array]) -> list[jax.Array]:
    k = layout.other(k_ref, kj)
    s, keep = layout.scores(slope, q, k, i, layout.others(kj), masked)
    dp = products(do, layout.other(v_ref, kj))
    _, ds = layout.tile.cotangent(s, keep, dp, rows)
    return [x + y for x, y in zip(dq, weighted(ds.astype(k_ref.dtype), k))]

  dq = layout.loop(bounds, step, layout.zeros())
  layout.store(dq_ref, [x * layout.tile.scale for x in dq])


def _dkv_kernel(layout: KernelLayout, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
                k_ref: jax.Ref, v_ref: jax.Ref, do_ref: jax.Ref, *refs: jax.Ref) -> None:
  # A program owns a tile of keys and goes through all query heads of its group, so that nobody
  # else adds to its dk and dv. Tiles are (keys, queries): p and ds then enter both products as
  # they are, without a transposition.
  *row_refs, dk_ref, dv_ref = refs
  group = layout.heads // layout.kv_heads
  j, bounds = layout.own_keys(ranges_ref)
  k, v = (layout.load(ref, 0, layout.blocks.own) for ref in (k_ref, v_ref))
  # This kernel's grid counts heads of keys, while slopes are those of query heads.
  first_head = pl.program_id(1) * group

  def head(g: Index, carry: tuple[list[jax.Array], list[jax.Array]],
           ) -> tuple[list[jax.Array], list[jax.Array]]:
    slope = slopes_ref[first_head + g]

    def step(qi: jax.Array, masked: bool, carry: tuple[list[jax.Array], list[jax.Array]],
             ) -> tuple[list[jax.Array], list[jax.Array]]:
      dk, dv = carry
      q, do = layout.other(q_ref, qi, g), layout.other(do_ref, qi, g)
      s, keep = layout.scores(slope, q, k, layout.others(qi), j, masked, keys_first=True)
      rows = [layout.other_row(ref, qi, g) for ref in row_refs]
      p, ds = layout.tile.cotangent(s, keep, products(v, do), rows)
      dv = [x + y for x, y in zip(dv, weighted(p.astype(do_ref.dtype), do))]
      dk = [x + y for x, y in zip(dk, weighted(ds.astype(q_ref.dtype), q))]
      return dk, dv

    return layout.loop(bounds, step, carry)

  carry = layout.zeros(), layout.zeros()
  dk, dv = head(0, carry) if group == 1 else lax.fori_loop(0, group, head, carry)
  layout.store(dk_ref, [x * layout.tile.scale for x in dk])
  layout.store(dv_ref, dv)


def _columns_kernel(layout: KernelLayout, ranges_ref: jax.Ref, slopes_ref: jax.Ref, q_ref: jax.Ref,
                    k_ref: jax.Ref, stat_ref: jax.Ref, *refs: jax.Ref) -> None:
  weight_refs, sum_refs = refs[:len(refs) // 2], refs[len(refs) // 2:]
  # A program owns a tile of keys, and a part of the queries where few keys are asked for: with
  # one program per tile of four keys the rest of the GPU would idle.
  j, bounds = layout.own_keys(ranges_ref)
  if layout.parts > 1:
    part, count = lax.rem(pl.program_id(0), layout.parts), bounds[3] - bounds[0]
    lo, hi = (bounds[0] + lax.div(count * (part + n), layout.parts) for n in (0, 1))
    bounds = [jnp.clip(x, lo, hi) for x in bounds]
  slope = slopes_ref[pl.program_id(1)]
  k = layout.load(k_ref, 0, layout.blocks.own)

  def step(qi: jax.Array, masked: bool, sums: list[jax.Array]) -> list[jax.Array]:
    s, keep = layout.scores(slope, layout.other(q_ref, qi), k, layout.others(qi), j, masked,
                          keys_first=True)
    f = layout.tile.weights(s, keep, layout.other_row(stat_ref, qi))
    return [x + g * layout.other_row(ref, qi)
            for x, g, ref in zip(sums, (f, jnp.abs(f)), weight_refs)]

  # Sums stay (k, q) tiles until the end: one reduction over the lanes instead of one per step.
  zeros = jnp.zeros((layout.blocks.own, layout.blocks.other), jnp.float32)
  for ref, x in zip(sum_refs, layout.loop(bounds, step, [zeros] * len(sum_refs))):
    ref[...] = jnp.sum(x, 1)


def _store_rows(refs: tuple[jax.Ref, ...], *stats: jax.Array | None) -> None:
  for ref, stat in zip(refs, stats):
    ref[...] = jnp.zeros(ref.shape, jnp.float32) if stat is None else stat.reshape(ref.shape)
