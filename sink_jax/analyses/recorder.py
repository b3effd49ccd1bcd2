"""A recorder of sinks for any JAX training loop: statistics of queries, keys and hidden states."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from sink_jax.attention.spec import AttentionSpec, transform_qk
from sink_jax.evaluate.activations import describe
from sink_jax.foreign import standard_promotion
from sink_jax.kernels.importance import transformed_importance
from sink_jax.models.record import Seen, largest_logit


class AttentionStatistics(NamedTuple):
  """Statistics of one layer's attention by head, means over the batch except for the largest logit.

  Attributes:
    importance: alpha of the first keys, of the row-normalised (proxy) scores; see `Importance`.
    largest_logit: the largest score that a query sees, q . k / sqrt(Dh) with its bias and cap, over
      the batch (what QK-Clip bounds, Kimi K2, arXiv:2507.20534).
    entropy: the mean entropy of rows, divided by that of uniform attention; 1 is uniform.
  """

  importance: Float[Array, 'H K']
  largest_logit: Float[Array, ' H']
  entropy: Float[Array, ' H']


class HiddenStatistics(NamedTuple):
  """Statistics of one layer's hidden states, means over at most the first ten sequences."""

  largest: jax.Array  # |h|
  median: jax.Array  # of |h|
  kurtosis: jax.Array  # 3 for normally distributed numbers


@standard_promotion()
def record_attention(
  q_BxTxHxDh: Float[Array, 'B T H Dh'],
  k_BxTxHkvxDh: Float[Array, 'B T Hkv Dh'],
  *,
  keys: int = 4,
  spec: AttentionSpec = AttentionSpec(),
) -> AttentionStatistics:
  """Records the attention of queries and keys, in memory linear in T; to be called under `jax.jit`.

  Args:
    q_BxTxHxDh: queries before the rotation, which `spec` applies; for queries that are rotated
      already, use spec=AttentionSpec(position='Nope()').
    k_BxTxHkvxDh: keys, rotated like the queries.
    keys: how many keys are measured, from the first on.
    spec: how scores become weights, without learned parameters.
  """
  seen = Seen(spec, transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, {}), {})
  masses = transformed_importance(spec, seen.qk, {}, keys=keys, entropy=True)
  assert masses.entropy is not None
  return AttentionStatistics(
    masses.normalized.mean(0), largest_logit(seen).max(0), masses.entropy.mean(0)
  )


@standard_promotion()
def record_hidden(h_BxTxD: Float[Array, 'B T D']) -> HiddenStatistics:
  """Records the hidden states of a layer; to be called under `jax.jit`."""
  described = describe(h_BxTxD)
  return HiddenStatistics(
    described.activation_max, described.activation_median, described.kurtosis_moment
  )
