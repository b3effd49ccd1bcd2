"""Blocks, grids, loops and loads of the GPU kernels.

Only this file names Pallas' Triton back end. Triton tiles have sizes that are powers of
two, so a head dimension is taken in such parts, 96 as 64 + 32, without padding. Letters in
comments: q and k are the sizes of a tile, d of a part of the head dimension.

JAX deprecates this back end from 0.11 on, in favour of Mosaic GPU, which needs Hopper or newer.
A version for it would replace this file and `flash_gpu`: `Blocks` by tiles of two compute
warpgroups and pipeline stages, `KernelLayout` by `plgpu.kernel` with a warpgroup of its own that
loads tiles by TMA, the loops by its pipelines with a barrier between products and elementary
functions, `_assembly` by what its fast math makes of them. `ScoreTile`, `Approximate`,
`block_mask` and `row_cotangents` stay, and so do the functions that `flash` calls.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.arithmetic import EXACT, Approximate, Exact
from sink_jax.kernels.block_mask import Ranges, key_tiles, query_tiles
from sink_jax.kernels.rectified_tile import make_tile

_PROGRAMS = 1024  # keep a GPU busy: sums over few columns are split into that many programs


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How a kernel cuts its work.

  Attributes:
    own: rows of the tile of queries or keys that a program owns.
    other: rows of the tiles that it goes through.
    warps: warps of a program.
    stages: tiles in flight: loads of the next ones run during the products of this one.
  """

  own: int
  other: int
  warps: int
  stages: int


# By kernel and largest head dimension, for bfloat16. What a program accumulates lives in registers:
# an own x Dh tile of float32 for the output, two for dk and dv, beside an own x other tile of
# scores. So tiles shrink, or warps double, as the head dimension grows. Chosen by the registers
# and spills that ptxas reports for sm_90a; `python -m sink_jax benchmark attention` measures them.
BLOCKS = {
    'forward': {64: Blocks(128, 64, 4, 3), 128: Blocks(64, 64, 4, 3), 256: Blocks(64, 32, 8, 2)},
    'dq': {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 3), 256: Blocks(64, 32, 8, 2)},
    'dkv': {64: Blocks(64, 64, 4, 3), 128: Blocks(128, 32, 8, 2), 256: Blocks(64, 16, 8, 2)},
    'columns': {64: Blocks(64, 64, 4, 3), 128: Blocks(128, 32, 8, 2), 256: Blocks(64, 32, 8, 2)},
}
# For every kernel: products at full precision, without tensor cores, need many registers.
_FLOAT32 = Blocks(32, 16, 4, 1)
_CHOSEN_FOR = '9.0'  # the compute capability of H100 and H200
_log = logging.getLogger('sink_jax')


def choose_blocks(kernel: str, dtype: DTypeLike, head_dim: int) -> Blocks:
  """The entry of the table; on a GPU of another kind than it was made for, a warning is logged."""
  if dtype == jnp.float32:
    return _FLOAT32
  _check_kind(jax.devices()[0])
  return BLOCKS[kernel][min(limit for limit in BLOCKS[kernel] if head_dim <= limit)]


@functools.cache
def _check_kind(device) -> None:
  if device.platform == 'gpu' and device.compute_capability != _CHOSEN_FOR:
    _log.warning(
        'attention: block sizes of the GPU kernels were chosen for compute capability %s (H100, '
        'H200), this %s has %s: they may be slow or too large for it. python -m sink_jax benchmark '
        'attention times them; they are BLOCKS in sink_jax/kernels/gpu_layout.py.',
        _CHOSEN_FOR, device.device_kind,
        device.compute_capability)


def _assembly(text: str) -> Callable[..., jax.Array]:
  """A function of float32 arrays of one shape, as PTX: $0 is the result, $1 to $n arguments."""
  def apply(*args: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(args[0].shape, jnp.float32)
    return plgpu.elementwise_inline_asm(
        text, args=args, constraints='=f' + ',f' * len(args), pack=1,
        result_shape_dtypes=[result])[0]

  return apply


_APPROXIMATE = Approximate(
    exp2=_assembly('ex2.approx.ftz.f32 $0, $1;'),
    reciprocal=_assembly('rcp.approx.ftz.f32 $0, $1;'),
    # One instruction: the sign is a part of it. The compiler keeps products and sums apart.
    less_product=_assembly('{.reg .f32 x; neg.f32 x, $2; fma.rn.f32 $0, x, $3, $1;}'))


def arithmetic(dtype: DTypeLike, interpret: bool) -> Exact:
  """The elementary functions for inputs of a dtype; in interpret mode there is no PTX."""
  return EXACT if interpret or dtype == jnp.float32 else _APPROXIMATE


# An array, or the shape of a result, and how the grid cuts it into blocks.
Operand = tuple[jax.Array | jax.ShapeDtypeStruct, pl.BlockSpec]
Index = int | jax.Array


class KernelLayout:
  """Blocks, grid and loops of a kernel for one set of queries and keys.

  A program owns one tile of queries or keys of one head and goes through the tiles of the
  other kind. Inputs and outputs are (array or shape, BlockSpec).

  Args:
    kernel: a key of BLOCKS.
    slopes_H: slopes of the position bias, where the heads are a part of the model's; None for
      those of so many heads.
    interpret: run in Pallas' interpreter, on any machine.
    sizes: accumulate sums of |f|, too.
  """

  def __init__(self, kernel: str, spec: AttentionSpec, q_BxTxHxDh: jax.Array,
               k_BxTxHkvxDh: jax.Array, slopes_H: jax.Array | None, interpret: bool,
               sizes: bool = False):
    self.batch, self.length, self.heads, head_dim = q_BxTxHxDh.shape
    self.kv_heads = k_BxTxHkvxDh.shape[2]
    self.blocks = choose_blocks(kernel, q_BxTxHxDh.dtype, head_dim)
    # The sizes are powers of two, so whole tiles of the larger size are whole ones of both.
    block = max(self.blocks.own, self.blocks.other)
    self.padded = -(-self.length // block) * block
    self.tile = make_tile(spec, head_dim, axis=1, sizes=sizes,
                          length=self.length if self.padded != self.length else None,
                          arithmetic=arithmetic(q_BxTxHxDh.dtype, interpret))
    self.dims = _powers_of_two(head_dim)
    self.parts, self.tiles = 1, self.padded // self.blocks.own
    self.owns_queries = kernel in ('forward', 'dq')
    self.per_head, self.interpret = kernel != 'dkv', interpret
    self.slopes_H = spec.position.slopes(self.heads) if slopes_H is None else slopes_H

  def only(self, keys: int) -> None:
    """Takes the first `keys` keys only, the queries of each tile in parts if they are few."""
    self.tiles = -(-keys // self.blocks.own)
    programs = self.tiles * self.heads * self.batch
    # As many parts as give _PROGRAMS programs, but none of fewer than about eight tiles.
    self.parts = max(1, min(_PROGRAMS // programs, self.padded // self.blocks.other // 8))

  def own_tile(self, n: jax.Array) -> jax.Array:
    """The tile of program n; queries from the last, which under a causal mask see most.

    Programs start in order: the longest first leaves no long one running alone at the end.
    """
    return self.tiles - 1 - n if self.owns_queries else lax.div(n, self.parts)

  # In these index maps n numbers programs of a head, h heads. The tiles that a program goes
  # through are not blocks of the grid: it gets the whole sequence of its head and loads from it.

  def own(self, x_BxTxHxDh: jax.Array, dtype: DTypeLike | None = None) -> Operand:
    """The program's own tile; with a dtype, of an output."""
    heads, head = x_BxTxHxDh.shape[2], self._head(x_BxTxHxDh.shape[2])
    shape = self.batch, self.padded, heads, self.tile.head_dim
    x = self._pad(x_BxTxHxDh) if dtype is None else jax.ShapeDtypeStruct(shape, dtype)
    return x, pl.BlockSpec((None, self.blocks.own, None, shape[-1]),
                           lambda n, h, b: (b, self.own_tile(n), head(h), 0))

  def whole(self, x_BxTxHxDh: jax.Array) -> Operand:
    """All tokens of the program's head."""
    head = self._head(x_BxTxHxDh.shape[2])
    return self._pad(x_BxTxHxDh), pl.BlockSpec(
        (None, self.padded, None, self.tile.head_dim), lambda n, h, b: (b, 0, head(h), 0))

  def group(self, x_BxTxHxDh: jax.Array) -> Operand:
    """All tokens of all query heads that share the program's keys."""
    group = self.heads // self.kv_heads
    return self._pad(x_BxTxHxDh), pl.BlockSpec(
        (None, self.padded, group, self.tile.head_dim), lambda n, h, b: (b, 0, h, 0))

  def own_row(self, x_BxHxT: jax.Array | None = None) -> Operand:
    """A number per row of the program's own tile; None for an output."""
    return self._row(x_BxHxT), pl.BlockSpec(
        (None, None, self.blocks.own), lambda n, h, b: (b, h, self.own_tile(n)))

  def whole_row(self, x_BxHxT: jax.Array) -> Operand:
    """A number per token of the program's head."""
    return self._row(x_BxHxT), pl.BlockSpec(
        (None, None, self.padded), lambda n, h, b: (b, h, 0))

  def group_row(self, x_BxHxT: jax.Array) -> Operand:
    """A number per token of all query heads that share the program's keys."""
    group = self.heads // self.kv_heads
    return self._row(x_BxHxT), pl.BlockSpec(
        (None, group, self.padded), lambda n, h, b: (b, h, 0))

  def part(self) -> Operand:
    """An output: a number per key of the program's own tile, from its part of the queries."""
    shape = self.batch, self.heads, self.parts, self.tiles * self.blocks.own
    return jax.ShapeDtypeStruct(shape, jnp.float32), pl.BlockSpec(
        (None, None, None, self.blocks.own),
        lambda n, h, b: (b, h, lax.rem(n, self.parts), self.own_tile(n)))

  def _head(self, heads: int) -> Callable[[jax.Array], jax.Array]:
    """From a program's head to the one of an array with so many heads."""
    shared = (self.heads if self.per_head else self.kv_heads) // heads
    return lambda h: lax.div(h, shared)

  def _pad(self, x_BxTxHxDh: jax.Array) -> jax.Array:
    return jnp.pad(x_BxTxHxDh, ((0, 0), (0, self.padded - self.length), (0, 0), (0, 0)))

  def _row(self, x_BxHxT: jax.Array | None) -> jax.Array | jax.ShapeDtypeStruct:
    if x_BxHxT is None:
      return jax.ShapeDtypeStruct((self.batch, self.heads, self.padded), jnp.float32)
    return jnp.pad(x_BxHxT, ((0, 0), (0, 0), (0, self.padded - self.length)))

  def over_queries(self, kernel: Callable[..., None], inputs: Sequence[Operand],
                   outputs: Sequence[Operand]) -> Sequence[jax.Array]:
    """Runs a kernel whose programs own queries and go through the keys that they see."""
    ranges = key_tiles(self.tile.spec.mask, self.length, self.blocks.own, self.blocks.other)
    return self._call(kernel, ranges, inputs, outputs)

  def over_keys(self, kernel: Callable[..., None], inputs: Sequence[Operand],
                outputs: Sequence[Operand]) -> Sequence[jax.Array]:
    """Runs a kernel whose programs own keys and go through the queries that see them."""
    ranges = query_tiles(self.tile.spec.mask, self.length, self.blocks.other, self.blocks.own)
    return self._call(kernel, ranges, inputs, outputs)

  def _call(self, kernel: Callable[..., None], ranges: Ranges, inputs: Sequence[Operand],
            outputs: Sequence[Operand]) -> Sequence[jax.Array]:
    # Loops that no tile needs, such as that over masked tiles before the full ones under a
    # causal mask, are left out of the program.
    self.head = bool((ranges.first < ranges.first_full).any())
    self.tail = bool((ranges.last_full < ranges.last).any())
    tables = jnp.asarray(np.stack(ranges)), jnp.asarray(self.slopes_H, jnp.float32)
    table = lambda x: pl.BlockSpec(x.shape, lambda n, h, b: (0,) * x.ndim)
    call = pl.pallas_call(
        functools.partial(kernel, self),
        grid=(self.tiles * self.parts, self.heads if self.per_head else self.kv_heads, self.batch),
        in_specs=[*map(table, tables), *(spec for _, spec in inputs)],
        out_specs=[spec for _, spec in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
        compiler_params=plgpu.CompilerParams(
            num_warps=self.blocks.warps, num_stages=self.blocks.stages),
        interpret=self.interpret)
    return call(*tables, *(x for x, _ in inputs))

  def tokens(self, *arrays_BxTxHxDh: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays without their padding."""
    return tuple(x[:, :self.length] for x in arrays_BxTxHxDh)

  def rows(self, *arrays_BxHxT: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x[..., :self.length] for x in arrays_BxHxT)

  # Inside a kernel.

  def load(self, ref: Any, start: Index, size: int, *head: Index) -> list[jax.Array]:
    """Parts (size, d) of some rows of a reference to (T, Dh) or (T, H, Dh)."""
    return [ref[(pl.ds(start, size), *head, pl.ds(first, d))] for first, d in self.dims]

  def zeros(self) -> list[jax.Array]:
    return [jnp.zeros((self.blocks.own, d), jnp.float32) for _, d in self.dims]

  def store(self, ref: Any, parts: Sequence[jax.Array]) -> None:
    for (first, d), part in zip(self.dims, parts):
      ref[:, pl.ds(first, d)] = part.astype(ref.dtype)

  def loop(self, bounds: Sequence[jax.Array], step: Callable[[jax.Array, bool, Any], Any],
           carry: Any) -> Any:
    """carry = step(number of the other tile, is it masked?, carry) over all it needs."""
    first, first_full, last_full, last = bounds
    # Three loops: only tiles at the edges of the mask pay for it.
    for lo, hi, masked, needed in ((first, first_full, True, self.head),
                                   (first_full, last_full, False, True),
                                   (last_full, last, True, self.tail)):
      if needed:
        carry = lax.fori_loop(lo, hi, lambda n, carry: step(n, masked, carry), carry)
    return carry

  def scores(self, slope: jax.Array, q_parts: Sequence[jax.Array], k_parts: Sequence[jax.Array],
             i: jax.Array, j: jax.Array, masked: bool, keys_first: bool = False,
             ) -> tuple[jax.Array, jax.Array | None]:
    """Scores (q, k), or (k, q) for keys_first, and which of them count (None: all)."""
    product = products(k_parts, q_parts) if keys_first else products(q_parts, k_parts)
    return self.tile.scores(product, slope, i, j), self.tile.keep(i, j) if masked else None

  def own_queries(self, ranges_ref: Any, slopes_ref: Any,
                  ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Slope, positions (q, 1) and bounds of the loop of a program that owns queries."""
    own = self.own_tile(pl.program_id(0))
    i = own * self.blocks.own + jnp.arange(self.blocks.own)
    return slopes_ref[pl.program_id(1)], i[:, None], [ranges_ref[n, own] for n in range(4)]

  def own_keys(self, ranges_ref: Any) -> tuple[jax.Array, list[jax.Array]]:
    """Positions (k, 1) and bounds of the loop of a program that owns keys."""
    own = self.own_tile(pl.program_id(0))
    j = own * self.blocks.own + jnp.arange(self.blocks.own)
    return j[:, None], [ranges_ref[n, own] for n in range(4)]

  def other(self, ref: Any, n: jax.Array, *head: Index) -> list[jax.Array]:
    return self.load(ref, n * self.blocks.other, self.blocks.other, *head)

  def other_row(self, ref: Any, n: jax.Array, *head: Index) -> jax.Array:
    return ref[(*head, pl.ds(n * self.blocks.other, self.blocks.other))][None, :]

  def others(self, n: jax.Array) -> jax.Array:
    """Positions of another tile, along the second axis."""
    return (n * self.blocks.other + jnp.arange(self.blocks.other))[None, :]


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
  """a (m, d) times b, summed over the given axis of b; float32 inputs at full precision."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=precision,
                         preferred_element_type=jnp.float32)


def products(a_parts: Sequence[jax.Array], b_parts: Sequence[jax.Array]) -> jax.Array:
  """Products of rows with rows, summed over the parts of the head dimension."""
  return functools.reduce(jnp.add, (_dot(a, b, 1) for a, b in zip(a_parts, b_parts)))


def weighted(p: jax.Array, parts: Sequence[jax.Array]) -> list[jax.Array]:
  """Rows of every part of the head dimension, weighted by p and summed."""
  return [_dot(p, x, 0) for x in parts]


def _powers_of_two(head_dim: int) -> list[tuple[int, int]]:
  """((first channel, size), ...) of the parts of a head dimension, largest first."""
  sizes = [1 << n for n in reversed(range(head_dim.bit_length())) if head_dim >> n & 1]
  return [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
