"""Student's t intervals of means over sequences, or over seeds."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.99  # of a two-sided interval


def t_interval(
  values_SxM: Float[np.ndarray, 'S ...'],
  level: float = LEVEL,
  *,
  least: float = -math.inf,
  most: float = math.inf,
) -> tuple[np.ndarray, np.ndarray]:
  """Bounds (low, high) of the mean over the first axis.

  They cover the mean of normally distributed values in a share `level` of experiments, and that of
  skewed ones in fewer (docs/card.md has the rates). Equal values give an interval of width 0.

  Args:
    values_SxM: one value or array for each sequence.
    least, most: between which every value lies, in its unit: 0 and 1 for a share.

  Raises:
    ValueError: there is only one sequence.
  """
  count = len(values_SxM)
  if count < 2:
    raise ValueError(
      'an interval needs at least 2 sequences: ask for more, or give more in the arrays.'
    )
  values_SxM = np.asarray(values_SxM, np.float64)
  mean, deviation = values_SxM.mean(0), values_SxM.std(0, ddof=1)
  half = stats.t.isf((1 - level) / 2, count - 1) * deviation / math.sqrt(count)
  return np.clip(mean - half, least, most), np.clip(mean + half, least, most)
