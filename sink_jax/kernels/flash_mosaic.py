"""Pallas kernels for NVIDIA's Hopper GPUs (Mosaic GPU): forward, dq, and dk with dv.

A block of threads owns some queries (or keys) of one head, 64 of them for each of its compute
warpgroups. One more warpgroup copies tiles of the keys (or queries) by TMA into a ring of buffers
in shared memory. The compute warpgroups wait for a buffer, multiply by its tile (wgmma) and release
it; they accumulate in registers. They use no atomics: a block writes only its rows, so results
repeat bit for bit. For the same reason the backward pass is two kernels: dq belongs to queries, dk
and dv to keys, and both compute the scores.

The first axis of a tile of scores is the owned one: (queries, keys) in the forward kernel and for
dq, (keys, queries) for dk and dv. The first operand of a product then never needs a transposition.
Head dimensions are padded with zeros to multiples of 64.

JAX's interpreter for GPUs runs these kernels on a CPU and detects missing waits for copies. It
lacks the two forms of wgmma that `_add_product` hides. It completes every wgmma at once, and so
does not detect a missing wait for one. The kernel in JAX, ops/gpu/attention_mgpu.py, refuses causal
masks with CUDA 12.8.0 to 12.9.0, whose ptxas miscompiles them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.block_mask import tiles_of
from sink_jax.kernels.score_tile import ScoreTile

_OWN = 64  # rows that a warpgroup owns: the rows of a wgmma
_CHANNELS = 64  # of bfloat16 in 128 bytes, by which shared memory is swizzled
_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24  # per thread; a multiprocessor has 65536


class MosaicBlocks(NamedTuple):
  """The tile sizes of a kernel.

  warpgroups: number of compute warpgroups, each with 64 rows. other: rows of the tiles that they
  loop over. stages: buffers of the ring.
  """

  warpgroups: int
  other: int
  stages: int


# By kernel. Chosen by the shared memory (227 KB) and the spills (up to 52 bytes, for dk and dv)
# that ptxas reports for sm_90a at a head dimension of 128; never timed.
BLOCKS = {
  'forward': MosaicBlocks(2, 128, 2),
  'dq': MosaicBlocks(2, 64, 2),
  'dkv': MosaicBlocks(2, 64, 2),
}


@dataclasses.dataclass(frozen=True)
class MosaicTile(ScoreTile):
  """A tile in the layout of wgmma: rows are vectors without an axis of size one."""

  def reduce(self, f: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    return f(x, self.axis)

  def spread(self, row: jax.Array, x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(row, x.shape, [1 - self.axis])

  def to_power(self, f: jax.Array, power: float) -> jax.Array:
    """By `safe_power`, since Mosaic GPU has no power function."""
    return jnp.exp2(power * jnp.log2(jnp.maximum(f, 1e-30))) if power else jnp.ones_like(f)


class MosaicTiling(NamedTuple):
  """The facts about a kernel's work that are known when it is traced.

  tiles: number of blocks of threads that cover the owned axis. group: query heads that share a head
  of keys. loops: see `Ranges.loops`.
  """

  tile: MosaicTile
  blocks: MosaicBlocks
  by_queries: bool
  tiles: int
  group: int
  loops: list[tuple[int, bool]]


def call(
  kernel: str,
  spec: AttentionSpec,
  slopes_H: jax.Array,
  own: Sequence[jax.Array],
  other: Sequence[jax.Array],
  results: Sequence[jax.ShapeDtypeStruct],
  interpret: Any,
) -> tuple[jax.Array, ...]:
  """Runs a kernel of BLOCKS.

  Args:
    own: arrays (B, T, H, Dh) or rows (B, H, T); a block gets the rows that it owns.
    other: arrays or rows that it loops over, of its head or of the query heads of its group.
    results: shapes of the outputs; a block writes the rows that it owns.
  """
  by_queries, blocks = kernel != 'dkv', BLOCKS[kernel]
  q, k = (own[0], other[0]) if by_queries else (other[0], own[0])
  batch, length, heads, head_dim = own[0].shape
  rows = blocks.warpgroups * _OWN
  padding, channels = -length % max(rows, blocks.other), -head_dim % _CHANNELS
  ranges = tiles_of(spec.mask, length, rows, blocks.other, by_queries)
  # The keys are the second axis of a tile, and the first one for dk and dv.
  tile = MosaicTile(spec, head_dim, 1 if by_queries else 0, length if padding else None)
  tiling = MosaicTiling(
    tile, blocks, by_queries, len(ranges.first), q.shape[2] // k.shape[2], ranges.loops
  )

  def padded(x: jax.Array) -> jax.Array:
    sizes = (0, padding, 0, channels) if x.ndim == 4 else (0, 0, padding)
    return jnp.pad(x, [(0, size) for size in sizes])

  arrays = [padded(x) for x in (*own, *other)]
  shapes = [jax.eval_shape(padded, x) for x in results]
  first, end = len(own), len(arrays)  # of `other`

  def body(ranges_ref, slopes_ref, *refs, **scratch):
    of_own, of_other, of_results = refs[:first], refs[first:end], refs[end:]
    tables = ranges_ref, slopes_ref
    _block(tiling, _STEPS[kernel], *tables, of_own, of_other, of_results, **scratch)

  out = plgpu.kernel(
    body,
    out_type=shapes,
    kernel_name=f'attention_{kernel}',
    scratch_types=_scratch(blocks, arrays[:first], arrays[first:], shapes, bool(interpret)),
    grid=(heads, tiling.tiles, batch),
    grid_names=('head', 'tile', 'batch'),
    num_threads=blocks.warpgroups + 1,
    thread_name='warpgroup',
    # Approximate exp2 and log2 err by 2^-22, but tanh, which caps scores, by 2^-11.
    compiler_params=plgpu.CompilerParams(approx_math=not spec.similarity.cap),
    interpret=interpret or None,
  )(jnp.asarray(np.stack(ranges)), slopes_H, *arrays)
  return tuple(x[:, :length, :, :head_dim] if x.ndim == 4 else x[..., :length] for x in out)


def _scratch(
  blocks: MosaicBlocks,
  own: Sequence[jax.Array],
  other: Sequence[jax.Array],
  results: Sequence[jax.ShapeDtypeStruct],
  interpret: bool,
) -> dict[str, Any]:
  """The shared memory and the barriers of a block of threads, by the names in `_block`."""
  groups, stages = blocks.warpgroups, blocks.stages
  weights = jax.ShapeDtypeStruct((0, 0, 0, blocks.other), own[0].dtype)
  return dict(
    own_bufs=[_shared(groups, _OWN, x) for x in own],
    ring=[_shared(stages, blocks.other, x) for x in other],
    # A result (T, Dh) is stored through the buffer of an input; row results have buffers.
    row_bufs=[_shared(groups, _OWN, x) for x in results if len(x.shape) == 3],
    # Only for the interpreter, see `_add_product`.
    weights=_shared(groups, _OWN, weights) if interpret else None,
    own_copied=plgpu.Barrier(num_arrivals=len(own), num_barriers=groups),
    copied=plgpu.Barrier(num_arrivals=len(other), num_barriers=stages),
    used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
  )


def _shared(count: int, rows: int, x: jax.Array | jax.ShapeDtypeStruct):
  """Buffers in shared memory for some rows of one head, in the layout that wgmma reads."""
  if x.ndim == 3:
    return plgpu.SMEM((count, rows), x.dtype)
  transforms = plgpu.TilingTransform((8, _CHANNELS)), plgpu.SwizzleTransform(128)
  return plgpu.SMEM((count, rows, x.shape[3]), x.dtype, transforms=transforms)


def _rows_of(ref, head, start, size: int):
  """Some rows of one head of an array (B, T, H, Dh) or (B, H, T) of this block's sequence."""
  batch, rows = lax.axis_index('batch'), pl.ds(start, size)
  return ref.at[batch, rows, head] if len(ref.shape) == 4 else ref.at[batch, head, rows]


