"""Importance of every key without a T x T map (Section 3.2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, prepare

_BLOCK = 128


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


def streaming_importance(spec: AttentionSpec, q_BxTxHxDh, k_BxTxHkvxDh, params=None) -> Importance:
  """Column means of attention in memory linear in T.

  Rows are computed by the reference definition, a block of queries at a time. All
  rows count, and the divisor of key k is T - k + 1 under every mask, as released.
  """
  params = params or {}
  q, k = prepare(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
  batch, length, heads, _ = q.shape
  count = -(-length // _BLOCK)
  size = min(length, _BLOCK)
  q = jnp.pad(q, ((0, 0), (0, count * size - length), (0, 0), (0, 0)))
  blocks = jnp.moveaxis(q.reshape(batch, count, size, heads, -1), 1, 0)

  def step(totals, inputs):
    block, first = inputs
    i = first + jnp.arange(size)
    rows = reference.rows(spec, block, k, params, i)
    real_L = i < length  # rows of padding count nothing
    columns = lambda a: jnp.sum(jnp.where(real_L[:, None], a, 0), axis=-2)
    sums = [columns(rows.weights_BxHxLxT), columns(rows.proxy_BxHxLxT)]
    if rows.slot_proxy_BxHxL is not None:
      sums.append(jnp.sum(jnp.where(real_L, rows.slot_proxy_BxHxL, 0), axis=-1))
    return tuple(map(jnp.add, totals, sums)), None

  zeros = [jnp.zeros((batch, heads, length))] * 2
  if spec.kv_bias.has_slot:
    zeros.append(jnp.zeros((batch, heads)))
  sums, _ = jax.lax.scan(step, tuple(zeros), (blocks, size * jnp.arange(count)))
  rows_seeing_k = length - jnp.arange(length)  # T - k + 1
  slot = sums[2] if spec.kv_bias.has_slot else None
  return Importance(
      raw=sums[0] / rows_seeing_k,
      normalized=sums[1] / rows_seeing_k,
      bias_slot=None if slot is None else slot / length,
      bias_slot_released=None if slot is None else (1 + slot) / (length + 1))
