"""Pallas kernels for TPUs (Mosaic).

Tiles of scores are transposed, (keys, queries), so that quantities of rows lie along the
lanes, (1, queries). The last axes of every grid run in order and accumulate in scratch
memory. Outputs of queries come as (Dh, queries) and are turned outside. Letters in names:
q and k are the sizes of a tile, D is the head dimension.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sink_jax.kernels.tpu_layout import SUBLANES, KernelLayout


def unsupported(head_dim: int) -> str | None:
  """Why these kernels do not run, or None."""
  if head_dim % SUBLANES or head_dim > 256:
    return f'head_dim = {head_dim} is not a multiple of {SUBLANES} up to 256'
  return None


def forward(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, slopes_H=None, interpret=False):
  """Returns rows (B, T, H, Dh) in the dtype of v, stat and power_stat (B, H, T) float32."""
  program = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  out, stats = program.over_queries(
      functools.partial(_forward_kernel, program.tile),
      [program.queries(q_BxTxHxDh), program.keys(k_BxTxHkvxDh), program.keys(v_BxTxHkvxDh)],
      [program.per_query(v_BxTxHkvxDh.dtype), program.per_row(2)],
      [program.scratch(program.head_dim, program.block), *program.state])
  return program.tokens_first(out), *program.split(stats)


def statistics(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H=None, interpret=False):
  """Returns stat, power_stat and sum_j |f_ij| (B, H, T); the last is zero for exp."""
  program = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret, sizes=True)
  stats, = program.over_queries(
      functools.partial(_statistics_kernel, program.tile),
      [program.queries(q_BxTxHxDh), program.keys(k_BxTxHkvxDh)], [program.per_row(3)],
      program.state)
  return program.split(stats)


def backward(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, do_BxTxHxDh, *rows_BxHxT,
             slopes_H=None, interpret=False):
  """Returns dq, dk, dv; the rows are those of `row_cotangents`."""
  program = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  inputs = [program.queries(q_BxTxHxDh), program.keys(k_BxTxHkvxDh), program.keys(v_BxTxHkvxDh),
            program.queries(do_BxTxHxDh), program.rows(rows_BxHxT)]
  dq, = program.over_queries(
      functools.partial(_dq_kernel, program.tile), inputs, [program.per_query(q_BxTxHxDh.dtype)],
      [program.scratch(program.head_dim, program.block)])
  dk, dv = program.over_keys(
      functools.partial(_dkv_kernel, program.tile), inputs,
      [program.per_key(k_BxTxHkvxDh.dtype), program.per_key(v_BxTxHkvxDh.dtype)],
      [program.scratch(program.block, program.head_dim)] * 2)
  return (program.tokens_first(dq), program.tokens_first(dk, turned=False),
          program.tokens_first(dv, turned=False))


def column_sums(spec, keys, q_BxTxHxDh, k_BxTxHkvxDh, row_stats_BxHxT, *weights_BxHxT,
                slopes_H=None,     interpret=False):
  """Sums over the rows i of the first `keys` keys, (B, H, keys) float32 each.

  Returns sum_i f_ij w_i of the first weight w, and sum_i |f_ij| w_i of a second one.
  """
  program = KernelLayout(spec, q_BxTxHxDh, k_BxTxHkvxDh, slopes_H, interpret)
  zeros = [jnp.zeros_like(row_stats_BxHxT)] * (SUBLANES - len(weights_BxHxT))
  sums, = program.over_keys(
      functools.partial(_columns_kernel, program.tile),
      [program.queries(q_BxTxHxDh), program.keys(k_BxTxHkvxDh), program.rows([row_stats_BxHxT]),
       program.rows([*weights_BxHxT, *zeros])],
      [program.per_column()], [program.scratch(SUBLANES, program.block)],
      per_head=True, keys=keys)
  return tuple(sums[:, :, n, :keys] for n in range(len(weights_BxHxT)))


def _visit(ranges_ref, own, t, step):
  """Calls step(number of the other tile, is it masked?), if there is one at step t."""
  first, first_full, last_full, last = (ranges_ref[n, own] for n in range(4))
  other = first + t
  full = (first_full <= other) & (other < last_full)
  pl.when(full)(lambda: step(other, False))
  pl.when((other < last) & jnp.logical_not(full))(lambda: step(other, True))


def _dot(a, b, axes):
  """Sums over the given axis of each; float32 inputs at full precision."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), precision=precision,
                         preferred_element_type=jnp.float32)