class _Visits(NamedTuple):
  """The tiles that a block of threads visits, and where they are.

  bounds: of the loops over them, see `Ranges`. heads: how often it goes through them; a block of
  keys does so once for every query head of its group.
  """

  tiling: MosaicTiling
  bounds: list[jax.Array]
  head: jax.Array
  heads: int

  def other_head(self, g):
    group = self.tiling.group
    if self.tiling.by_queries:
      return lax.div(self.head, jnp.int32(group))
    return self.head * group + g

  def number(self, g, n):
    """The number of the visit of tile n, in the order of the loops, to assign buffers."""
    first, last = self.bounds[0], self.bounds[3]
    return g * (last - first) + n - first

  def slot(self, g, n):
    """The buffer of the ring for tile n."""
    return lax.rem(self.number(g, n), jnp.int32(self.tiling.blocks.stages))


def _block(
  tiling: MosaicTiling,
  step,
  ranges_ref,
  slopes_ref,
  own,
  other,
  results,
  *,
  own_bufs,
  ring,
  row_bufs,
  weights,
  own_copied,
  copied,
  used,
):
  """A block of threads: the last warpgroup copies, the others compute."""
  warpgroups, warpgroup = tiling.blocks.warpgroups, lax.axis_index('warpgroup')
  head, number = lax.axis_index('head'), lax.axis_index('tile')
  if tiling.by_queries:  # the last see most under a causal mask: longest first
    number = tiling.tiles - 1 - number
  visits = _Visits(
    tiling,
    [ranges_ref[n, number] for n in range(4)],
    head,
    1 if tiling.by_queries else tiling.group,
  )

  @pl.when(warpgroup == warpgroups)
  def _copy():
    plgpu.set_max_registers(_COPY_REGISTERS, action='decrease')
    _copy_tiles(visits, other, ring, copied, used)

  @pl.when(warpgroup < warpgroups)
  def _compute():
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action='increase')
    start = (number * warpgroups + warpgroup) * _OWN
    mine = [buffer.at[warpgroup] for buffer in own_bufs]
    for ref, buffer in zip(own, mine):
      plgpu.copy_gmem_to_smem(_rows_of(ref, head, start, _OWN), buffer, own_copied.at[warpgroup])
    plgpu.barrier_wait(own_copied.at[warpgroup])
    go_through = functools.partial(_go_through, visits, slopes_ref, start, ring, copied, used)
    product = functools.partial(_add_product, None if weights is None else weights.at[warpgroup])
    values = step(tiling, mine, go_through, product)
    rows = iter(row_bufs)
    buffers = [
      mine[n] if len(ref.shape) == 4 else next(rows).at[warpgroup] for n, ref in enumerate(results)
    ]
    for buffer, value in zip(buffers, values):
      buffer[...] = value.astype(buffer.dtype)
    plgpu.commit_smem()
    for buffer, ref in zip(buffers, results):
      plgpu.copy_smem_to_gmem(buffer, _rows_of(ref, head, start, _OWN))
    plgpu.wait_smem_to_gmem(0)


