"""What seeds of a budget spread by, and whether a mean over seeds lies on one side of a level.

The interval of a mean is mean +- t sqrt(s2 / n). With three seeds the variance of a trial's own
seeds is next to unknown, so that s2 joins it with the variance within the other trials of the
budget, as moderated t statistics do (Smyth 2004, doi:10.2202/1544-6115.1027):

  s2 = (nu0 s0^2 + (n - 1) s^2) / (nu0 + n - 1), with t of nu0 + n - 1 degrees of freedom.

No bootstrap over seeds: that of three numbers covers the mean in 75 % of cases instead of 95 %.
`tests/paper/calibration.py` simulates how often a verdict is false, and is where the constants come
from. That one seed in ten collapses shows in the pool where it matters: at levels of 5 and 10 % of
heads and in differences. It does not where a level is so high that the mean reaches it only if all
other seeds are at 100 %: at 90 % a fifth of such claims are held for true.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence

from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, MetricSummary, metric_summary

# Two-sided, of one interval. A claim is looked at twice, with three seeds and with five, and trials
# spread unequally: with 95 % up to 10.5 % of the claims on their level had a verdict, with 99 %
# 4.4 %.
CONFIDENCE = 0.99
# Claims exactly on their level that get a verdict, at most, by simulation.
FALSE_VERDICTS = 0.05
# Fewer seeds are no verdict: one in ten may collapse, and two seeds show that in one case of five.
MIN_SEEDS = 3
# Trials spread unequally: more degrees of freedom of the pool would drown the trial's own seeds.
MOST_FREEDOM = 8
_MOST_SEEDS = 100  # beyond which no number of seeds is named
# Bounds that a number cannot cross: where every seed sits at one, it hides how far they spread.
_BOUNDS = {'percent': (0.0, 100.0), 'points': (0.0, 100.0), 'steps': (math.inf,)}


@dataclasses.dataclass(frozen=True)
class Pooled:
  """A variance within trials, on the scale of a metric, and its degrees of freedom."""

  variance: float = 0.0
  freedom: int = 0


@dataclasses.dataclass(frozen=True)
class Interval:
  """The mean of n seeds on the scale of a metric; low, high: None where no spread is known."""

  mean: float
  low: float | None
  high: float | None
  n: int

  def above(self, level: float) -> bool:
    """Does all of it lie above the level? Not where its ends are unknown."""
    return self.low is not None and self.low > level

  def below(self, level: float) -> bool:
    """Does all of it lie below the level?"""
    return self.high is not None and self.high < level


@dataclasses.dataclass(frozen=True)
class Spread:
  """Variances within the trials of a budget, by metric."""

  pooled: Mapping[str, Pooled]

  def interval(self, metric: str, values: Sequence[float], difference: bool, parts: int = 1
               ) -> Interval:
    """The interval that holds the mean over all seeds that could be drawn.

    Args:
      metric: whose pooled variance counts.
      values: one per seed, on the scale of the metric.
      difference: whether they are differences between two trials, seed by seed. Their pooled
        variance is twice that of a trial: seeds share initial weights and batches, which makes the
        runs of one seed alike if anything, and then twice is too much. Differences from the default
        would share its three seeds, and so be no independent numbers to pool.
      parts: among how many parts of a claim the chance of a false verdict is divided.
    """
    n, mean = len(values), statistics.fmean(values)
    variance, freedom = self._variance(metric, values, difference)
    known = self.pooled.get(metric, Pooled()).freedom >= MOST_FREEDOM
    # Three seeds that do not differ at all say nothing of how much others would; many trials do.
    if not freedom or not (variance or known):
      return Interval(mean, None, None, n)
    half = t_quantile(freedom, (1 - CONFIDENCE) / parts) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)

  def seeds_needed(self, metric: str, values: Sequence[float], level: float, difference: bool,
                   parts: int) -> int | None:
    """How many seeds of this mean and spread would decide; None if unknown or more than 100."""
    n = len(values)
    variance, freedom = self._variance(metric, values, difference)
    gap = abs(statistics.fmean(values) - level)
    for more in range(max(n, MIN_SEEDS), _MOST_SEEDS + 1) if variance else ():
      t = t_quantile(freedom + more - n, (1 - CONFIDENCE) / parts)
      if t * math.sqrt(variance / more) < gap:
        return more
    return None

  def _variance(self, metric: str, values: Sequence[float], difference: bool
                ) -> tuple[float, int]:
    pooled, own = self.pooled.get(metric, Pooled()), len(values) - 1
    freedom = pooled.freedom + own
    if not freedom:
      return 0.0, 0
    squares = own * statistics.variance(values) if own else 0.0
    prior = pooled.freedom * pooled.variance * (2 if difference else 1)
    return (prior + squares) / freedom, freedom


def spread_of(group: Group) -> Spread:
  """The spreads of a group of runs: over its trials with two seeds or more that are done.

  Trials all of whose seeds sit at a bound are left out: 0 %, 100 %, or no step of emergence. Where
  all trials do, as Sink_1 before training, seeds do not spread.
  """
  pooled = {}
  for name in METRICS:
    known = [summary for trial in group.trials
             if (summary := metric_summary(name, group.done(trial)))]
    several = [summary for summary in known if len(summary.by_seed) > 1]
    within = [summary for summary in several if not _at_bound(summary)]
    spread = [list(summary.by_seed.values()) for summary in within or several]
    freedom = sum(len(values) - 1 for values in spread)
    if freedom:
      squares = sum((len(values) - 1) * statistics.variance(values) for values in spread)
      pooled[name] = Pooled(squares / freedom, min(freedom, MOST_FREEDOM))
  return Spread(pooled)


def _at_bound(summary: MetricSummary) -> bool:
  bounds = _BOUNDS.get(summary.metric.unit, ())
  return len(set(summary.values)) == 1 and summary.values[0] in bounds


@functools.cache
def t_quantile(freedom: int, outside: float) -> float:
  """The t that |T| exceeds with the chance `outside`, T of Student's distribution.

  Bisection of the closed form for a whole number of degrees of freedom (Abramowitz and Stegun,
  26.7.3 and 26.7.4), since SciPy is no dependency.
  """
  low, high = 0.0, 1.0
  while _within(high, freedom) < 1 - outside:
    high *= 2
  for _ in range(80):
    middle = (low + high) / 2
    low, high = (middle, high) if _within(middle, freedom) < 1 - outside else (low, middle)
  return high


def _within(t: float, freedom: int) -> float:
  """The chance that |T| is less than t."""
  angle = math.atan(t / math.sqrt(freedom))
  cosine = math.cos(angle)
  odd = freedom % 2
  term = total = cosine if odd else 1.0
  if freedom == 1:
    return 2 * angle / math.pi
  for k in range(2 + odd, freedom - 1, 2):
    term *= cosine ** 2 * (k - 1) / k
    total += term
  return (2 / math.pi) * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
