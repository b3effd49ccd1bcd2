"""Statistics of activations, computed while a model records them, and the error for an overflow.

Massive activations lie in fixed channels of the first token's hidden states (Section 3.1, Figures 2
and 7; Sun et al., arXiv 2402.17762: above 100, and about 1,000 times the median). The key of that
token has another angle to the queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sink_jax.models.arrays import first_not_finite
from sink_jax.models.record import Seen
from sink_jax.models.run import Run

SEQUENCES = 10  # that are described of a probe; Sun et al. average over as many
BEYOND = (100, 1000)  # entries above so many medians are counted


class Activations(NamedTuple):
  """Statistics of the hidden states h (T, D) of sequences, averaged over the sequences."""

  activation_max: jax.Array  # the largest |h|
  activation_median: jax.Array  # of |h| over all tokens and channels
  # The number of |h| above 100 times the median of their sequence, and above 1,000 times.
  activations_beyond_100: jax.Array
  activations_beyond_1000: jax.Array
  # E[(h - E h)^4] / Var(h)^2 over tokens and channels, which is 3 for normally distributed numbers
  # (Bondarenko et al. 2306.12929, Kaul et al. 2410.17174).
  kurtosis_moment: jax.Array
  # mean_d(s_d^4) / mean_d(s_d^2)^2 of the root mean squares s_d of the channels: from 1, if all are
  # equal, to D, if all but one are zero (He et al. 2405.19279).
  kurtosis_channels: jax.Array
  activation_position: jax.Array  # the token, from 1, and the channel, from 0, at which the
  activation_channel: jax.Array  # mean of |h| over sequences is largest


def describe(hidden_BxTxD: Float[Array, 'B T D']) -> Activations:
  """Describes the hidden states of the first sequences of a batch; for `RecordOptions.hidden`."""
  hidden_SxTxD = hidden_BxTxD[:SEQUENCES].astype(jnp.float32)
  size_SxTxD = jnp.abs(hidden_SxTxD)
  median_S = medians(size_SxTxD.reshape(len(size_SxTxD), -1))
  beyond = [(size_SxTxD > times * median_S[:, None, None]).sum((1, 2)).mean() for times in BEYOND]
  centred_SxTxD = hidden_SxTxD - hidden_SxTxD.mean((1, 2), keepdims=True)
  # Divided before the fourth power, which would leave the range of float32 for large states.
  scaled_SxTxD = centred_SxTxD / jnp.sqrt((centred_SxTxD**2).mean((1, 2), keepdims=True))
  squares_SxD = (hidden_SxTxD**2).mean(1)
  squares_SxD /= squares_SxD.mean(-1, keepdims=True)
  mean_TxD = size_SxTxD.mean(0)
  position, channel = jnp.unravel_index(mean_TxD.argmax(), mean_TxD.shape)
  return Activations(
    size_SxTxD.max((1, 2)).mean(),
    median_S.mean(),
    beyond[0],
    beyond[1],
    (scaled_SxTxD**4).mean((1, 2)).mean(),
    (squares_SxD**2).mean(-1).mean(),
    position + 1,
    channel,
  )


def medians(x_SxN: jax.Array) -> jax.Array:
  """The exact medians (S,) of numbers from 0 on; on a CPU 30 times as fast as by sorting."""
  # The bits of such floats, read as integers, have the order of the floats.
  bits_SxN, rank = jax.lax.bitcast_convert_type(x_SxN, jnp.int32), (x_SxN.shape[1] - 1) // 2

  def next_bit(i: jax.Array, low_S: jax.Array) -> jax.Array:
    higher_S = low_S | (1 << (30 - i))
    return jnp.where((bits_SxN < higher_S[:, None]).sum(1) <= rank, higher_S, low_S)

  low_S = jax.lax.fori_loop(0, 31, next_bit, jnp.zeros(len(x_SxN), jnp.int32))
  up_to_low = bits_SxN <= low_S[:, None]
  next_S = jnp.where(up_to_low, jnp.iinfo(jnp.int32).max, bits_SxN).min(1)
  high_S = jnp.where(up_to_low.sum(1) > x_SxN.shape[1] // 2, low_S, next_S)
  return jax.lax.bitcast_convert_type(jnp.stack([low_S, high_S]), jnp.float32).mean(0)


def key_cosines(seen: Seen) -> jax.Array:
  """The cosine (B, H, T) of each key with the mean query t > 1; for `RecordOptions.attention`."""
  q_BxTxHxDh, k_BxTxHkvxDh = (x.astype(jnp.float32) for x in seen.of_tokens())
  q_BxHxDh = q_BxTxHxDh[:, 1:].mean(1)
  k_BxTxHxDh = jnp.repeat(k_BxTxHkvxDh, q_BxHxDh.shape[1] // k_BxTxHkvxDh.shape[2], 2)
  norms_BxTxH = jnp.linalg.norm(q_BxHxDh, axis=-1)[:, None] * jnp.linalg.norm(k_BxTxHxDh, axis=-1)
  products_BxTxH = jnp.einsum('bhd,bthd->bth', q_BxHxDh, k_BxTxHxDh)
  cosines_BxTxH = products_BxTxH / jnp.maximum(norms_BxTxH, jnp.finfo(jnp.float32).tiny)
  return jnp.swapaxes(cosines_BxTxH, 1, 2)


def query_key_angles(seen: Seen) -> dict[str, jax.Array]:
  """Products of queries and keys by head (B, H), means over the queries t > 1.

  A function for `RecordOptions.attention`. 'cosine_*' is cos(q_t, k_j), 'norm_product_*' is
  |q_t| |k_j|, as in the paper without the factor of 'score_*', q_t . k_j / sqrt(Dh); '*_first' is
  for key 1, and '*_others' the mean over the keys 1 < j <= t.
  """
  q_BxTxHxDh, k_BxTxHkvxDh = seen.of_tokens()
  length, heads, head_dim = q_BxTxHxDh.shape[1:]
  q = q_BxTxHxDh.astype(jnp.float32)
  k = jnp.repeat(k_BxTxHkvxDh, heads // k_BxTxHkvxDh.shape[2], 2).astype(jnp.float32)
  size = lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True)
  tiny = jnp.finfo(jnp.float32).tiny  # of zeros: 0 instead of NaN
  unit = lambda x: x / jnp.maximum(size(x), tiny)
  # The sum of q_t . k_j over j <= t is q_t times a running sum of keys: no T x T product.
  others_T = jnp.arange(1, length)[:, None, None]  # keys 2..t of the queries t = 2..T
  means = {}
  for name, queries, keys in (
    ('cosine', unit(q), unit(k)),
    ('norm_product', size(q), size(k)),
    ('score', q / math.sqrt(head_dim), k),
  ):
    for which, met in (('first', keys[:, :1]), ('others', jnp.cumsum(keys[:, 1:], 1) / others_T)):
      means[f'{name}_{which}'] = jnp.sum(queries[:, 1:] * met, -1).mean(1)
  return means


class NotFinite(ValueError):
  """A result of a model is not finite; see `not_finite`."""


def not_finite(run: Run, what: str, dtype: str) -> NotFinite:
  """The error for a result, such as 'importance in block 3', of activations of a dtype."""
  if parameter := first_not_finite(run.params):
    reason = f'nor is its parameter {parameter}, so the model cannot be used'
  else:
    remedy = ': use dtype float32 (--dtype=float32, in a config probe.dtype)' * (
      dtype == 'bfloat16'
    )
    reason = f'its parameters are, so activations overflow in {dtype} on these inputs{remedy}'
  return NotFinite(f'{run.name or "the model"}: {what} is not finite; {reason}.')
