"""What seeds of a budget spread by, and whether a mean over seeds lies on one side of a level.

The interval of a mean is mean +- t sqrt(s2 / n). With three seeds the variance of a trial's own
seeds is next to unknown, so that s2 joins it with the variance within the other trials of the
budget, as moderated t statistics do (Smyth 2004, doi:10.2202/1544-6115.1027):

  s2 = (nu0 s0^2 + (n - 1) s^2) / (nu0 + n - 1), with t of nu0 + n - 1 degrees of freedom.

The prior variance s0^2 is the median of those within the other trials, so that a trial that did not
settle does not widen the intervals of all others; the trials that are judged are not in it. Where
their seeds spread more than the pool does (s > s0), they are none of its kind, and the interval is
at least that of their seeds alone.

A rate that is compared with a level is taken as the arcsine of its square root, on which seeds near
0 and 100 % spread as others do; differences between rates stay in points. A rate counts heads, so
that three seeds may agree to a hair where a fourth has one head more. What is pooled of rates has
therefore one degree of freedom more, and of few trials what they lack of eight, of the variance of
one head that is a sink in half of the seeds: 1/(4 H) on the scale of arcsines, for H heads, which
is that of H heads that are sinks by chance as well, and (100/H)^2/4 in points.

No bootstrap over seeds: that of three numbers covers the mean in 75 % of cases instead of 95 %.
`tests/paper/calibration.py` simulates how often a verdict is false, and is where the constants come
from. It also has what no rule can see in five seeds, if it is to decide where all seeds are at 0.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from scipy.special import stdtr, stdtrit

from sink_jax.models.sizes import SIZES
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.report.records import RunRecord

# Two-sided, of one interval. A claim is looked at twice, with three seeds and with five.
CONFIDENCE = 0.99
# Of the interval that has to lie within a margin: two one-sided tests at 5 % each.
EQUIVALENT = 0.90
# Claims exactly on their level that get a verdict, at most, by simulation.
FALSE_VERDICTS = 0.05
# Fewer seeds are no verdict: one in ten may collapse, and two seeds show that in one case of five.
MIN_SEEDS = 3
# Trials spread unequally: more degrees of freedom of the pool would drown the trial's own seeds.
MOST_FREEDOM = 8
LEAST_OF_A_HEAD = 1  # degrees of freedom of the variance of one head, beside any number of trials
_MOST_SEEDS = 100  # beyond which no number of seeds is named
NO_SPREAD = 'seeds do not differ, and too few trials say how much they could'


@dataclasses.dataclass(frozen=True)
class Within:
  """The spread within a trial or several: a sum of squares, and its degrees of freedom."""

  squares: float = 0.0
  freedom: int = 0

  @classmethod
  def of(cls, values: Sequence[float]) -> Within:
    """Of the seeds of one trial."""
    freedom = len(values) - 1
    return cls(freedom * statistics.variance(values) if freedom else 0.0, freedom)

  @property
  def variance(self) -> float:
    """0 without a degree of freedom."""
    return self.squares / self.freedom if self.freedom else 0.0


@dataclasses.dataclass(frozen=True)
class Interval:
  """The mean of seeds on the scale of a metric; low, high: None where no spread is known."""

  mean: float
  low: float | None
  high: float | None

  def above(self, level: float) -> bool:
    """Whether all of it lies above the level; False where its ends are unknown."""
    return self.low is not None and self.low > level

  def below(self, level: float) -> bool:
    """Whether all of it lies below the level; False where its ends are unknown."""
    return self.high is not None and self.high < level


@dataclasses.dataclass(frozen=True)
class Spread:
  """Spreads within the trials of a budget, by metric and trial.

  levels: on the scale on which means are compared with a level. differences: on that of differences
  between trials. heads: of the models of each trial.
  """

  levels: Mapping[str, Mapping[str, Within]]
  differences: Mapping[str, Mapping[str, Within]]
  heads: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def interval(self, metric: str, trials: Sequence[str], values: Sequence[float], parts: int = 1,
               confidence: float = CONFIDENCE) -> Interval:
    """The interval that holds the mean over all seeds that could be drawn.

    Args:
      metric: whose spread in other trials counts.
      trials: one, or the two whose differences the values are, seed by seed. Their pooled variance
        is twice that of a trial: seeds share initial weights and batches, which makes the runs of
        one seed alike if anything, and then twice is too much. Differences from the default would
        share its three seeds, and so be no independent numbers to pool.
      values: one per seed, on the scale of the metric.
      parts: among how many parts of a claim the chance of a false verdict is divided.
    """
    mean, (to, back) = statistics.fmean(values), _scale(metric, trials)
    half = half_width(self.pool(metric, trials), Within.of([*map(to, values)]), parts, confidence)
    if half == math.inf:
      return Interval(mean, None, None)
    # Around the mean of the rates, which is what is asked about and shown, and not of arcsines.
    return Interval(mean, back(to(mean) - half), back(to(mean) + half))

  def negligible(self, metric: str, trials: Sequence[str], values: Sequence[float], margin: float
                 ) -> bool:
    """Whether the whole interval of a mean difference lies within the margin around zero."""
    interval = self.interval(metric, trials, values, confidence=EQUIVALENT)
    return interval.above(-margin) and interval.below(margin)

  def chance(self, metric: str, trials: Sequence[str], values: Sequence[float], level: float
             ) -> float:
    """The two-sided chance of a mean that far from the level, if the level were the truth.

    The interval of `interval` excludes the level where this is below 1 - confidence. 1 where no
    interval is known. The arguments are those of `interval`.
    """
    to, _ = _scale(metric, trials)
    gap = abs(to(statistics.fmean(values)) - to(level))
    spreads = _spreads(self.pool(metric, trials), Within.of([*map(to, values)]))
    return max((float(2 * stdtr(freedom, -gap / error)) if error else float(not gap)
                for freedom, error in spreads), default=1.0)

  def seeds_needed(self, metric: str, trials: Sequence[str], values: Sequence[float], level: float,
                   parts: int) -> int | None:
    """How many seeds of this mean and spread would decide; None if unknown or more than 100."""
    (to, _), pool = _scale(metric, trials), self.pool(metric, trials)
    own = Within.of([*map(to, values)])
    gap = abs(to(statistics.fmean(values)) - to(level))
    return next((n for n in range(max(len(values), MIN_SEEDS), _MOST_SEEDS + 1)
                 if half_width(pool, Within(own.variance * (n - 1), n - 1), parts) < gap), None)

  def pool(self, metric: str, trials: Sequence[str]) -> Within:
    """The spread within the other trials, and of one head where the metric is a rate."""
    difference = len(trials) > 1
    known = (self.differences if difference else self.levels).get(metric, {})
    others = [within for trial, within in known.items() if trial not in trials]
    freedom = min(sum(within.freedom for within in others), MOST_FREEDOM)
    squares = freedom * statistics.median(
        within.variance / typical(within.freedom) for within in others) if freedom else 0.0
    heads = min((self.heads[trial] for trial in trials if trial in self.heads), default=0)
    if heads and METRICS[metric].unit in ('percent', 'points'):
      head = one_head(heads, freedom, METRICS[metric].unit == 'percent' and not difference)
      squares, freedom = squares + head.squares, freedom + head.freedom
    return Within(squares * (2 if difference else 1), freedom)


def typical(freedom: int) -> float:
  """The median of a variance with these degrees of freedom, over its mean (Wilson and Hilferty)."""
  return (1 - 2 / (9 * freedom))**3


def one_head(heads: int, freedom: int, angle: bool) -> Within:
  """What is pooled of one head that comes and goes with the seed, beside trials of that freedom."""
  variance = 1 / (4 * heads) if angle else (100 / heads)**2 / 4
  more = max(MOST_FREEDOM - freedom, LEAST_OF_A_HEAD)
  return Within(more * variance, more)


def half_width(pool: Within, own: Within, parts: int, confidence: float = CONFIDENCE) -> float:
  """Half of an interval; infinite for fewer than three seeds, or where nothing is known."""
  outside = (1 - confidence) / parts
  return max((t_quantile(freedom, outside) * error for freedom, error in _spreads(pool, own)),
             default=math.inf)


def _spreads(pool: Within, own: Within) -> list[tuple[int, float]]:
  """(degrees of freedom, standard error of the mean of seeds) of which the wider one counts.

  Empty for fewer than three seeds, or where nothing is known: three seeds that do not differ at all
  say nothing of how much others would; many trials do.
  """
  n, prior = own.freedom + 1, min(pool.freedom, MOST_FREEDOM)
  if n < MIN_SEEDS or not own.squares + pool.squares and pool.freedom < MOST_FREEDOM:
    return []
  joined = (prior * pool.variance + own.squares) / (prior + own.freedom)
  spreads = [(prior + own.freedom, math.sqrt(joined / n))]
  if own.variance > pool.variance:
    spreads.append((own.freedom, math.sqrt(own.variance / n)))
  return spreads


def spread_of(group: Group) -> Spread:
  """The spreads of a group of runs: of its trials with two seeds or more that are done."""
  levels, differences = {}, {}
  for name in METRICS:
    several = {trial: list(summary.by_seed.values()) for trial in group.trials
               if (summary := metric_summary(name, group.done(trial)))
               and len(summary.by_seed) > 1}
    to, _ = _scale(name, ('',))
    levels[name] = {trial: Within.of([*map(to, values)]) for trial, values in several.items()}
    differences[name] = {trial: Within.of(values) for trial, values in several.items()}
  heads = {trial: min(map(_heads, done)) for trial in group.trials if (done := group.done(trial))}
  return Spread(levels, differences, heads)


def _heads(run: RunRecord) -> int:
  model = run.known_setup.experiment.model
  size = SIZES[model.size]
  return (model.layers or size['layers']) * (model.heads or size['heads'])


def _scale(metric: str, trials: Sequence[str]
           ) -> tuple[Callable[[float], float], Callable[[float], float]]:
  """From the scale of a metric to that on which seeds spread alike, and back.

  A rate of 0 to 100 % is an angle of 0 to pi/2. A sum of several rates may be more than 100.
  """
  if METRICS[metric].unit != 'percent' or len(trials) > 1:
    return float, float
  return (lambda percent: math.asin(math.sqrt(min(max(percent, 0.0), 100.0) / 100)),
          lambda angle: 100 * math.sin(min(max(angle, 0.0), math.pi / 2))**2)


def t_quantile(freedom: int, outside: float) -> float:
  """The t that |T| exceeds with the chance `outside`, T of Student's distribution."""
  return float(stdtrit(freedom, 1 - outside / 2))
