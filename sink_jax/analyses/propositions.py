"""What Propositions 1 to 4 derive of attention on one token repeated (Appendix B.1).

Without position embeddings every position has the same queries and keys, so attention is 1/t
(NoPE), a softmax of the bias alone (relative, ALiBi), or for rotary positions at most
e^(2 xi) / (e^(2 xi) + t - 1). Under a window, t is the number of keys that a query attends to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sink_jax.attention.mask import Mask
from sink_jax.attention.per_token import Fixed, Identity
from sink_jax.attention.position import Alibi, Nope, Position, Relative, Rope
from sink_jax.attention.similarity import Exp
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig

_PROPOSITIONS = {Nope: 1, Relative: 2, Alibi: 3, Rope: 4}


def proposition_number(config: ModelConfig) -> int:
  """Returns the number of the proposition that applies to this model, 1 to 4.

  Raises:
    ValueError: none applies; gives the reasons.
  """
  spec = config.attention
  # By isinstance, so that rotations with scaled frequencies (Llama3Rope, YarnRope) count as rotary:
  # the bound needs nothing but the norms of queries and keys.
  number = next((n for kind, n in _PROPOSITIONS.items() if isinstance(spec.position, kind)), None)
  # Appendix B.1 goes from block to block: equal hidden states give equal values, and a mean of
  # equal values is the same at every position. Each of these breaks that step or the form of the
  # scores.
  reasons = {
      f'{spec.position} gives every position its own embedding': number is None,
      f'{spec.similarity} with {spec.normalizer} is not softmax':
          not (isinstance(spec.similarity, Exp) and spec.rows_sum_to_one),
      f'{spec.feature_map} changes queries and keys': not isinstance(spec.feature_map, Identity),
      'an extra key or a learned sink token takes its part of every row':
          bool(config.sink_tokens) or spec.kv_bias.has_extra_key,
      f'{spec.temperature} multiplies the queries whose norms the bound of rotary positions has':
          isinstance(spec.position, Rope) and not isinstance(spec.temperature, Fixed),
      'blocks have encodings of positions of their own':
          any(layer.position is not None for layer in config.pattern),
      'blocks with a Mamba mixer remember how many tokens came before':
          len(config.attention_layers) < config.layers}
  reason = '; '.join(text for text, applies in reasons.items() if applies)
  if number is None or reason:
    raise ValueError(f'Propositions 1 to 4 do not apply to this model: {reason}. Use a softmax '
                     'model with NoPE, a relative bias, ALiBi or rotary positions.')
  return number


def closed_form(spec: AttentionSpec, heads: int, length: int) -> np.ndarray:
  """Computes the weights (H, T, T), float64, of equal scores: the softmax of the bias alone.

  They are 1/t without a bias (Eq. 18), and Eq. 20 and Eq. 22 with one. Rotary positions have no
  closed form, since their scores are not equal; see `rotary_bound`.

  Args:
    spec: its mask and its positions count.
    heads: H.
    length: T.
  """
  keep, distance = _kept_and_distance(spec.mask, length)
  g_HxTxT = np.zeros((heads, length, length))
  if spec.position.has_bias:
    slopes_H = np.asarray(spec.position.slopes(heads), np.float64)
    g_HxTxT = slopes_H[:, None, None] * np.asarray(
        spec.position.distance_bias(distance), np.float64)
  # The softmax, with its largest score subtracted; a query without keys has a row of zeros.
  largest = np.where(keep, g_HxTxT, -np.inf).max(-1, keepdims=True)
  # The inner `where` keeps the scores of masked keys, which may be above the largest of the others,
  # out of the exponential.
  weights = np.where(keep, np.exp(np.where(keep, g_HxTxT - largest, 0)), 0)
  # The largest score adds exp(0) = 1, so only the sum of a query without keys is below one.
  return weights / np.maximum(weights.sum(-1, keepdims=True), 1)


def rotary_bound(xi: ArrayLike, mask: Mask, length: int) -> np.ndarray:
  """Computes the bound of Eq. 28 on the weights (H, T, T), float64, zero where the mask is.

  Args:
    xi: |q||k| / sqrt(Dh) of the heads (H,). The paper leaves the scale 1/sqrt(Dh) out.
    mask: which keys a query attends to.
    length: T.
  """
  keep, _ = _kept_and_distance(mask, length)
  # The t - 1 of Eq. 28: keys that the query sees beside the one that the weight is of.
  others = keep.sum(-1, keepdims=True) - 1
  # All scores lie in [-xi, xi], so a weight is largest where its score is xi and the others are
  # -xi. The fraction of Eq. 28 is divided by e^(2 xi), which could overflow.
  xi = np.asarray(xi, np.float64)[:, None, None]
  return np.where(keep, 1 / (1 + others * np.exp(-2 * xi)), 0)


def bias_of_distances(position: Position, length: int) -> np.ndarray:
  """Returns the bias (T,) of the distances 0..T-1, before the slope of a head; zeros without one.

  Proposition 2 assumes that it does not increase; the bucket numbers of Eq. 6 do.
  """
  if not position.has_bias:
    return np.zeros(length)
  return np.asarray(position.distance_bias(np.arange(length)), np.float64)


def _kept_and_distance(mask: Mask, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Which keys each query attends to (T, T), and how far they are before it (T, T)."""
  i, j = np.arange(length)[:, None], np.arange(length)[None, :]
  return np.asarray(mask.keep(i, j)), i - j