def _copy_tiles(visits: _Visits, other, ring, copied, used):
  """Copies the tiles in the order of the visits, each as soon as a buffer is free."""
  blocks, (first, _, _, last) = visits.tiling.blocks, visits.bounds

  def copy(g, n, carry):
    at = visits.slot(g, n)
    pl.when(visits.number(g, n) >= blocks.stages)(lambda: plgpu.barrier_wait(used.at[at]))
    for ref, buffer in zip(other, ring):
      rows = _rows_of(ref, visits.other_head(g), n * blocks.other, blocks.other)
      plgpu.copy_gmem_to_smem(rows, buffer.at[at], copied.at[at])
    return carry

  of_head = lambda g, carry: lax.fori_loop(first, last, functools.partial(copy, g), carry)
  lax.fori_loop(0, visits.heads, of_head, None)


def _go_through(visits: _Visits, slopes_ref, start, ring, copied, used, visit_tile, carry):
  """Folds carry = visit_tile(tiles, slope, i, j, is it masked?, carry) over the needed tiles."""
  tiling, size = visits.tiling, visits.tiling.blocks.other

  def one(g, masked, n, carry):
    at = visits.slot(g, n)
    plgpu.barrier_wait(copied.at[at])
    own_position, other_position = _positions(start, n * size, size)
    i, j = (own_position, other_position) if tiling.by_queries else (other_position, own_position)
    # For dk and dv the grid counts heads of keys; slopes belong to query heads.
    slope = (
      slopes_ref[visits.head if tiling.by_queries else visits.other_head(g)]
      if tiling.tile.spec.position.has_bias
      else jnp.float32(0)
    )
    carry = visit_tile([buffer.at[at] for buffer in ring], slope, i, j, masked, carry)
    plgpu.barrier_arrive(used.at[at])
    return carry

  def all_tiles(g, carry):
    for n, masked in tiling.loops:
      body = functools.partial(one, g, masked)
      carry = lax.fori_loop(visits.bounds[n], visits.bounds[n + 1], body, carry)
    return carry

  if visits.heads == 1:
    return all_tiles(0, carry)
  return lax.fori_loop(0, visits.heads, all_tiles, carry)


