"""Attention on one token repeated, as Propositions 1 to 4 derive it (Appendix B.1).

Without position embeddings every position has the same queries and keys, so attention is 1/t
(NoPE), a softmax of the bias alone (relative, ALiBi), or for rotary positions at most
e^(2 xi) / (e^(2 xi) + t - 1). Under a window, t is the number of keys that a query sees.
"""

from __future__ import annotations

import numpy as np

from sink_jax.attention.feature_map import Identity
from sink_jax.attention.mask import Mask
from sink_jax.attention.position import Alibi, Nope, Position, Relative, Rope
from sink_jax.attention.similarity import Exp
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig

_PROPOSITIONS = {Nope: 1, Relative: 2, Alibi: 3, Rope: 4}


def proposition(config: ModelConfig) -> int:
  """Number of the proposition that speaks of this model, 1 to 4.

  Raises:
    ValueError: none does, with the reasons.
  """
  spec = config.attention
  number = next((n for kind, n in _PROPOSITIONS.items() if isinstance(spec.position, kind)), None)
  reasons = {
      f'{spec.position} gives every position its own embedding': number is None,
      f'{spec.similarity} with {spec.normalizer} is not softmax':
          not (isinstance(spec.similarity, Exp) and spec.rows_sum_to_one),
      f'{spec.feature_map} changes queries and keys': not isinstance(spec.feature_map, Identity),
      'a bias slot or a learned sink token takes its part of every row':
          bool(config.sink_tokens) or spec.kv_bias.has_extra_key,
      'blocks with a Mamba mixer remember how many tokens came before':
          len(config.attention_layers) < config.layers}
  if reason := '; '.join(text for text, true in reasons.items() if true):
    raise ValueError(f'Propositions 1 to 4 do not apply to this model: {reason}. Use a softmax '
                     'model with NoPE, a relative bias, ALiBi or rotary positions.')
  return number


def closed_form(spec: AttentionSpec, heads: int, length: int) -> np.ndarray:
  """Weights (H, T, T), float64, of equal scores under the spec's mask: softmax of its bias.

  1/t without a bias (Eq. 18); Eq. 20 and Eq. 22 with one. Rotary positions have none: their
  scores are not equal.
  """
  keep, distance = _seen(spec.mask, length)
  g_HxTxT = np.zeros((heads, length, length))
  if spec.position.has_bias:
    slopes_H = np.asarray(spec.position.slopes(heads), np.float64)
    g_HxTxT = slopes_H[:, None, None] * np.asarray(
        spec.position.distance_bias(distance), np.float64)
  largest = np.where(keep, g_HxTxT, -np.inf).max(-1, keepdims=True)
  weights = np.where(keep, np.exp(np.where(keep, g_HxTxT - largest, 0)), 0)
  return weights / np.maximum(weights.sum(-1, keepdims=True), 1)  # a query without keys: zeros


def rotary_bound(xi, mask: Mask, length: int) -> np.ndarray:
  """Eq. 28 for xi (H,): (H, T, T), float64, zero where the mask hides the key.

  xi = |q||k| / sqrt(Dh): the scale of the scores, which the paper leaves out, is part of it.
  """
  keep, _ = _seen(mask, length)
  others = keep.sum(-1, keepdims=True) - 1
  xi = np.asarray(xi, np.float64)[:, None, None]
  return np.where(keep, 1 / (1 + others * np.exp(-2 * xi)), 0)


def bias_of_distances(position: Position, length: int) -> np.ndarray:
  """g of the distances 0..T-1 (T,), before the slope of a head; zeros where there is none.

  Proposition 2 takes it to be non-increasing; the bucket numbers of Eq. 6 increase.
  """
  if not position.has_bias:
    return np.zeros(length)
  return np.asarray(position.distance_bias(np.arange(length)), np.float64)


def _seen(mask, length):
  """Which keys each query sees (T, T), and how far they are."""
  i, j = np.arange(length)[:, None], np.arange(length)[None, :]
  return np.asarray(mask.keep(i, j)), i - j
