"""Attention in plain XLA with memory linear in T: one block of query rows at a time.

The queries are cut into a few spans, each with the static range of keys that it can
see, so that masked work is skipped; within a span a loop runs over blocks of rows. A block holds
whole rows of scores, so no running maximum is needed. The forward pass keeps its output and the
statistics of its rows, and the backward pass recomputes the scores of a block from them: the
gradient that JAX would derive from the loop would store the scores of every block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, Params
from sink_jax.kernels.epilogue import ATTENTION, PartialAttention
from sink_jax.kernels.rectified_tile import make_tile
from sink_jax.kernels.score_tile import ScoreTile, row_cotangents

BLOCK = 128  # query rows at a time
_SPANS = 8  # at most; a causal mask then skips 7/16 of the scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHxDh: jax.Array,
         v_BxTxHxDh: jax.Array) -> PartialAttention:
  """Rows and statistics of transformed queries and keys; differentiable in q, k and v."""
  return _forward(spec, q_BxTxHxDh, k_BxTxHxDh, v_BxTxHxDh)[0]


def whole_rows(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
               v_BxTxHkvxDh: jax.Array, params: Params) -> jax.Array:
  """Finished output (B, T, H, Dh) by the definition, for normalizers that clip single weights.

  Of a block its inputs alone are kept for the backward pass, which computes it again.
  """
  @jax.checkpoint
  def block(q_block: jax.Array, i: jax.Array, keys: jax.Array, values: jax.Array,
            j: jax.Array, params: Params) -> tuple[tuple[jax.Array], tuple[()]]:
    return (reference.attend(spec, q_block, keys, values, params, i, j),), ()

  parts = []
  for first, last, lo, hi in spans(spec, q_BxTxHxDh.shape[1]):
    rows_of = functools.partial(block, keys=k_BxTxHkvxDh[:, lo:hi], values=v_BxTxHkvxDh[:, lo:hi],
                                j=jnp.arange(lo, hi), params=params)
    parts += map_blocks(rows_of, first, (q_BxTxHxDh[:, first:last],))[0]
  return checkpoint_name(jnp.concatenate(parts, 1), ATTENTION)


def _forward(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[
    PartialAttention, tuple[jax.Array, jax.Array, jax.Array, PartialAttention]]:
  tile = _tile(spec, q)

  def block(q_block: jax.Array, i: jax.Array, keys: jax.Array, values: jax.Array,
            j: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[()]]:
    s, keep = _scores(tile, q_block, keys, i, j)
    p, _, state = tile.update(tile.start((*s.shape[:-1], 1)), s, keep)
    factor, stat, power_stat, _ = tile.finish(state)
    out = jnp.einsum('bhlt,bthd->blhd', p.astype(v.dtype), values,
                     preferred_element_type=jnp.float32)
    out = out if factor is None else out * _rows_last(factor)
    zeros = jnp.zeros((*s.shape[:-1], 1))
    return (out, *(_rows_last(zeros if x is None else x) for x in (stat, power_stat))), ()

  # The spans are unrolled: each has another number of keys, hence other shapes.
  parts = []
  for first, last, lo, hi in spans(spec, q.shape[1]):
    rows_of = functools.partial(block, keys=k[:, lo:hi], values=v[:, lo:hi], j=jnp.arange(lo, hi))
    parts.append(map_blocks(rows_of, first, (q[:, first:last],))[0])
  out, *stats = (jnp.concatenate(p, 1) for p in zip(*parts))
  rows = PartialAttention(out, *(jnp.swapaxes(x[..., 0], 1, 2) for x in stats))
  # The name lets a rematerialisation policy keep the rows; the scores are recomputed anyway.
  result = checkpoint_name(rows, ATTENTION)
  return result, (q, k, v, result)


def _backward(
    spec: AttentionSpec, saved: tuple[jax.Array, jax.Array, jax.Array, PartialAttention],
    cotangents: PartialAttention) -> tuple[jax.Array, ...]:
  q, k, v, result = saved
  tile, product = _tile(spec, q), functools.partial(
      jnp.einsum, preferred_element_type=jnp.float32)
  # In the matmuls the gradient has the dtype of the values, as the weights have.
  per_row = (q, cotangents.out_BxTxHxDh.astype(v.dtype), *(
      jnp.swapaxes(x, 1, 2) for x in row_cotangents(spec, result, cotangents)))
  dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)

  def block(q_block: jax.Array, do: jax.Array, *rows_BxLxH: jax.Array, i: jax.Array,
            keys: jax.Array, values: jax.Array, j: jax.Array,
            ) -> tuple[tuple[jax.Array], tuple[jax.Array, jax.Array]]:
    s, keep = _scores(tile, q_block, keys, i, j)
    dp = product('blhd,bthd->bhlt', do, values)
    p, ds = tile.cotangent(s, keep, dp, [jnp.swapaxes(x, 1, 2)[..., None] for x in rows_BxLxH])
    ds = ds.astype(keys.dtype)
    return (product('bhlt,bthd->blhd', ds, keys) * tile.scale,), (
        product('bhlt,blhd->bthd', ds, q_block) * tile.scale,
        product('bhlt,blhd->bthd', p.astype(do.dtype), do))

  for first, last, lo, hi in spans(spec, q.shape[1]):
    keys, values = k[:, lo:hi], v[:, lo:hi]
    gradients_of = functools.partial(block, keys=keys, values=values, j=jnp.arange(lo, hi))
    zeros = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    # A query belongs to one block, so dq is joined; every block adds to dk and dv of its keys.
    (dq_span,), (dk_span, dv_span) = map_blocks(
        gradients_of, first, tuple(x[:, first:last] for x in per_row), zeros)
    dq.append(dq_span)
    dk, dv = dk.at[:, lo:hi].add(dk_span), dv.at[:, lo:hi].add(dv_span)
  return jnp.concatenate(dq, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


rows.defvjp(_forward, _backward)


def _tile(spec: AttentionSpec, q_BxTxHxDh: jax.Array) -> ScoreTile:
  # With a length in any case, since `map_blocks` may pad a span with rows past the last token.
  return make_tile(spec, q_BxTxHxDh.shape[-1], axis=-1, length=q_BxTxHxDh.shape[1])


def _scores(tile: ScoreTile, q_block: jax.Array, keys: jax.Array, i_L: jax.Array,
            j_T: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Scores (B, H, L, T) of a block and which of them count."""
  product = jnp.einsum('blhd,bthd->bhlt', q_block, keys, preferred_element_type=jnp.float32)
  slopes_H = jnp.asarray(tile.spec.position.slopes(keys.shape[2]))
  i, j = i_L[:, None], j_T[None, :]
  return tile.scores(product, slopes_H[:, None, None], i, j), tile.keep(i, j)


