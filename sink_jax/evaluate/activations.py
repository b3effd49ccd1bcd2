"""Massive activations: single entries of the hidden states that are far larger than the rest.

A model with an attention sink often carries a few such entries, in fixed channels of its first
token's hidden states (Section 3.1, Figures 2 and 7; Sun et al., arXiv 2402.17762, who call an
entry massive beyond 100 and about 1,000 medians). Every formula has an id, which is the name of
its field; numbers under an id stay comparable, so another formula gets another id.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

SEQUENCES = 10  # of a probe that are described, as many as Sun et al. average over
BEYOND = (100, 1000)  # medians, beyond which entries are counted


class Activations(NamedTuple):
  """Statistics of the hidden states h (T, D) of sequences, averaged over the sequences.

  Attributes:
    activation_max: the largest |h|.
    activation_median: the median of |h| over all tokens and channels.
    activations_beyond_100: the number of |h| above 100 times the median of their sequence.
    activations_beyond_1000: the number of |h| above 1,000 times that median.
    kurtosis_moment: E[(h - E h)^4] / Var(h)^2 over tokens and channels, which is 3 for normally
      distributed numbers (Bondarenko et al. 2306.12929, Kaul et al. 2410.17174).
    kurtosis_channels: mean_d(s_d^4) / mean_d(s_d^2)^2 of the root mean squares s_d of the channels,
      from 1, if all are equal, to D, if all but one are zero (He et al. 2405.19279).
    activation_position: the token, from 1, at which the mean of |h| over sequences is largest.
    activation_channel: the channel, from 0, of that mean.
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
  """Describes the hidden states (B, T, D) of the first sequences of a batch by scalars.

  It is called inside of a model (`RecordOptions.describe_hidden`), so that no hidden states leave
  the device. `kurtosis_moment` of states that are all equal is not finite.
  """
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
