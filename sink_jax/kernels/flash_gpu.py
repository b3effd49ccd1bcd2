"""Pallas kernels for NVIDIA GPUs from Ampere on.

A program owns one tile of queries or keys of one head and goes through tiles of the other
kind. No atomics: every program owns what it writes, so that results repeat bit for bit.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sink_jax.kernels.gpu_layout import KernelLayout, products, weighted


def unsupported(head_dim: int) -> str | None:
  """Why these kernels do not run, or None."""
  if head_dim % 16 or head_dim > 256:
    return f'head_dim = {head_dim} is not a multiple of 16 up to 256'
  return None


def forward(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, slopes_H=None, interpret=False):
  """Returns rows (B, T, H, Dh) in the dtype of v, stat and power_stat (B, H, T) float32."""
  q, k, v = q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh
  program = KernelLayout('forward', spec, q, k, slopes_H, interpret)
  out, *stats = program.over_queries(
      _forward_kernel, [program.own(q), program.whole(k), program.whole(v)],
      [program.own(q, dtype=v.dtype), program.own_row(), program.own_row()])
  return program.tokens(out) + program.rows(*stats)


def statistics(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H=None, interpret=False):
  """Returns stat, power_stat and sum_j |f_ij| (B, H, T); the last is zero for exp."""
  program = KernelLayout('forward', spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret, sizes=True)
  return program.rows(*program.over_queries(
      _statistics_kernel, [program.own(q_BxTxHxDh), program.whole(k_BxTxHkvxDh)],
      [program.own_row()] * 3))


def backward(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, do_BxTxHxDh, *rows_BxHxT,
             slopes_H=None, interpret=False):
  """Returns dq, dk, dv; the rows are those of `row_cotangents`."""
  q, k, v, do = q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, do_BxTxHxDh
  program = KernelLayout('dq', spec, q, k, slopes_H, interpret)
  dq = program.tokens(*program.over_queries(
      _dq_kernel, [program.own(q), program.whole(k), program.whole(v), program.own(do),
                   *map(program.own_row, rows_BxHxT)], [program.own(q)]))
  program = KernelLayout('dkv', spec, q, k, slopes_H, interpret)
  return dq + program.tokens(*program.over_keys(
      _dkv_kernel, [program.group(q), program.own(k), program.own(v), program.group(do),
                    *map(program.group_row, rows_BxHxT)], [program.own(k), program.own(v)]))


def column_sums(spec, keys, q_BxTxHxDh, k_BxTxHkvxDh, row_stats_BxHxT, *weights_BxHxT,
                slopes_H=None,     interpret=False):
  """Sums over the rows i of the first `keys` keys, (B, H, keys) float32 each.

  Returns sum_i f_ij w_i of the first weight w, and sum_i |f_ij| w_i of a second one.
  """
  program = KernelLayout('columns', spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  program.only(keys)
  sums = program.over_keys(
      _columns_kernel, [program.whole(q_BxTxHxDh), program.own(k_BxTxHkvxDh),
                        *map(program.whole_row, (row_stats_BxHxT, *weights_BxHxT))],
      [program.part()] * len(weights_BxHxT))
  return tuple(x.sum(2)[..., :keys] for x in sums)


def _forward_kernel(program, ranges_ref, slopes_ref, q_ref, k_ref, v_ref, out_ref, *stat_refs):
  slope, i, bounds = program.own_queries(ranges_ref, slopes_ref)
  q = program.load(q_ref, 0, program.blocks.own)

  def step(kj, masked, carry):
    out, state = carry
    s, keep = program.scores(slope, q, program.other(k_ref, kj), i, program.others(kj), masked)
    p, factor, state = program.tile.update(state, s, keep)
    v = program.other(v_ref, kj)
    added = weighted(p.astype(v_ref.dtype), v)
    return [o + x if factor is None else o * factor + x for o, x in zip(out, added)], state

  start = program.zeros(), program.tile.start((program.blocks.own, 1))
  out, state = program.loop(bounds, step, start)
  factor, stat, power_stat, _ = program.tile.finish(state)
  program.store(out_ref, out if factor is None else [o * factor for o in out])
  _store_rows(stat_refs, stat, power_stat)


def _statistics_kernel(program, ranges_ref, slopes_ref, q_ref, k_ref, *stat_refs):
  slope, i, bounds = program.own_queries(ranges_ref, slopes_ref)
  q = program.load(q_ref, 0, program.blocks.own)

  def step(kj, masked, state):
    s, keep = program.scores(slope, q, program.other(k_ref, kj), i, program.others(kj), masked)
    return program.tile.update(state, s, keep)[2]

  state = program.loop(bounds, step, program.tile.start((program.blocks.own, 1)))
  _store_rows(stat_refs, *program.tile.finish(state)[1:])


def _dq_kernel(program, ranges_ref, slopes_ref, q_ref, k_ref, v_ref, do_ref, *refs):
  *row_refs, dq_ref = refs
  slope, i, bounds = program.own_queries(ranges_ref, slopes_ref)
  q, do = (program.load(ref, 0, program.blocks.own) for ref in (q_ref, do_ref))
  rows = [ref[...][:, None] for ref in row_refs]

  def step(kj, masked, dq):
    k = program.other(k_ref, kj)
    s, keep = program.scores(slope, q, k, i, program.others(kj), masked)
    dp = products(do, program.other(v_ref, kj))
    _, ds = program.tile.cotangent(s, keep, dp, rows)
    return [x + y for x, y in zip(dq, weighted(ds.astype(k_ref.dtype), k))]

  dq = program.loop(bounds, step, program.zeros())
  program.store(dq_ref, [x * program.tile.scale for x in dq])


def _dkv_kernel(program, ranges_ref, slopes_ref, q_ref, k_ref, v_ref, do_ref, *refs):
  *row_refs, dk_ref, dv_ref = refs
  group = program.heads // program.kv_heads
  j, bounds = program.own_keys(ranges_ref)
  k, v = (program.load(ref, 0, program.blocks.own) for ref in (k_ref, v_ref))
  first_head = pl.program_id(1) * group

  def head(g, carry):
    slope = slopes_ref[first_head + g]

    def step(qi, masked, carry):
      dk, dv = carry
      q, do = program.other(q_ref, qi, g), program.other(do_ref, qi, g)
      s, keep = program.scores(slope, q, k, program.others(qi), j, masked, keys_first=True)
      rows = [program.other_row(ref, qi, g) for ref in row_refs]
      p, ds = program.tile.cotangent(s, keep, products(v, do), rows)
      dv = [x + y for x, y in zip(dv, weighted(p.astype(do_ref.dtype), do))]
      dk = [x + y for x, y in zip(dk, weighted(ds.astype(q_ref.dtype), q))]
      return dk, dv

    return program.loop(bounds, step, carry)

  carry = program.zeros(), program.zeros()
  dk, dv = head(0, carry) if group == 1 else lax.fori_loop(0, group, head, carry)
  program.store(dk_ref, [x * program.tile.scale for x in dk])
  program.store(dv_ref, dv)


def _columns_kernel(program, ranges_ref, slopes_ref, q_ref, k_ref, stat_ref, *refs):
  weight_refs, sum_refs = refs[:len(refs) // 2], refs[len(refs) // 2:]
  j, bounds = program.own_keys(ranges_ref)
  if program.parts > 1:
    part, count = lax.rem(pl.program_id(0), program.parts), bounds[3] - bounds[0]
    lo, hi = (bounds[0] + lax.div(count * (part + n), program.parts) for n in (0, 1))
    bounds = [jnp.clip(x, lo, hi) for x in bounds]
  slope = slopes_ref[pl.program_id(1)]
  k = program.load(k_ref, 0, program.blocks.own)

  def step(qi, masked, sums):
    s, keep = program.scores(slope, program.other(q_ref, qi), k, program.others(qi), j, masked,
                          keys_first=True)
    f = program.tile.weights(s, keep, program.other_row(stat_ref, qi))
    return [x + g * program.other_row(ref, qi)
            for x, g, ref in zip(sums, (f, jnp.abs(f)), weight_refs)]

  zeros = jnp.zeros((program.blocks.own, program.blocks.other), jnp.float32)
  for ref, x in zip(sum_refs, program.loop(bounds, step, [zeros] * len(sum_refs))):
    ref[...] = jnp.sum(x, 1)


def _store_rows(refs, *stats):
  for ref, stat in zip(refs, stats):
    ref[...] = jnp.zeros(ref.shape, jnp.float32) if stat is None else stat.reshape(ref.shape)
