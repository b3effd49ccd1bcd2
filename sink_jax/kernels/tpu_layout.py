"""Layouts, grids and loops of the TPU kernels.

Arrays are laid out (B, H, T, Dh) for the kernels, since the last two axes of a block fill the
sublanes and lanes of vector registers, and are padded to whole tiles. Which tile an axis of the
grid loads is computed from a table of ranges in scalar memory, so a masked tile is never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.block_mask import Ranges, key_tiles, query_tiles
from sink_jax.kernels.rectified_tile import make_tile

# Queries and keys of a tile, at most; a multiple of the lanes. A tile of scores then takes 1 MiB in
# float32, and with its inputs, twice for the copies in flight, stays far below the 16 MiB of
# vector memory of a TPU v4; smaller tiles have more steps, each with its overhead.
_BLOCK = 512
_LANES = 128
SUBLANES = 8
_LOOP = 'arbitrary'  # an axis of the grid that runs in order


# An array, or the shape of a result; its block; what the block moves along.
Operand = tuple[jax.Array | jax.ShapeDtypeStruct, tuple[int, int], str]


class KernelLayout:
  """Layouts and grids of the kernels for one set of queries and keys.

  Inputs and outputs are (array or shape, block, axis), where axis names what the block moves
  along: a block is chosen by (batch, head) and its number along that axis.

  Args:
    slopes_H: slopes of the position bias, where the heads are a part of the model's; None for
      those of so many heads.
    interpret: run in Pallas' interpreter, on any machine.
    sizes: accumulate sums of |f|, too.
  """

  def __init__(self, spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
               slopes_H: jax.Array | None, interpret: bool, sizes: bool = False):
    self.batch, self.length, self.heads, self.head_dim = q_BxTxHxDh.shape
    self.kv_heads = k_BxTxHkvxDh.shape[2]
    self.block = min(_BLOCK, -(-self.length // _LANES) * _LANES)
    self.padded = -(-self.length // self.block) * self.block
    self.interpret = interpret
    self.slopes_H = spec.position.slopes(self.heads) if slopes_H is None else slopes_H
    self.tile = make_tile(spec, self.head_dim, axis=0, sizes=sizes,
                          length=self.length if self.padded != self.length else None)
    self.state = [self.scratch(1, self.block)] * len(self.tile.start(()))

  def scratch(self, *shape: int) -> Any:
    """Memory of a kernel that lasts from one step of a grid to the next."""
    return pltpu.VMEM(shape, jnp.float32)

  # Inputs: what a tile of each is, and along which axis it is chosen.

  def queries(self, x_BxTxHxDh: jax.Array) -> Operand:
    """Queries, or whatever has their shape."""
    return self._heads_first(x_BxTxHxDh), (self.block, self.head_dim), 'queries'

  def keys(self, x_BxTxHkvxDh: jax.Array) -> Operand:
    """Keys or values."""
    return self._heads_first(x_BxTxHkvxDh), (self.block, self.head_dim), 'keys'

  def rows(self, rows_BxHxT: Sequence[jax.Array]) -> Operand:
    """Statistics of rows, stacked as (B, H, R, T): one lane per query."""
    x = jnp.stack(rows_BxHxT, 2) if len(rows_BxHxT) else jnp.zeros(
        (self.batch, self.heads, 1, self.length))
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, self.padded - self.length),))
    return x, (x.shape[2], self.block), 'rows'

  # Outputs.

  def per_query(self, dtype: DTypeLike) -> Operand:
    """A vector of the head dimension per query, as (B, H, Dh, T)."""
    shape = self.batch, self.heads, self.head_dim, self.padded
    return jax.ShapeDtypeStruct(shape, dtype), (self.head_dim, self.block), 'rows'

  def per_row(self, count: int) -> Operand:
    """`count` numbers per query."""
    shape = self.batch, self.heads, count, self.padded
    return jax.ShapeDtypeStruct(shape, jnp.float32), (count, self.block), 'rows'

  def per_key(self, dtype: DTypeLike) -> Operand:
    """A vector of the head dimension per key."""
    shape = self.batch, self.kv_heads, self.padded, self.head_dim
    return jax.ShapeDtypeStruct(shape, dtype), (self.block, self.head_dim), 'keys'

  def per_column(self) -> Operand:
    """Up to eight numbers per key and query head."""
    shape = self.batch, self.heads, SUBLANES, self.padded
    return jax.ShapeDtypeStruct(shape, jnp.float32), (SUBLANES, self.block), 'columns'

  def over_queries(self, kernel: Callable[..., None], inputs: Sequence[Operand],
                   outputs: Sequence[Operand], scratch: Sequence[Any]) -> Sequence[jax.Array]:
    """A grid over tiles of queries, and in it over the tiles of keys that they see."""
    ranges = key_tiles(self.tile.spec.mask, self.length, self.block, self.block)
    steps = int((ranges.last - ranges.first).max())
    group = self.heads // self.kv_heads

    def index(axis: str) -> Callable[..., tuple]:
      def index_map(b, h, qi, t, ranges, slopes):
        kj = _clamp(ranges, qi, t)
        return {'queries': (b, h, qi, 0), 'rows': (b, h, 0, qi),
                'keys': (b, lax.div(h, group), kj, 0)}[axis]
      return index_map

    # Batch, head and tile of queries are independent; the steps accumulate.
    grid = self.batch, self.heads, self.padded // self.block, steps
    return self._call(kernel, inputs, outputs, scratch, grid, ranges, index, loops=1)

  def over_keys(self, kernel: Callable[..., None], inputs: Sequence[Operand],
                outputs: Sequence[Operand], scratch: Sequence[Any], per_head: bool = False,
                keys: int | None = None) -> Sequence[jax.Array]:
    """A grid over tiles of keys, and in it over heads of a group and the queries that see them.

    Args:
      per_head: every query head of a group has outputs, instead of their sum.
      keys: only the tiles of the first so many keys.
    """
    ranges = query_tiles(self.tile.spec.mask, self.length, self.block, self.block)
    steps = int((ranges.last - ranges.first).max())
    group = self.heads // self.kv_heads
    outer, inner = (self.heads, 1) if per_head else (self.kv_heads, group)

    def index(axis: str) -> Callable[..., tuple]:
      def index_map(b, h, kj, g, t, ranges, slopes):
        qi, head = _clamp(ranges, kj, t), h * inner + g
        return {'queries': (b, head, qi, 0), 'rows': (b, head, 0, qi), 'columns': (b, head, 0, kj),
                'keys': (b, lax.div(h, group) if per_head else h, kj, 0)}[axis]
      return index_map

    count = -(-(keys or self.length) // self.block)
    grid = self.batch, outer, count, inner, steps
    return self._call(kernel, inputs, outputs, scratch, grid, ranges, index, loops=2)

  def _call(self, kernel: Callable[..., None], inputs: Sequence[Operand],
            outputs: Sequence[Operand], scratch: Sequence[Any], grid: tuple[int, ...],
            ranges: Ranges, index: Callable[[str], Callable[..., tuple]], loops: int,
            ) -> Sequence[jax.Array]:
    spec = lambda block, axis: pl.BlockSpec((None, None, *block), index(axis))
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid,
            in_specs=[spec(block, axis) for _, block, axis in inputs],
            out_specs=[spec(block, axis) for _, block, axis in outputs],
            scratch_shapes=scratch),
        out_shape=[shape for shape, _, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel',) * (len(grid) - loops) + (_LOOP,) * loops),
        interpret=self.interpret)
    slopes_H = jnp.asarray(self.slopes_H, jnp.float32)
    return call(jnp.asarray(np.stack(ranges)), slopes_H, *(x for x, _, _ in inputs))

  def _heads_first(self, x_BxTxHxDh: jax.Array) -> jax.Array:
    x = jnp.pad(x_BxTxHxDh, ((0, 0), (0, self.padded - self.length), (0, 0), (0, 0)))
    return jnp.swapaxes(x, 1, 2)

  def tokens_first(self, x: jax.Array, transposed: bool = True) -> jax.Array:
    """(B, H, Dh, T), or (B, H, T, Dh) if not transposed, to (B, T, H, Dh) without padding."""
    x = jnp.transpose(x, (0, 3, 1, 2) if transposed else (0, 2, 1, 3))
    return x[:, :self.length]

  def split(self, stats_BxHxRxT: jax.Array) -> tuple[jax.Array, ...]:
    """The statistics (B, H, T) one by one, without padding."""
    return tuple(stats_BxHxRxT[:, :, n, :self.length] for n in range(stats_BxHxRxT.shape[2]))


def _clamp(ranges_ref: jax.Ref, own: jax.Array, t: jax.Array) -> jax.Array:
  """Number of the other tile at step t; steps past the last one load nothing new."""
  return jnp.minimum(ranges_ref[0, own] + t, jnp.maximum(ranges_ref[3, own] - 1, 0))
