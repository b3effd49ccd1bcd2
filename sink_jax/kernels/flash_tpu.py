"""Pallas kernels for TPUs (Mosaic): forward, dq, and dk with dv.

Tiles of scores are transposed, (keys, queries), so that row statistics lie along the lanes,
(1, queries): a column of statistics would fill one lane of 128. Arrays are laid out (B, H, T, Dh),
since the last two axes of a block fill the sublanes and lanes of vector registers, and are padded
to full tiles; outputs of queries are (B, H, Dh, T). The last axes of every grid run in order on a
core and accumulate in scratch memory, while the next tiles are copied from HBM; the axes before
them are independent. The backward pass is two kernels, dq per tile of queries and dk, dv per tile
of keys, each of which computes the scores again. In names q and k are the sizes of a tile, and D is
the head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.block_mask import key_tiles, padded_tiles, query_tiles
from sink_jax.kernels.score_tile import ScoreTile

# Largest number of queries and keys of a tile; a multiple of the lanes. A tile of scores then takes
# 1 MiB in float32. With its inputs, twice for the copies in flight, it stays far below the 16 MiB
# of vector memory of a TPU v4. Smaller tiles need more steps, each with its overhead.
_BLOCK = 512

# An array, or the shape of a result, and the axis along which its blocks move: 'queries' or 'keys'
# for arrays (B, H, T, Dh), 'rows' for arrays (B, H, X, T) of queries.
Operand = tuple[jax.Array | jax.ShapeDtypeStruct, str]


def forward(
  spec: AttentionSpec,
  slopes_H: jax.Array,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  *,
  interpret: Any = False,
) -> tuple[jax.Array, ...]:
  """Returns rows (B, T, H, Dh) in the dtype of v, stat and power_stat (B, H, T) float32."""
  grid = _Grid(spec, slopes_H, q_BxTxHxDh, k_BxTxHkvxDh, interpret)
  q, k, v = map(grid.heads_first, (q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh))
  batch, heads, padded, head_dim = q.shape
  result = lambda size, dtype: jax.ShapeDtypeStruct((batch, heads, size, padded), dtype)
  out, stats = grid.call(
    _forward_kernel,
    [(q, 'queries'), (k, 'keys'), (v, 'keys')],
    [(result(head_dim, v.dtype), 'rows'), (result(2, jnp.float32), 'rows')],
    [(head_dim, grid.block), *[(1, grid.block)] * len(grid.tile.start(()))],
  )
  return (
    grid.tokens_first(jnp.swapaxes(out, 2, 3)),
    stats[:, :, 0, : grid.length],
    stats[:, :, 1, : grid.length],
  )


def backward(
  spec: AttentionSpec,
  slopes_H: jax.Array,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  do_BxTxHxDh: jax.Array,
  *rows_BxHxT: jax.Array,
  interpret: Any = False,
) -> tuple[jax.Array, ...]:
  """Returns dq, dk, dv; `rows_BxHxT` come from `row_cotangents`."""
  grid = _Grid(spec, slopes_H, q_BxTxHxDh, k_BxTxHkvxDh, interpret)
  q, k, v, do = map(grid.heads_first, (q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, do_BxTxHxDh))
  batch, heads, padded, head_dim = q.shape
  # Stacked as (B, H, R, T), a lane per query; a block cannot be empty.
  rows = jnp.stack(rows_BxHxT or [jnp.zeros((batch, heads, grid.length))], 2)
  rows = jnp.pad(rows, ((0, 0),) * 3 + ((0, padded - grid.length),))
  inputs = [(q, 'queries'), (k, 'keys'), (v, 'keys'), (do, 'queries'), (rows, 'rows')]
  dq_shape = jax.ShapeDtypeStruct((batch, heads, head_dim, padded), q.dtype)
  (dq,) = grid.call(_dq_kernel, inputs, [(dq_shape, 'rows')], [(head_dim, grid.block)])
  dk, dv = grid.call(
    _dkv_kernel,
    inputs,
    [(jax.ShapeDtypeStruct(x.shape, x.dtype), 'keys') for x in (k, v)],
    [(grid.block, head_dim)] * 2,
    own_keys=True,
  )
  return (grid.tokens_first(jnp.swapaxes(dq, 2, 3)), grid.tokens_first(dk), grid.tokens_first(dv))


class _Grid:
  """Tiles and grids of the kernels for one set of queries and keys."""

  def __init__(
    self,
    spec: AttentionSpec,
    slopes_H: jax.Array,
    q_BxTxHxDh: jax.Array,
    k_BxTxHkvxDh: jax.Array,
    interpret: Any,
  ):
    self.batch, self.length, self.heads, head_dim = q_BxTxHxDh.shape
    self.kv_heads = k_BxTxHkvxDh.shape[2]
    padded, self.block = padded_tiles(self.length, _BLOCK)
    self.padding = padded - self.length
    self.tile = ScoreTile(spec, head_dim, axis=0, length=self.length if self.padding else None)
    self.slopes_H, self.interpret = slopes_H, interpret

  def heads_first(self, x_BxTxHxDh: jax.Array) -> jax.Array:
    return jnp.swapaxes(jnp.pad(x_BxTxHxDh, ((0, 0), (0, self.padding), (0, 0), (0, 0))), 1, 2)

  def tokens_first(self, x_BxHxTxDh: jax.Array) -> jax.Array:
    return jnp.swapaxes(x_BxHxTxDh, 1, 2)[:, : self.length]

  def call(
    self,
    kernel: Callable[..., None],
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    scratch: Sequence[tuple[int, int]],
    own_keys: bool = False,
  ) -> Sequence[jax.Array]:
    """Runs a kernel on a grid over tiles of queries and, within it, the tiles of keys they see.

    With own_keys the outer axis is that of tiles of keys, and the inner ones are the query heads of
    their group and the tiles of queries that see them. Scratch memory lasts through the inner axes.
    """
    tiles = (query_tiles if own_keys else key_tiles)(
      self.tile.spec.mask, self.length, self.block, self.block
    )
    group = self.heads // self.kv_heads
    heads, inner = (self.kv_heads, (group,)) if own_keys else (self.heads, ())
    inner += (int((tiles.last - tiles.first).max()),)

    def block(x: jax.Array | jax.ShapeDtypeStruct, axis: str) -> pl.BlockSpec:
      def index(b, h, own, *steps):
        *g, t, ranges, _ = steps
        # Masked tiles are never copied: steps past the last tile load nothing new.
        other = jnp.minimum(ranges[0, own] + t, jnp.maximum(ranges[3, own] - 1, 0))
        qi, kj = (other, own) if own_keys else (own, other)
        q_head, kv_head = (h * group + g[0], h) if own_keys else (h, lax.div(h, group))
        return {
          'queries': (b, q_head, qi, 0),
          'rows': (b, q_head, 0, qi),
          'keys': (b, kv_head, kj, 0),
        }[axis]

      size = (x.shape[2], self.block) if axis == 'rows' else (self.block, x.shape[3])
      return pl.BlockSpec((None, None, *size), index)

    outer = self.batch, heads, (self.length + self.padding) // self.block
    run = pl.pallas_call(
      functools.partial(kernel, self.tile),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(*outer, *inner),
        in_specs=[block(*x) for x in inputs],
        out_specs=[block(*x) for x in outputs],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
      ),
      out_shape=[shape for shape, _ in outputs],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel',) * 3 + ('arbitrary',) * len(inner)
      ),
      interpret=self.interpret,
    )
    return run(jnp.asarray(np.stack(tiles)), self.slopes_H, *(x for x, _ in inputs))


def _forward_kernel(
  tile,
  ranges_ref,
  slopes_ref,
  q_ref,
  k_ref,
  v_ref,
  out_ref,
  stats_ref,
  out_Dxq,
  *state,
):
  # A program of the grid's parallel axes owns a tile of queries; step t is a tile of its keys.
  # out_Dxq and the state of the rows last over the steps, in scratch memory.
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start():
    out_Dxq[...] = jnp.zeros_like(out_Dxq)
    for ref, value in zip(state, tile.start((1, q_ref.shape[0]))):
      ref[...] = value

  def step(kj, masked):
    s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
    p, factor, new = tile.update(tuple(ref[...] for ref in state), s, keep)
    before = out_Dxq[...] if factor is None else out_Dxq[...] * factor
    v = v_ref[...]
    # Weights are rounded to the dtype of v for the matrix unit; their sums are of the exact
    # weights.
    out_Dxq[...] = before + _dot(v, p.astype(v.dtype), (0, 0))
    for ref, value in zip(state, new):
      ref[...] = value

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish():
    factor, *stats = tile.finish(tuple(ref[...] for ref in state))
    out = out_Dxq[...] if factor is None else out_Dxq[...] * factor
    out_ref[...] = out.astype(out_ref.dtype)
    for n, stat in enumerate(stats):
      stats_ref[n : n + 1, :] = jnp.zeros((1, stats_ref.shape[1])) if stat is None else stat


def _dq_kernel(tile, ranges_ref, slopes_ref, q_ref, k_ref, v_ref, do_ref, rows_ref, dq_ref, dq_Dxq):
  qi, t = pl.program_id(2), pl.program_id(3)
  slope = slopes_ref[pl.program_id(1)]

  @pl.when(t == 0)
  def start():
    dq_Dxq[...] = jnp.zeros_like(dq_Dxq)

  def step(kj, masked):
    _, ds = _cotangent(tile, slope, q_ref, k_ref, v_ref, do_ref, rows_ref, qi, kj, masked)
    k = k_ref[...]
    dq_Dxq[...] += _dot(k, ds.astype(k.dtype), (0, 0))

  _visit(ranges_ref, qi, t, step)

  @pl.when(t == pl.num_programs(3) - 1)
  def finish():
    # ds is the cotangent of q.k / sqrt(Dh): the factor is applied once instead of in every step.
    dq_ref[...] = (dq_Dxq[...] * tile.scale).astype(dq_ref.dtype)


def _dkv_kernel(
  tile,
  ranges_ref,
  slopes_ref,
  q_ref,
  k_ref,
  v_ref,
  do_ref,
  rows_ref,
  dk_ref,
  dv_ref,
  dk_kxD,
  dv_kxD,
):
  # A program owns a tile of keys; its steps are the query heads g of the group and their tiles of
  # queries, so that dk and dv of grouped heads are summed without atomics.
  kj, g, t = pl.program_id(2), pl.program_id(3), pl.program_id(4)
  slope = slopes_ref[pl.program_id(1) * pl.num_programs(3) + g]

  @pl.when((g == 0) & (t == 0))
  def start():
    dk_kxD[...] = jnp.zeros_like(dk_kxD)
    dv_kxD[...] = jnp.zeros_like(dv_kxD)

  def step(qi, masked):
    p, ds = _cotangent(tile, slope, q_ref, k_ref, v_ref, do_ref, rows_ref, qi, kj, masked)
    q, do = q_ref[...], do_ref[...]
    dv_kxD[...] += _dot(p.astype(do.dtype), do, (1, 0))
    dk_kxD[...] += _dot(ds.astype(q.dtype), q, (1, 0))

  _visit(ranges_ref, kj, t, step)

  @pl.when((g == pl.num_programs(3) - 1) & (t == pl.num_programs(4) - 1))
  def finish():
    dk_ref[...] = (dk_kxD[...] * tile.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_kxD[...].astype(dv_ref.dtype)


def _visit(ranges_ref, own, t, step: Callable[[jax.Array, bool], None]) -> None:
  """Calls step(number of the other tile, is it masked?) if step t has a tile.

  The grid has as many steps as the tile that needs most; for other tiles the last ones do nothing.
  """
  first, first_full, last_full, last = (ranges_ref[n, own] for n in range(4))
  other = first + t
  full = (first_full <= other) & (other < last_full)
  pl.when(full)(lambda: step(other, False))
  pl.when((other < last) & jnp.logical_not(full))(lambda: step(other, True))


def _scores(tile, slope, q_ref, k_ref, qi, kj, masked):
  """Scores (k, q) and which of them count, None for all."""
  block = q_ref.shape[0]
  i = qi * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
  j = kj * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
  product = _dot(k_ref[...], q_ref[...], (1, 1))
  return tile.scores(product, slope, i, j), tile.keep(i, j) if masked else None


def _cotangent(tile, slope, q_ref, k_ref, v_ref, do_ref, rows_ref, qi, kj, masked):
  """Weights (k, q) and the cotangent of the scores."""
  s, keep = _scores(tile, slope, q_ref, k_ref, qi, kj, masked)
  rows = [rows_ref[n : n + 1, :] for n in range(rows_ref.shape[0])]
  return tile.cotangent(s, keep, _dot(v_ref[...], do_ref[...], (1, 1)), rows)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
  """Sums over the given axis of each; float32 inputs at full precision."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(
    a,
    b,
    (((axes[0],), (axes[1],)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )
