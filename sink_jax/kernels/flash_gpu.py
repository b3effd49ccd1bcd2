"""Pallas kernels for NVIDIA GPUs from Ampere on (Triton): forward, dq, and dk with dv.

A program owns one tile of queries (or keys) of one head. It loops over tiles of the keys (or
queries) and accumulates in registers. It uses no atomics: a program writes only its tile, so
results repeat bit for bit. For the same reason the backward pass is two kernels: dq belongs to
queries, dk and dv to keys, and both compute the scores.

Arrays keep the axes (B, T, H, Dh) of the model; a tile is loaded with the stride of its head.
Sizes of Triton tiles are powers of two, so a head dimension is split into such parts without
padding, 96 into 64 + 32. In comments q and k are the sizes of a tile, and d is the size of a part
of the head dimension.

JAX deprecates Pallas' Triton back end from 0.11 on, in favour of Mosaic GPU. Only this file names
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.block_mask import tiles_of
from sink_jax.kernels.score_tile import ScoreTile

Parts = list[jax.Array]  # (rows, d), the parts of the head dimension


class TritonBlocks(NamedTuple):
  """The tile sizes of a kernel.

  own: rows of the tile of queries or keys that a program owns. other: rows of the tiles that it
  loops over. stages: tiles in flight; the next ones load while one is multiplied.
  """

  own: int
  other: int
  warps: int
  stages: int


# By kernel and largest head dimension, for bfloat16. A program accumulates in registers: an own x
# Dh tile of float32 for the output, two for dk and dv, and an own x other tile of scores. So tiles
# shrink, or warps double, as the head dimension grows. Chosen by the registers and spills that
# ptxas reports for sm_90a, H100 and H200; never timed.
BLOCKS = {
  'forward': {
    64: TritonBlocks(128, 64, 4, 3),
    128: TritonBlocks(64, 64, 4, 3),
    256: TritonBlocks(64, 32, 8, 2),
  },
  'dq': {
    64: TritonBlocks(64, 64, 4, 3),
    128: TritonBlocks(64, 64, 4, 3),
    256: TritonBlocks(64, 32, 8, 2),
  },
  'dkv': {
    64: TritonBlocks(64, 64, 4, 3),
    128: TritonBlocks(128, 32, 8, 2),
    256: TritonBlocks(64, 16, 8, 2),
  },
}
# For every kernel: products at full precision, without tensor cores, need many registers.
_FLOAT32 = TritonBlocks(32, 16, 4, 1)


class TritonTiling(NamedTuple):
  """The facts about a kernel's tiles that are known when it is traced.

  parts: (first channel, size) of each part of the head dimension. group: query heads that share a
  head of keys. loops: see `Ranges.loops`.
  """

  tile: ScoreTile
  blocks: TritonBlocks
  parts: list[tuple[int, int]]
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
  interpret: bool,
) -> tuple[jax.Array, ...]:
  """Runs a kernel of BLOCKS.

  Args:
    own: arrays (B, T, H, Dh) or rows (B, H, T); a program gets the tile that it owns.
    other: arrays or rows; a program gets all tokens of its head, or of its group's query heads.
    results: shapes of the outputs, of which a program writes one tile each.
  """
  by_queries = kernel != 'dkv'
  q, k = (own[0], other[0]) if by_queries else (other[0], own[0])
  batch, length, programs, head_dim = own[0].shape
  blocks = _blocks_of(kernel, q)
  padding = -length % max(blocks.own, blocks.other)  # powers of two
  ranges = tiles_of(spec.mask, length, blocks.own, blocks.other, by_queries)
  tiles = (length + padding) // blocks.own
  tile = ScoreTile(spec, head_dim, axis=1, length=length if padding else None)
  tiling = TritonTiling(
    tile, blocks, _powers_of_two(head_dim), tiles, q.shape[2] // k.shape[2], ranges.loops
  )

  def block(x: jax.Array | jax.ShapeDtypeStruct, is_own: bool) -> pl.BlockSpec:
    """Index maps take the tile n of a head, the head h and the sequence b."""
    heads = x.shape[2 if x.ndim == 4 else 1]
    block_heads = None if heads <= programs else heads // programs
    shared = max(programs // heads, 1)
    size = blocks.own if is_own else length + padding
    # A program gets all tokens of `other`, and loads tiles from them.
    at = lambda n: _own_tile(n, tiles, by_queries) if is_own else 0
    if x.ndim == 4:
      return pl.BlockSpec(
        (None, size, block_heads, head_dim), lambda n, h, b: (b, at(n), lax.div(h, shared), 0)
      )
    return pl.BlockSpec((None, block_heads, size), lambda n, h, b: (b, lax.div(h, shared), at(n)))

  padded = functools.partial(_padded, padding)
  tables = jnp.asarray(np.stack(ranges)), slopes_H
  arrays = [padded(x) for x in (*own, *other)]
  shapes = [jax.eval_shape(padded, x) for x in results]
  out = pl.pallas_call(
    functools.partial(_KERNELS[kernel], tiling),
    grid=(tiles, programs, batch),
    in_specs=[
      *(pl.BlockSpec(x.shape, lambda n, h, b, x=x: (0,) * x.ndim) for x in tables),
      *(block(x, n < len(own)) for n, x in enumerate(arrays)),
    ],
    out_specs=[block(x, True) for x in shapes],
    out_shape=shapes,
    compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
    interpret=interpret,
  )(*tables, *arrays)
  return tuple(x[:, :length] if x.ndim == 4 else x[..., :length] for x in out)


def _blocks_of(kernel: str, q_BxTxHxDh: jax.Array) -> TritonBlocks:
  """The tile sizes of a kernel for the dtype and the head dimension of the queries."""
  if q_BxTxHxDh.dtype == jnp.float32:
    return _FLOAT32
  head_dim = q_BxTxHxDh.shape[-1]
  return next(blocks for limit, blocks in BLOCKS[kernel].items() if head_dim <= limit)


def _padded(tokens: int, x: jax.Array) -> jax.Array:
  """An array (B, T, H, Dh), or rows (B, H, T), with more tokens, which are zeros."""
  sizes = (0, tokens, 0, 0) if x.ndim == 4 else (0, 0, tokens)
  return jnp.pad(x, [(0, size) for size in sizes])


def _own_tile(n, tiles: int, by_queries: bool):
  """The tile of program n; the first programs get the last tiles of queries.

  Programs start in order. Under a causal mask the last queries see most keys: if they start first,
  no long program is left running at the end.
  """
  return tiles - 1 - n if by_queries else n


def _powers_of_two(head_dim: int) -> list[tuple[int, int]]:
  """((first channel, size), ...) of the parts of a head dimension, largest first."""
  sizes = [1 << n for n in reversed(range(head_dim.bit_length())) if head_dim >> n & 1]
  return [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]


def _forward_kernel(
  tiling: TritonTiling,
  ranges_ref,
  slopes_ref,
  q_ref,
  k_ref,
  v_ref,
  out_ref,
  *stat_refs,
):
  tile, own = tiling.tile, _own_tile(pl.program_id(0), tiling.tiles, True)
  slope, i = slopes_ref[pl.program_id(1)], _positions(own, tiling.blocks.own)[:, None]
  q = _load(tiling, q_ref, 0, tiling.blocks.own)

  def step(kj, masked, carry):
    out, state = carry
    j = _positions(kj, tiling.blocks.other)[None, :]
    s = tile.scores(_products(q, _other(tiling, k_ref, kj)), slope, i, j)
    p, factor, state = tile.update(state, s, tile.keep(i, j) if masked else None)
    # Weights are rounded to the dtype of v, for the tensor cores; their sums are of the exact
    # weights.
    added = _weighted(p.astype(v_ref.dtype), _other(tiling, v_ref, kj))
    return [o + x if factor is None else o * factor + x for o, x in zip(out, added)], state

  start = _zeros(tiling), tile.start((tiling.blocks.own, 1))
  out, state = _loop(tiling, ranges_ref, own, step, start)
  factor, *stats = tile.finish(state)
  _store(tiling, out_ref, out if factor is None else [o * factor for o in out])
  for ref, stat in zip(stat_refs, stats):
    ref[...] = jnp.zeros(ref.shape) if stat is None else stat.reshape(ref.shape)


def _dq_kernel(tiling: TritonTiling, ranges_ref, slopes_ref, q_ref, do_ref, *refs):
  *row_refs, k_ref, v_ref, dq_ref = refs
  tile, own = tiling.tile, _own_tile(pl.program_id(0), tiling.tiles, True)
  slope, i = slopes_ref[pl.program_id(1)], _positions(own, tiling.blocks.own)[:, None]
  q, do = (_load(tiling, ref, 0, tiling.blocks.own) for ref in (q_ref, do_ref))
  rows = [ref[...][:, None] for ref in row_refs]

  def step(kj, masked, dq):
    k, j = _other(tiling, k_ref, kj), _positions(kj, tiling.blocks.other)[None, :]
    s = tile.scores(_products(q, k), slope, i, j)
    dp = _products(do, _other(tiling, v_ref, kj))
    _, ds = tile.cotangent(s, tile.keep(i, j) if masked else None, dp, rows)
    return [x + y for x, y in zip(dq, _weighted(ds.astype(k_ref.dtype), k))]

  dq = _loop(tiling, ranges_ref, own, step, _zeros(tiling))
  _store(tiling, dq_ref, [x * tile.scale for x in dq])


def _dkv_kernel(tiling: TritonTiling, ranges_ref, slopes_ref, k_ref, v_ref, q_ref, do_ref, *refs):
  # A program owns a tile of keys and loops over all query heads of its group, so that it is the
  # only writer of its dk and dv. Tiles are (keys, queries): p and ds then enter both products
  # without a transposition.
  *row_refs, dk_ref, dv_ref = refs
  tile, own, other = tiling.tile, pl.program_id(0), tiling.blocks.other
  j = _positions(own, tiling.blocks.own)[:, None]
  k, v = (_load(tiling, ref, 0, tiling.blocks.own) for ref in (k_ref, v_ref))
  # The grid counts heads of keys; slopes belong to query heads.
  first_head = pl.program_id(1) * tiling.group

  def head(g, carry):
    slope = slopes_ref[first_head + g]
    at = () if tiling.group == 1 else (g,)

    def step(qi, masked, carry):
      dk, dv = carry
      q, do = _other(tiling, q_ref, qi, *at), _other(tiling, do_ref, qi, *at)
      i = _positions(qi, other)[None, :]
      s = tile.scores(_products(k, q), slope, i, j)
      rows = [ref[(*at, pl.ds(qi * other, other))][None, :] for ref in row_refs]
      p, ds = tile.cotangent(s, tile.keep(i, j) if masked else None, _products(v, do), rows)
      return (
        [x + y for x, y in zip(dk, _weighted(ds.astype(q_ref.dtype), q))],
        [x + y for x, y in zip(dv, _weighted(p.astype(do_ref.dtype), do))],
      )

    return _loop(tiling, ranges_ref, own, step, carry)

  carry = _zeros(tiling), _zeros(tiling)
  dk, dv = head(0, carry) if tiling.group == 1 else lax.fori_loop(0, tiling.group, head, carry)
  _store(tiling, dk_ref, [x * tile.scale for x in dk])
  _store(tiling, dv_ref, dv)


_KERNELS = {'forward': _forward_kernel, 'dq': _dq_kernel, 'dkv': _dkv_kernel}


def _loop(
  tiling: TritonTiling,
  ranges_ref,
  own,
  step: Callable[[jax.Array, bool, Any], Any],
  carry: Any,
) -> Any:
  """Folds carry = step(number of the other tile, is it masked?, carry) over the needed tiles."""
  bounds = [ranges_ref[n, own] for n in range(4)]
  for n, masked in tiling.loops:
    body = functools.partial(lambda masked, n, carry: step(n, masked, carry), masked)
    carry = lax.fori_loop(bounds[n], bounds[n + 1], body, carry)
  return carry


def _positions(n, size: int) -> jax.Array:
  return n * size + jnp.arange(size)


def _other(tiling: TritonTiling, ref, n, *head) -> Parts:
  return _load(tiling, ref, n * tiling.blocks.other, tiling.blocks.other, *head)


def _load(tiling: TritonTiling, ref, start, size: int, *head) -> Parts:
  """Some rows of a reference to (T, Dh) or (T, H, Dh)."""
  return [ref[(pl.ds(start, size), *head, pl.ds(first, d))] for first, d in tiling.parts]


def _store(tiling: TritonTiling, ref, parts: Parts) -> None:
  for (first, d), part in zip(tiling.parts, parts):
    ref[:, pl.ds(first, d)] = part.astype(ref.dtype)


def _zeros(tiling: TritonTiling) -> Parts:
  return [jnp.zeros((tiling.blocks.own, d), jnp.float32) for _, d in tiling.parts]


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
  """a (m, d) times b, summed over the given axis of b; float32 inputs at full precision."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(
    a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def _products(a: Parts, b: Parts) -> jax.Array:
  """Products of rows with rows, summed over the parts of the head dimension."""
  return functools.reduce(jnp.add, (_dot(x, y, 1) for x, y in zip(a, b)))


def _weighted(p: jax.Array, parts: Parts) -> Parts:
  """Rows of every part of the head dimension, weighted by p and summed."""
  return [_dot(p, x, 0) for x in parts]
