"""Importance of every key without a T x T map (Section 3.2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.arguments import explained
from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, TransformedQK, transform_qk
from sink_jax.kernels import chunked, flash
from sink_jax.kernels.dispatch import choose_importance
from sink_jax.kernels.epilogue import row_weights

_SCORES = 2**21  # of one head at a time where there are no kernels: 8 MiB, which stay cached


class Importance(NamedTuple):
  """alpha_k = sum_{i >= k} A_ik / (T - k + 1) of every key, per head.

  raw: of the attention weights as they multiply the values; where rows sum to one
    it equals `normalized`. normalized: of the row-normalised (proxy) scores.
  bias_slot: mean normalised weight of the bias slot; None without one.
  bias_slot_released: the same as the release computes it, with the dummy row of
    weight one that its kernel needs: (1 + sum_i w_i) / (T + 1).
  """

  raw: jax.Array  # (B, H, T)
  normalized: jax.Array  # (B, H, T)
  bias_slot: jax.Array | None  # (B, H)
  bias_slot_released: jax.Array | None  # (B, H)


@explained
def streaming_importance(spec: AttentionSpec, q_BxTxHxDh, k_BxTxHkvxDh, params=None, *,
                         keys: int | None = None,
                         implementation: str | None = None) -> Importance:
  """Column means of attention in memory linear in T.

  All rows count, and the divisor of key k is T - k + 1 under every mask, as released.
  'chunked' alone has a gradient.

  Args:
    keys: only the first so many keys, such as 4 for Sink_1 to Sink_4: the rows are then
      normalised in one pass over the scores, and a second one over T x keys suffices.
    implementation: 'chunked', or 'pallas' (statistics of the rows, then sums over the
      columns, in two kernels); by default the one for this platform.

  Raises:
    ValueError: shapes or params that do not fit, `keys` outside 1..T.
    NotImplementedError: an implementation that does not run this case, with the reason.
  """
  params = params or {}
  return transformed_importance(spec, transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params), params,
                                keys=keys, implementation=implementation)


def transformed_importance(spec: AttentionSpec, qk: TransformedQK, params, *,
                           keys: int | None = None,
                           implementation: str | None = None) -> Importance:
  """`streaming_importance` of queries and keys that are transformed already."""
  q, k = qk
  length = q.shape[1]
  keys = length if keys is None else keys
  if not 1 <= keys <= length:
    raise ValueError(f'keys = {keys} is outside 1..{length}.')
  sums = {'chunked': _chunked, 'pallas': _pallas}[choose_importance(implementation, q, k)]
  raw, normalized, slot = sums(spec, q, k, params, keys)
  rows_seeing_k = length - jnp.arange(keys)  # T - k + 1
  return Importance(
      raw=raw / rows_seeing_k,
      normalized=normalized / rows_seeing_k,
      bias_slot=None if slot is None else slot / length,
      bias_slot_released=None if slot is None else (1 + slot) / (length + 1))


def _chunked(spec, q, k, params, keys):
  """Rows by the reference definition, a block of queries at a time."""
  batch, length, heads, _ = q.shape

  def block(q_block, i, key_block, j, seen):
    rows = reference.rows(spec, q_block, key_block, params, i, j)
    real_L = i < length  # rows of padding count nothing
    columns = lambda a: jnp.sum(jnp.where(real_L[:, None], a[..., :seen], 0), axis=-2)
    sums = [columns(rows.weights_BxHxLxT), columns(rows.proxy_BxHxLxT)]
    if spec.kv_bias.has_extra_key:
      sums.append(jnp.sum(jnp.where(real_L, rows.extra_proxy_BxHxL, 0), axis=-1))
    return (), tuple(sums)

  totals = [jnp.zeros((batch, heads, keys))] * 2
  slot = jnp.zeros((batch, heads)) if spec.kv_bias.has_extra_key else None
  for first, last, lo, hi in chunked.spans(spec, length):
    seen = max(0, min(hi, keys) - lo)  # of this span's keys, those that are asked for
    see = lambda q_block, i: block(q_block, i, k[:, lo:hi], jnp.arange(lo, hi), seen)
    zeros = (jnp.zeros((batch, heads, seen)),) * 2 + (() if slot is None else (slot * 0,))
    size = chunked.BLOCK
    while size % 2 == 0 and size * (hi - lo) > _SCORES:
      size //= 2
    sums = chunked.map_blocks(see, first, (q[:, first:last],), zeros, size)[1]
    totals = [total.at[..., lo:lo + seen].add(x) for total, x in zip(totals, sums)]
    slot = None if slot is None else slot + sums[2]
  return *totals, slot


def _pallas(spec, q, k, params, keys):
  stats = flash.statistics(spec, q, k)
  raw, share, slot = row_weights(spec, q, *stats, params)
  if spec.similarity.exponential and spec.rows_sum_to_one:
    columns = flash.column_sums(spec, keys, q, k, stats[0], share) * 2  # both are the same
  else:
    columns = flash.column_sums(spec, keys, q, k, stats[0], raw, share)
  return *columns, None if slot is None else slot.sum(-1)
