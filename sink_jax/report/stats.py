"""Intervals of means over seeds and of their differences, and limits of seeds that agree.

A rate counts heads, so seeds with the same heads have a variance of 0, even if other seeds would
differ. If a share p of all seeds differs, n seeds miss it with probability (1 - p)^n: n seeds that
agree leave p = 1 - 0.05^(1/n) open at 95 %, about 3 / n for large n (the rule of three). A verdict
on a level states p, and must hold even if those seeds have one head more or less. "No difference"
must hold even if they lie at the end of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from sink_jax.evaluate.intervals import LEVEL, t_interval

ONE_SIDED = 0.95  # of each of the two tests of an equality, and of the share of seeds left open


class Interval(NamedTuple):
  """A mean of n seeds, or of n differences by seed, and its interval.

  p: two-sided p value of a mean of 0. unseen: the share of seeds that may differ, if those that
  were run agree within one head; 0 if they do not, or if the quantity is not a rate.
  """

  mean: float
  low: float
  high: float
  n: int
  p: float = math.nan
  unseen: float = 0.0

  def widened(self) -> Interval:
    """The interval of a difference of rates, extended to its means with unseen seeds at +-100."""
    low = self.mean + self.unseen * (-100 - self.mean)
    high = self.mean + self.unseen * (100 - self.mean)
    return self._replace(low=min(self.low, low), high=max(self.high, high))

  def moved(self, points: float) -> Interval:
    """The interval with both ends moved outwards: if all unseen seeds lie so many points away."""
    distance = self.unseen * points
    return self._replace(low=self.low - distance, high=self.high + distance)


def unseen(n: int) -> float:
  """The largest share of seeds that n seeds miss with a chance of 5 %: 63 % for 3, 45 % for 5."""
  return 1 - (1 - ONE_SIDED) ** (1 / n) if n else 1.0


def interval(values: Sequence[float], level: float = LEVEL, head: float = 0.0) -> Interval:
  """Student's t interval of the mean; infinite for one value.

  head: the points of one head, of a rate or of a difference between rates; 0 for other quantities.
  Values within one head of each other agree.
  """
  x = np.asarray(values, float)
  n = len(x)
  mean = float(x.mean()) if n else math.nan
  if n < 2:
    return Interval(mean, -math.inf, math.inf, n)
  share = unseen(n) if np.ptp(x) < head else 0.0
  low, high = map(float, t_interval(x, level))
  error = float(stats.sem(x))
  p = 2 * float(stats.t.sf(abs(mean) / error, n - 1)) if error else float(mean == 0)
  return Interval(mean, low, high, n, p, share)


def compare(a: Mapping[int, float], b: Mapping[int, float], head: float = 0.0) -> Interval:
  """The interval of a - b, both {seed: value}, by seed; infinite if they share fewer than two.

  Runs of one seed share initial weights and batches; a seed that only one side has is left out.
  """
  shared = a.keys() & b.keys()
  if len(shared) > 1:
    return interval([a[seed] - b[seed] for seed in shared], head=head)
  mean_a, mean_b = (np.mean([*values.values()]) for values in (a, b))
  n = min(len(a), len(b))
  return Interval(float(mean_a - mean_b), -math.inf, math.inf, n)


def equal(differences: Sequence[float], margin: float, head: float = 0.0) -> bool:
  """True if the mean of differences is within +-margin: two one-sided tests (Schuirmann 1987).

  Differences of rates (head: points of one head) that agree are widened to +-100.
  """
  both = interval(differences, 2 * ONE_SIDED - 1, head).widened()
  return -margin < both.low and both.high < margin


def holm(p_values: Sequence[float]) -> list[float]:
  """p values adjusted for their number (Holm 1979); NaN stays NaN and is not counted."""
  p = np.asarray(p_values, float)
  known = np.count_nonzero(~np.isnan(p))
  order = np.argsort(p)[:known]  # NaN comes last
  products = p[order] * np.arange(known, 0, -1)
  adjusted = np.full(len(p), math.nan)
  adjusted[order] = np.minimum(np.maximum.accumulate(products), 1)
  return adjusted.tolist()