def spans(spec: AttentionSpec, length: int) -> Iterator[tuple[int, int, int, int]]:
  """(first query, last query, first key, last key) of each span, half-open."""
  blocks = -(-length // BLOCK)
  size = -(-blocks // _SPANS) * BLOCK
  for first in range(0, length, size):
    last = min(first + size, length)
    yield first, last, *spec.mask.key_range(first, last - 1, length)


def map_blocks(f: Callable[..., tuple[tuple, tuple]], first: int, arrays: tuple[jax.Array, ...],
               totals: tuple[jax.Array, ...] = (), size: int | None = None) -> tuple[tuple, tuple]:
  """Runs `joined, summed = f(*blocks, i=positions)` over blocks of rows (axis 1).

  The last span is padded to whole blocks with rows of zeros, at positions past the last token;
  f lets them see nothing, and their results are cut off.

  Args:
    first: position of the first row.
    size: rows of a block, by default and at most BLOCK, which it must divide.

  Returns:
    The joined results, and `totals` plus the sums of the summed ones.
  """
  length, size = arrays[0].shape[1], size or BLOCK
  count = -(-length // size)
  if count == 1:  # without a loop, and without padding
    joined, summed = f(*arrays, i=first + jnp.arange(length))
    return joined, tuple(map(jnp.add, totals, summed))
  pad = count * size - length

  def split(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], count * size, *x.shape[3:])[:, :length]

  def step(totals: tuple[jax.Array, ...], inputs: tuple[jax.Array, tuple[jax.Array, ...]],
           ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    offset, blocks = inputs
    joined, summed = f(*blocks, i=offset + jnp.arange(size))
    return tuple(map(jnp.add, totals, summed)), joined

  offsets = first + size * jnp.arange(count)
  totals, joined = jax.lax.scan(step, totals, (offsets, tuple(map(split, arrays))))
  return tuple(map(join, joined)), totals


def _rows_last(x_BxHxLx1: jax.Array) -> jax.Array:
  return jnp.swapaxes(x_BxHxLx1, 1, 2)
