"""Pallas kernels for NVIDIA GPUs of the Hopper generation (Mosaic GPU): forward, dq, and dk with dv.

A block of threads owns some queries (or keys) of one head, 64 of them for each of its compute
warpgroups. One more warpgroup copies tiles of the keys (or queries) by TMA into a ring of buffers in
shared memory. The compute warpgroups wait for a buffer, multiply by its tile (wgmma) and release it;
they accumulate in registers. They use no atomics: a block writes only its rows, so results repeat
bit for bit. For the same reason the backward pass is two kernels: dq belongs to queries, dk and dv to
keys, and both compute the scores.

The first axis of a tile of scores is the owned one: (queries, keys) in the forward kernel and for dq,
(keys, queries) for dk and dv. The first operand of a product then never needs a transposition. Head
dimensions are padded with zeros to multiples of 64.

JAX's interpreter for GPUs runs these kernels on a CPU and detects missing waits for copies. It lacks
the two forms of wgmma that `_add_product` hides. It completes every wgmma at once, and so does not
detect a missing wait for one. The kernel in JAX, ops/gpu/attention_mgpu.py, refuses causal masks with
CUDA 12.8.0 to 12.9.0, whose ptxas miscompiles them.
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
from sink_jax.kernels.block_mask import key_tiles, query_tiles
from sink_jax.kernels.score_tile import ScoreTile

_OWN = 64  # rows that a warpgroup owns: the rows of a wgmma
_CHANNELS = 64  # of bfloat16 in 128 bytes, by which shared memory is swizzled
_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24  # per thread; a multiprocessor has 65536


class Blocks(NamedTuple):
  """The tile sizes of a kernel.

  warpgroups: number of compute warpgroups, each with 64 rows. other: rows of the tiles that they loop
  over. stages: buffers of the ring.
  """

  warpgroups: int
  other: int
  stages: int


# By kernel. Chosen by the shared memory (227 KB) and the spills (up to 52 bytes, for dk and dv) that ptxas
# reports for sm_90a at a head dimension of 128; never timed.
BLOCKS = {'forward': Blocks(2, 128, 2), 'dq': Blocks(2, 64, 2), 'dkv': Blocks(2, 64, 2)}


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


class Tiling(NamedTuple):
  """The facts about a kernel's work that are known when it is traced.

  tiles: number of blocks of threads that cover the owned axis. group: query heads that share a head of
  keys. masked_before, masked_after: whether any block has masked tiles before or after the full ones; if
  none has, the loop is left out.
  """

  tile: MosaicTile
  blocks: Blocks
  by_queries: bool
  tiles: int
  group: int
  masked_before: bool
  masked_after: bool


def call(kernel: str, spec: AttentionSpec, slopes_H: jax.Array, own: Sequence[jax.Array],
          other: Sequence[jax.Array], results: Sequence[jax.ShapeDtypeStruct],
          interpret: Any) -> tuple[jax.Array, ...]:
  """Runs a kernel of BLOCKS.

  Args:
    own: arrays (B, T, H, Dh) or rows (B, H, T); a block gets the rows that it owns.
    other: arrays or rows that it loops over, of its head or of the query heads of its group.
    results: shapes of the outputs; a block writes the rows that it owns.
  """
  by_queries, blocks = kernel != 'dkv', BLOCKS[kernel]
  q, k = (own[0], other[0]) if by_queries else (other[0], own[0])
  batch, length, heads, head_dim = own[0].shape
  block = blocks.warpgroups * _OWN
  # The range of tiles of `other` that each block of `own` needs.
  ranges = (key_tiles(spec.mask, length, block, blocks.other) if by_queries else
            query_tiles(spec.mask, length, blocks.other, block))
  padding, channels = -length % max(block, blocks.other), -head_dim % _CHANNELS
  # The keys are the second axis of a tile, and the first one for dk and dv.
  tiling = Tiling(MosaicTile(spec, head_dim, 1 if by_queries else 0, length if padding else None),
                  blocks, by_queries, len(ranges.first), q.shape[2] // k.shape[2],
                  bool((ranges.first < ranges.first_full).any()),
                  bool((ranges.last_full < ranges.last).any()))

  def padded(x: jax.Array) -> jax.Array:
    sizes = (0, padding, 0, channels) if x.ndim == 4 else (0, 0, padding)
    return jnp.pad(x, [(0, size) for size in sizes])

  arrays = [padded(x) for x in (*own, *other)]
  shapes = [jax.eval_shape(padded, x) for x in results]
  buffers = lambda count, rows, xs: [_shared(count, rows, x) for x in xs]
  scratch: dict[str, Any] = dict(
      own_bufs=buffers(blocks.warpgroups, _OWN, arrays[:len(own)]),
      ring=buffers(blocks.stages, blocks.other, arrays[len(own):]),
      # A result (T, Dh) is stored through the buffer of an input; row results have buffers.
      row_bufs=buffers(blocks.warpgroups, _OWN, [x for x in shapes if len(x.shape) == 3]),
      # Only for the interpreter, see `_add_product`.
      weights=_shared(blocks.warpgroups, _OWN, jax.ShapeDtypeStruct((0, 0, 0, blocks.other), q.dtype)
                      ) if interpret else None,
      own_copied=plgpu.Barrier(num_arrivals=len(own), num_barriers=blocks.warpgroups),
      copied=plgpu.Barrier(num_arrivals=len(other), num_barriers=blocks.stages),
      used=plgpu.Barrier(num_arrivals=blocks.warpgroups, num_barriers=blocks.stages))

  def body(ranges_ref, slopes_ref, *refs, **scratch):
    ends = len(own), len(own) + len(other)
    _block(tiling, _STEPS[kernel], ranges_ref, slopes_ref, refs[:ends[0]], refs[ends[0]:ends[1]],
           refs[ends[1]:], **scratch)

  out = plgpu.kernel(
      body, out_type=shapes, scratch_types=scratch, kernel_name=f'attention_{kernel}',
      grid=(heads, tiling.tiles, batch), grid_names=('head', 'tile', 'batch'),
      num_threads=blocks.warpgroups + 1, thread_name='warpgroup',
      # Approximate exp2 and log2 err by 2^-22, but tanh, which caps scores, by 2^-11.
      compiler_params=plgpu.CompilerParams(approx_math=not spec.similarity.cap),
      interpret=interpret or None,
  )(jnp.asarray(np.stack(ranges)), slopes_H, *arrays)
  return tuple(x[:, :length, :, :head_dim] if x.ndim == 4 else x[..., :length] for x in out)


def _shared(count: int, rows: int, x: jax.Array | jax.ShapeDtypeStruct):
  """Buffers in shared memory for some rows of one head of an array, in the layout that wgmma reads."""
  if x.ndim == 3:
    return plgpu.SMEM((count, rows), x.dtype)
  transforms = plgpu.TilingTransform((8, _CHANNELS)), plgpu.SwizzleTransform(128)
  return plgpu.SMEM((count, rows, x.shape[3]), x.dtype, transforms=transforms)


def _rows_of(ref, head, start, size: int):
  """Some rows of one head of an array (B, T, H, Dh) or (B, H, T) of this block's sequence."""
  batch, rows = lax.axis_index('batch'), pl.ds(start, size)
  return ref.at[batch, rows, head] if len(ref.shape) == 4 else ref.at[batch, head, rows]


