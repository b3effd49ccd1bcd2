"""Importance of every key without a T x T map (Section 3.2).

A column of A can be summed only when its rows are normalised, so the scores are computed twice,
by kernels: once for the statistics of the rows, once for the sums over the columns. Plain XLA
takes whole rows of a block of queries at a time instead, and needs one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sink_jax.attention import AnyArray, reference
from sink_jax.attention.spec import AttentionSpec, Params, TransformedQK, transform_qk
from sink_jax.kernels import chunked, flash
from sink_jax.kernels.dispatch import choose_importance
from sink_jax.kernels.epilogue import row_weights

_SCORES = 2**21  # of one head at a time where there are no kernels: 8 MiB, which stay cached


class Importance(NamedTuple):
  """alpha_k = sum_i A_ik / (T - k + 1) of every key, per head.

  All rows i count: under a causal mask those from k on, as others do not see the key.

  Attributes:
    raw: alpha where A are the attention weights that multiply the values; if rows sum to one, it
      equals `normalized`.
    normalized: alpha where A are the row-normalised (proxy) scores.
    bias_slot: the mean over queries of the extra key's normalised weight w_i; None without one.
    bias_slot_released: this mean as the official code (sail-sg/Attention-Sink) computes it, with
      the additional row of weight one that its kernel needs: (1 + sum_i w_i) / (T + 1).
  """

  raw: Float[Array, '*B H T']
  normalized: Float[Array, '*B H T']
  bias_slot: Float[Array, '*B H'] | None
  bias_slot_released: Float[Array, '*B H'] | None


def streaming_importance(
    spec: AttentionSpec, q_BxTxHxDh: Float[AnyArray, 'B T H Dh'],
    k_BxTxHkvxDh: Float[AnyArray, 'B T Hkv Dh'], params: Params | None = None, *,
    keys: int | None = None, implementation: str | None = None) -> Importance:
  """Computes the importance of every key, a mean over a column of A, in memory linear in T.

  All rows count, and the divisor of key k is T - k + 1 under every mask, as in the official code
  (sail-sg/Attention-Sink). Only 'chunked' is differentiable. Embeddings of positions are not
  applied, see `attend`.

  Args:
    params: {component: {name: array}}, as for `attend`.
    keys: how many keys are measured, from the first on, such as 4 for Sink_1 to Sink_4; by default
      all. Kernels then need one pass over all scores to normalise the rows, and a second one over
      T x keys alone.
    implementation: 'chunked', or 'pallas' (two kernels: statistics of the rows, then sums over the
      columns). By default 'pallas' where it is compiled and runs the case, else 'chunked'.

  Raises:
    ValueError: shapes, dtypes or params do not fit, or `keys` lies outside 1..T.
    NotImplementedError: the implementation does not run this case; the message gives the reason.
  """
  params = params or {}
  return transformed_importance(spec, transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params), params,
                                keys=keys, implementation=implementation)


def transformed_importance(spec: AttentionSpec, qk: TransformedQK, params: Params, *,
                           keys: int | None = None,
                           implementation: str | None = None) -> Importance:
  """`streaming_importance` of queries and keys that are transformed already."""
  q, k = qk
  length = q.shape[1]
  keys = length if keys is None else keys
  if not 1 <= keys <= length:
    raise ValueError(f'keys = {keys} is outside 1..{length}.')
  sums = {'chunked': _chunked, 'pallas': _pallas}[choose_importance(implementation, spec, q, k)]
  raw, normalized, extra = sums(spec, q, k, params, keys)
  rows_seeing_k = length - jnp.arange(keys)  # T - k + 1
  return Importance(
      raw=raw / rows_seeing_k,
      normalized=normalized / rows_seeing_k,
      bias_slot=None if extra is None else extra / length,
      bias_slot_released=None if extra is None else (1 + extra) / (length + 1))


# Both return the sums over columns (B, H, keys) of the weights and of the proxy scores, and the
# sum (B, H) of the extra key's, or None.


def _chunked(spec: AttentionSpec, q: jax.Array, k: jax.Array, params: Params, keys: int,
             ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Rows by the reference definition, a block of queries at a time."""
  batch, length, heads, _ = q.shape

  def block(q_block: jax.Array, i: jax.Array, key_block: jax.Array, j: jax.Array, count: int,
            ) -> tuple[tuple[()], tuple[jax.Array, ...]]:
    rows = reference.rows(spec, q_block, key_block, params, i, j)
    real_L = i < length  # rows of padding count nothing
    columns = lambda a: jnp.sum(jnp.where(real_L[:, None], a[..., :count], 0), axis=-2)
    sums = [columns(rows.weights_BxHxLxT), columns(rows.proxy_BxHxLxT)]
    if rows.extra_proxy_BxHxL is not None:
      sums.append(jnp.sum(jnp.where(real_L, rows.extra_proxy_BxHxL, 0), axis=-1))
    return (), tuple(sums)

  totals = [jnp.zeros((batch, heads, keys))] * 2
  extra = jnp.zeros((batch, heads)) if spec.kv_bias.has_extra_key else None
  for first, last, lo, hi in chunked.spans(spec, length):
    count = max(0, min(hi, keys) - lo)  # of this span's keys, those that are asked for
    sums_of = lambda q_block, i: block(q_block, i, k[:, lo:hi], jnp.arange(lo, hi), count)
    zeros = (jnp.zeros((batch, heads, count)),) * 2 + (() if extra is None else (extra * 0,))
    # Whole rows are held here, which for long sequences must not grow with T: fewer at a time.
    size = chunked.BLOCK
    while size % 2 == 0 and size * (hi - lo) > _SCORES:
      size //= 2
    sums = chunked.map_blocks(sums_of, first, (q[:, first:last],), zeros, size)[1]
    totals = [total.at[..., lo:lo + count].add(x) for total, x in zip(totals, sums)]
    extra = None if extra is None else extra + sums[2]
  return totals[0], totals[1], extra


def _pallas(spec: AttentionSpec, q: jax.Array, k: jax.Array, params: Params, keys: int,
            ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Two kernels: statistics of the rows, then weighted sums over the columns."""
  stat, power_stat, sizes = flash.statistics(spec, q, k)
  raw, share, extra = row_weights(spec, q, stat, power_stat, sizes, params)
  if spec.similarity.kind == 'exponential' and spec.rows_sum_to_one:
    # Weights and proxy are the same: one column sum serves as both.
    columns = flash.column_sums(spec, keys, q, k, stat, share) * 2
  else:
    columns = flash.column_sums(spec, keys, q, k, stat, raw, share)
  return columns[0], columns[1], None if extra is None else extra.sum(-1)