def _scores(tile, slope, q_ref, k_ref, qi, kj, masked):
  """Scores (k, q) and which of them count, None for all."""
  block = q_ref.shape[0]
  i = qi * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
  j = kj * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
  product = _dot(k_ref[...], q_ref[...], (1, 1))
  return tile.scores(product, slope, i, j), tile.keep(i, j) if masked else None


def _forward_kernel(tile, ranges_ref, slopes_ref, q_ref, k_ref, v_ref, out_ref, stats_ref,
                    out_Dxq, *state):
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start():
    out_Dxq[...] = jnp.zeros_like(out_Dxq)
    _start(tile, state)

  def step(kj, masked):
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    p, factor, new = tile.update(_read(state), s, keep)
    before = out_Dxq[...] if factor is None else out_Dxq[...] * factor
    v = v_ref[...]
    out_Dxq[...] = before + _dot(v, p.astype(v.dtype), (0, 0))
    _write(state, new)

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish():
    factor, stat, power_stat, _ = tile.finish(_read(state))
    out = out_Dxq[...] if factor is None else out_Dxq[...] * factor
    out_ref[...] = out.astype(out_ref.dtype)
    _store_rows(stats_ref, stat, power_stat)


def _statistics_kernel(tile, ranges_ref, slopes_ref, q_ref, k_ref, stats_ref, *state):
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]
  pl.when(t == 0)(lambda: _start(tile, state))

  def step(kj, masked):
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    _write(state, tile.update(_read(state), s, keep)[2])

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish():
    _store_rows(stats_ref, *tile.finish(_read(state))[1:])


def _dq_kernel(tile, ranges_ref, slopes_ref, q_ref, k_ref, v_ref, do_ref, rows_ref, dq_ref,
               dq_Dxq):
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start():
    dq_Dxq[...] = jnp.zeros_like(dq_Dxq)

  def step(kj, masked):
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    dp = _dot(v_ref[...], do_ref[...], (1, 1))
    _, ds = tile.cotangent(s, keep, dp, _rows(rows_ref))
    k = k_ref[...]
    dq_Dxq[...] += _dot(k, ds.astype(k.dtype), (0, 0))

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish():
    dq_ref[...] = (dq_Dxq[...] * tile.scale).astype(dq_ref.dtype)


def _dkv_kernel(tile, ranges_ref, slopes_ref, q_ref, k_ref, v_ref, do_ref, rows_ref, dk_ref,
                dv_ref, dk_kxD, dv_kxD):
  kj, g, t = pl.program_id(2), pl.program_id(3), pl.program_id(4)
  slope = slopes_ref[pl.program_id(1) * pl.num_programs(3) + g]

  @pl.when((g == 0) & (t == 0))
  def start():
    dk_kxD[...] = jnp.zeros_like(dk_kxD)
    dv_kxD[...] = jnp.zeros_like(dv_kxD)

  def step(qi, masked):
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    q, do = q_ref[...], do_ref[...]
    dp = _dot(v_ref[...], do, (1, 1))
    p, ds = tile.cotangent(s, keep, dp, _rows(rows_ref))
    dv_kxD[...] += _dot(p.astype(do.dtype), do, (1, 0))
    dk_kxD[...] += _dot(ds.astype(q.dtype), q, (1, 0))

  _visit(ranges_ref, kj, t, step)

  @pl.when((g == pl.num_programs(3) - 1) & (t == pl.num_programs(4) - 1))
  def finish():
    dk_ref[...] = (dk_kxD[...] * tile.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_kxD[...].astype(dv_ref.dtype)


def _columns_kernel(tile, ranges_ref, slopes_ref, q_ref, k_ref, stat_ref, weights_ref, sums_ref,
                    sums_8xk):
  kj, t = pl.program_id(2), pl.program_id(4)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start():
    sums_8xk[...] = jnp.zeros_like(sums_8xk)

  def step(qi, masked):
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
  def finish():
    sums_ref[...] = sums_8xk[...]


def _start(tile, state):
  if state:
    _write(state, tile.start(state[0].shape))


def _read(refs):
  return tuple(ref[...] for ref in refs)


def _write(refs, values):
  for ref, value in zip(refs, values, strict=True):
    ref[...] = value


def _rows(rows_ref):
  return [rows_ref[n:n + 1, :] for n in range(rows_ref.shape[0])]


def _store_rows(stats_ref, *stats):
  for n, stat in enumerate(stats):
    shape = 1, stats_ref.shape[1]
    stats_ref[n:n + 1, :] = jnp.zeros(shape, jnp.float32) if stat is None else stat