def _block(tiling: Tiling, step, ranges_ref, slopes_ref, own, other, results, *, own_bufs, ring,
           row_bufs, weights, own_copied, copied, used):
  """A block of threads: the last warpgroup copies, the others compute."""
  blocks, warpgroup, head = tiling.blocks, lax.axis_index('warpgroup'), lax.axis_index('head')
  number = lax.axis_index('tile')
  if tiling.by_queries:  # the last see most under a causal mask: longest first
    number = tiling.tiles - 1 - number
  first, first_full, last_full, last = (ranges_ref[n, number] for n in range(4))
  # A block of keys goes through the tiles once for every query head of its group.
  heads = 1 if tiling.by_queries else tiling.group
  other_head = lambda g: lax.div(head, jnp.int32(tiling.group)) if tiling.by_queries else (
      head * tiling.group + g)
  # Visits of tiles are numbered in the order of the loops below, to assign buffers of the ring.
  visit = lambda g, n: g * (last - first) + n - first
  slot = lambda visit: lax.rem(visit, jnp.int32(blocks.stages))

  @pl.when(warpgroup == blocks.warpgroups)
  def _copy():
    plgpu.set_max_registers(_COPY_REGISTERS, action='decrease')

    def copy(g, n, carry):
      at = slot(visit(g, n))
      pl.when(visit(g, n) >= blocks.stages)(lambda: plgpu.barrier_wait(used.at[at]))
      for ref, buffer in zip(other, ring):
        plgpu.copy_gmem_to_smem(_rows_of(ref, other_head(g), n * blocks.other, blocks.other),
                                buffer.at[at], copied.at[at])
      return carry

    lax.fori_loop(0, heads, lambda g, carry: lax.fori_loop(
        first, last, functools.partial(copy, g), carry), None)

  @pl.when(warpgroup < blocks.warpgroups)
  def _compute():
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action='increase')
    start = (number * blocks.warpgroups + warpgroup) * _OWN
    mine = [buffer.at[warpgroup] for buffer in own_bufs]
    for ref, buffer in zip(own, mine):
      plgpu.copy_gmem_to_smem(_rows_of(ref, head, start, _OWN), buffer, own_copied.at[warpgroup])
    plgpu.barrier_wait(own_copied.at[warpgroup])

    def go_through(visit_tile, carry):
      """Folds carry = visit_tile(tiles, slope, i, j, is it masked?, carry) over the needed tiles."""

      def one(g, masked, n, carry):
        at = slot(visit(g, n))
        plgpu.barrier_wait(copied.at[at])
        own_position, other_position = _positions(start, n * blocks.other, blocks.other)
        i, j = (own_position, other_position) if tiling.by_queries else (
            other_position, own_position)
        # For dk and dv the grid counts heads of keys; slopes belong to query heads.
        slope = (slopes_ref[head if tiling.by_queries else other_head(g)]
                 if tiling.tile.spec.position.has_bias else jnp.float32(0))
        carry = visit_tile([buffer.at[at] for buffer in ring], slope, i, j, masked, carry)
        plgpu.barrier_arrive(used.at[at])
        return carry

      def all_tiles(g, carry):
        # Three loops: only tiles at the edges of the mask pay for masking.
        for lo, hi, masked, needed in ((first, first_full, True, tiling.masked_before),
                                       (first_full, last_full, False, True),
                                       (last_full, last, True, tiling.masked_after)):
          if needed:
            carry = lax.fori_loop(lo, hi, functools.partial(one, g, masked), carry)
        return carry

      return lax.fori_loop(0, heads, all_tiles, carry) if heads > 1 else all_tiles(0, carry)

    product = functools.partial(_add_product, None if weights is None else weights.at[warpgroup])
    values = step(tiling, mine, go_through, product)
    rows = iter(row_bufs)
    buffers = [mine[n] if len(ref.shape) == 4 else next(rows).at[warpgroup]
               for n, ref in enumerate(results)]
    for buffer, value in zip(buffers, values):
      buffer[...] = value.astype(buffer.dtype)
    plgpu.commit_smem()
    for buffer, ref in zip(buffers, results):
      plgpu.copy_smem_to_gmem(buffer, _rows_of(ref, head, start, _OWN))
    plgpu.wait_smem_to_gmem(0)


