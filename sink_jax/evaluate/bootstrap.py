"""Intervals of means over sequences, by a bootstrap."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

DRAWS = 2000
LEVEL = 0.99


def bootstrap(values_SxM: Float[np.ndarray, 'S ...']) -> tuple[np.ndarray, np.ndarray]:
  """Bounds (low, high) of the mean over the first axis: percentiles over resampled sequences.

  Every call draws the same sequences, so that a difference of two measures is paired. One sequence
  gives an interval of width 0, which says nothing about other sequences.
  """
  count = len(values_SxM)
  weights_RxS = (
    np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS) / count
  )
  means = np.tensordot(weights_RxS, np.asarray(values_SxM, np.float64), 1)
  tail = 100 * (1 - LEVEL) / 2
  return np.percentile(means, tail, axis=0), np.percentile(means, 100 - tail, axis=0)
