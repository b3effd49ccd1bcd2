"""Nulls: what a measure of the first token would be if that token were nothing special.

A number of a model means something only beyond its null. There are three: an untrained model (the
first probe of a run), attention that is uniform, in which the first of T tokens has an importance
of H_T / T, 0.074 of 64, and, here, target positions drawn at random, one for every sequence, in
place of the first (Xu, arXiv 2606.02378). The 99th percentile over the draws is stable, while their
maximum grows with their number.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from sink_jax.evaluate.threshold import EPSILON

DRAWS = 500
_PERCENTILE = 99


def random_targets(sequences: int, length: int) -> np.ndarray:
  """Indices (DRAWS, S) of a target in each sequence, the same in every call.

  They are tokens of the first half without the first token: few rows see a later one, so that its
  importance is noise.
  """
  return np.random.default_rng(0).integers(1, max(2, length // 2), (DRAWS, sequences))


def sink_rate_null(importance_SxNxHxT: Float[np.ndarray, 'S N H T'], epsilon: float = EPSILON
                   ) -> float:
  """The 99th percentile, over random targets, of the share of heads above epsilon."""
  sequences, *_, length = importance_SxNxHxT.shape
  rates_SxT = (importance_SxNxHxT > epsilon).mean((1, 2))
  rates_RxS = rates_SxT[np.arange(sequences), random_targets(sequences, length)]
  return float(np.percentile(rates_RxS.mean(1), _PERCENTILE))


def hidden_ratio_null(norms_SxMxT: Float[np.ndarray, 'S M T']) -> float:
  """The 99th percentile, over random targets, of the largest ratio of norms of any block.

  A ratio is that of `SinkReport.norm_ratio`: the mean norm of the targets over that of all other
  tokens of the sequences. M counts blocks. It is not finite where all others are zero.
  """
  sequences, _, length = norms_SxMxT.shape
  norms_SxMxT = np.asarray(norms_SxMxT, np.float64)
  at_RxM = np.stack([norms_SxMxT[np.arange(sequences), :, target_S].mean(0)
                     for target_S in random_targets(sequences, length)])
  others_RxM = (norms_SxMxT.mean((0, 2)) * length - at_RxM) / (length - 1)
  with np.errstate(divide='ignore', invalid='ignore'):
    return float(np.percentile((at_RxM / others_RxM).max(1), _PERCENTILE))
