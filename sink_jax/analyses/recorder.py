"""A recorder of sinks for any training loop in JAX: statistics of queries, keys and hidden states."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, transform_qk
from sink_jax.evaluate.activations import describe
from sink_jax.foreign import standard_promotion
from sink_jax.kernels import chunked
from sink_jax.kernels.importance import transformed_importance


class Attention(NamedTuple):
  """Statistics of one layer's attention by head, means over the batch except for the largest logit.

  Attributes:
    importance: alpha of the first keys, of the row-normalised (proxy) scores; see `Importance`.
    largest_logit: the largest score that a query sees, q . k / sqrt(Dh) with its bias and cap, over the batch
      (what QK-Clip bounds, Kimi K2, arXiv:2507.20534).
    entropy: the mean entropy of rows, divided by that of uniform attention; 1 is uniform.
  """

  importance: Float[Array, 'H K']
  largest_logit: Float[Array, ' H']
  entropy: Float[Array, ' H']


class Hidden(NamedTuple):
  """Statistics of one layer's hidden states, means over at most the first ten sequences."""

  largest: jax.Array  # |h|
  median: jax.Array  # of |h|
  kurtosis: jax.Array  # 3 for normally distributed numbers


@standard_promotion()
def record_attention(q_BxTxHxDh: Float[Array, 'B T H Dh'], k_BxTxHkvxDh: Float[Array, 'B T Hkv Dh'], *,
                     keys: int = 4, spec: AttentionSpec = AttentionSpec()) -> Attention:
  """Records the attention of queries and keys, in memory linear in T; to be called under `jax.jit`.

  Args:
    q_BxTxHxDh: queries before the rotation, which `spec` applies; for queries that are rotated already, use
      spec=AttentionSpec(position='Nope()').
    k_BxTxHkvxDh: keys, rotated like the queries.
    keys: how many keys are measured, from the first on.
    spec: how scores become weights, without learned parameters.
  """
  qk = transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, {})
  batch, length, heads, _ = q_BxTxHxDh.shape
  masses = transformed_importance(spec, qk, {}, keys=keys, entropy=True)
  largest_BxH = jnp.full((batch, heads), -jnp.inf)
  for first, last, lo, hi in chunked.spans(spec, length):
    def block(largest_BxH, rows):
      i_L, q_BxLxHxDh = rows
      j_T = jnp.arange(lo, hi)
      seen = spec.mask.keep(i_L[:, None], j_T) & (i_L < length)[:, None]
      scores = reference.scores(spec, q_BxLxHxDh, qk.k_BxTxHkvxDh[:, lo:hi], i_L, j_T)
      return jnp.maximum(largest_BxH, jnp.where(seen, scores, -jnp.inf).max((-2, -1))), None

    largest_BxH, _ = jax.lax.scan(block, largest_BxH, chunked.query_blocks(
        qk.q_BxTxHxDh[:, first:last], first))
  assert masses.entropy is not None
  return Attention(masses.normalized.mean(0), largest_BxH.max(0), masses.entropy.mean(0))


@standard_promotion()
def record_hidden(h_BxTxD: Float[Array, 'B T D']) -> Hidden:
  """Records the hidden states of a layer; to be called under `jax.jit`."""
  found = describe(h_BxTxD)
  return Hidden(found.activation_max, found.activation_median, found.kurtosis_moment)
