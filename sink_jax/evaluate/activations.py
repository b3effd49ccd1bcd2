"""Statistics that a model takes of its activations while it records them.

Massive activations lie in fixed channels of the first token's hidden states (Section 3.1, Figures 2 and 7;
Sun et al., arXiv 2402.17762: beyond 100 and about 1,000 medians), whose key has another angle to the queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sink_jax.attention.spec import repeat_heads

SEQUENCES = 10  # of a probe that are described, as many as Sun et al. average over
BEYOND = (100, 1000)  # medians, beyond which entries are counted


class Activations(NamedTuple):
  """Statistics of the hidden states h (T, D) of sequences, averaged over the sequences.

  Attributes:
    activation_max: the largest |h|.
    activation_median: the median of |h| over all tokens and channels.
    activations_beyond_*: the number of |h| above 100 and 1,000 times the median of their sequence.
    kurtosis_moment: E[(h - E h)^4] / Var(h)^2 over tokens and channels, which is 3 for normally
      distributed numbers (Bondarenko et al. 2306.12929, Kaul et al. 2410.17174).
    kurtosis_channels: mean_d(s_d^4) / mean_d(s_d^2)^2 of the root mean squares s_d of the channels,
      from 1, if all are equal, to D, if all but one are zero (He et al. 2405.19279).
    activation_position, activation_channel: the token, from 1, and the channel, from 0, at which the mean
      of |h| over sequences is largest.
  """

  activation_max: jax.Array
  activation_median: jax.Array
  activations_beyond_100: jax.Array
  activations_beyond_1000: jax.Array
  kurtosis_moment: jax.Array
  kurtosis_channels: jax.Array
  activation_position: jax.Array
  activation_channel: jax.Array


def describe(hidden_BxTxD: Float[Array, 'B T D']) -> Activations:
  """Describes the hidden states of the first sequences of a batch; for `RecordOptions.describe_hidden`."""
  # The median sorts T * D numbers of each sequence: of all sequences it would be most of a probe.
  hidden_SxTxD = hidden_BxTxD[:SEQUENCES].astype(jnp.float32)
  size_SxTxD = jnp.abs(hidden_SxTxD)
  median_S = jnp.median(size_SxTxD.reshape(len(size_SxTxD), -1), axis=-1)
  beyond = [(size_SxTxD > times * median_S[:, None, None]).sum((1, 2)).mean() for times in BEYOND]
  centred_SxTxD = hidden_SxTxD - hidden_SxTxD.mean((1, 2), keepdims=True)
  # Divided before the fourth power, which would leave the range of float32 for large states.
  scaled_SxTxD = centred_SxTxD / jnp.sqrt((centred_SxTxD**2).mean((1, 2), keepdims=True))
  squares_SxD = (hidden_SxTxD**2).mean(1)
  squares_SxD /= squares_SxD.mean(-1, keepdims=True)
  mean_TxD = size_SxTxD.mean(0)
  position, channel = jnp.unravel_index(mean_TxD.argmax(), mean_TxD.shape)
  return Activations(size_SxTxD.max((1, 2)).mean(), median_S.mean(), beyond[0], beyond[1],
                     (scaled_SxTxD**4).mean((1, 2)).mean(), (squares_SxD**2).mean(-1).mean(),
                     position + 1, channel)


class Angles(NamedTuple):
  """Products of queries and keys by head (B, H), averaged over the queries t > 1.

  Fields that end in first are for key 1, those that end in others for the mean over 1 < j <= t.

  Attributes:
    cosine_*: cos(q_t, k_j).
    norm_product_*: |q_t| |k_j|, without the factor 1 / sqrt(Dh) of the scores, as in the paper.
    score_*: q_t . k_j / sqrt(Dh).
  """

  cosine_first: jax.Array
  cosine_others: jax.Array
  norm_product_first: jax.Array
  norm_product_others: jax.Array
  score_first: jax.Array
  score_others: jax.Array


def query_key_angles(q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array) -> Angles:
  """The angles of transformed queries and keys, T > 1; a function for `RecordOptions.angles`."""
  length, heads, head_dim = q_BxTxHxDh.shape[1:]
  q = q_BxTxHxDh.astype(jnp.float32)
  k = repeat_heads(k_BxTxHkvxDh, heads).astype(jnp.float32)
  size = lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True)
  unit = lambda x: x / jnp.maximum(size(x), jnp.finfo(jnp.float32).tiny)  # of zeros: 0 instead of NaN
  # The sum of q_t . k_j over j <= t is q_t times a running sum of keys: no T x T product.
  others_T = jnp.arange(1, length)[:, None, None]  # keys 2..t of the queries t = 2..T
  means = []
  for queries, keys in ((unit(q), unit(k)), (size(q), size(k)), (q / math.sqrt(head_dim), k)):
    for met in (keys[:, :1], jnp.cumsum(keys[:, 1:], 1) / others_T):
      means.append(jnp.sum(queries[:, 1:] * met, -1).mean(1))
  return Angles(*means)