def _forward_step(tiling: Tiling, own, go_through, product):
  """The rows and their statistics; `own` is (q,)."""
  [q_buf], tile = own, tiling.tile

  def visit_tile(tiles, slope, i, j, masked, carry):
    (k_buf, v_buf), (out, state) = tiles, carry
    s = tile.scores(_product(q_buf, k_buf.T), slope, i, j)
    p, factor, state = tile.update(state, s, tile.keep(i, j) if masked else None)
    out = out if factor is None else out * tile.spread(factor, out)
    # Weights are rounded to the dtype of v, for the tensor cores; their sums are of the exact weights.
    return product(out, p.astype(v_buf.dtype), v_buf), state

  rows = lambda x: plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))
  state = jax.tree.map(rows, tile.start((_OWN,)))
  out, state = go_through(visit_tile, (_zeros(q_buf), state))
  factor, *stats = tile.finish(state)
  out = out if factor is None else out * tile.spread(factor, out)
  return [out, *(rows(jnp.zeros(_OWN)) if stat is None else stat for stat in stats)]


def _backward_step(tiling: Tiling, own, go_through, product):
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
      return dx,
    return dx, product(carry[1], p.astype(tiles[1].dtype), tiles[1])

  dx, *dv = go_through(visit_tile, (_zeros(own[0]),) * (1 if by_queries else 2))
  return [dx * tile.scale, *dv]


_STEPS = {'forward': _forward_step, 'dq': _backward_step, 'dkv': _backward_step}


def _positions(own_start, other_start, others: int) -> tuple[jax.Array, jax.Array]:
  """Positions of the owned and of the other rows, each in the shape of a tile of scores."""
  return tuple(start + plgpu.broadcasted_iota(jnp.int32, (_OWN, others), axis,
                                              layout=plgpu.Layout.WGMMA)
               for axis, start in enumerate((own_start, other_start)))


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