def _forward_step(tiling: MosaicTiling, own, go_through, product):
  """The rows and their statistics; `own` is (q,)."""
  [q_buf], tile = own, tiling.tile

  def visit_tile(tiles, slope, i, j, masked, carry):
    (k_buf, v_buf), (out, state) = tiles, carry
    s = tile.scores(_product(q_buf, k_buf.T), slope, i, j)
    p, factor, state = tile.update(state, s, tile.keep(i, j) if masked else None)
    out = out if factor is None else out * tile.spread(factor, out)
    # Weights are rounded to the dtype of v, for the tensor cores; their sums are of the exact
    # weights.
    return product(out, p.astype(v_buf.dtype), v_buf), state

  rows = lambda x: plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))
  state = jax.tree.map(rows, tile.start((_OWN,)))
  out, state = go_through(visit_tile, (_zeros(q_buf), state))
  factor, *stats = tile.finish(state)
  out = out if factor is None else out * tile.spread(factor, out)
  return [out, *(rows(jnp.zeros(_OWN)) if stat is None else stat for stat in stats)]


def _backward_step(tiling: MosaicTiling, own, go_through, product):
  """dq if `own` is (q, do), dk and dv if it is (k, v)."""
  tile, by_queries = tiling.tile, tiling.by_queries
  # Row statistics belong to queries: to the owned axis for dq, to the other axis for dk and dv.
  layout = plgpu.Layout.WGMMA.reduce(tile.axis)
  load = lambda refs: [plgpu.layout_cast(ref[...], layout) for ref in refs[2:]]
  own_rows = load(own)  # none for dk and dv

  def visit_tile(tiles, slope, i, j, masked, carry):
    s = tile.scores(_product(own[0], tiles[0].T), slope, i, j)
    dp = _product(own[1], tiles[1].T)
    rows = [tile.spread(row, s) for row in own_rows + load(tiles)]  # one of them is empty
    p, ds = tile.cotangent(s, tile.keep(i, j) if masked else None, dp, rows)
    dx = product(carry[0], ds.astype(tiles[0].dtype), tiles[0])
    if by_queries:
      return (dx,)
    return dx, product(carry[1], p.astype(tiles[1].dtype), tiles[1])

  dx, *dv = go_through(visit_tile, (_zeros(own[0]),) * (1 if by_queries else 2))
  return [dx * tile.scale, *dv]


_STEPS = {'forward': _forward_step, 'dq': _backward_step, 'dkv': _backward_step}


def _positions(own_start, other_start, others: int) -> tuple[jax.Array, jax.Array]:
  """Positions of the owned and of the other rows, each in the shape of a tile of scores."""
  return tuple(
    start + plgpu.broadcasted_iota(jnp.int32, (_OWN, others), axis, layout=plgpu.Layout.WGMMA)
    for axis, start in enumerate((own_start, other_start))
  )


def _zeros(buffer) -> jax.Array:
  return plgpu.layout_cast(jnp.zeros(buffer.shape, jnp.float32), plgpu.Layout.WGMMA)


def _product(a_buf, b_buf) -> jax.Array:
  """Product of two matrices in shared memory, float32."""

  def multiply(product_ref):
    plgpu.wgmma(product_ref, a_buf, b_buf)
    return product_ref[...]  # waits for it

  shape = a_buf.shape[0], b_buf.shape[1]
  return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _add_product(a_buf, total: jax.Array, a: jax.Array, b_buf) -> jax.Array:
  """total + a b; on a device a_buf is None, and both total and a stay in registers."""
  if a_buf is None:
    accumulator: Any = plgpu.WGMMAAccumulatorRef.init(total)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b_buf))(accumulator)
  # The interpreter lacks both forms.
  a_buf[...] = a
  plgpu.commit_smem()
  return total + _product(a_buf, b_buf)
