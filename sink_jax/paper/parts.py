"""Parts of criteria: each says that one mean over seeds lies on one side of its level."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from sink_jax.paper import numbers
from sink_jax.paper.metrics import METRICS, Metric
from sink_jax.paper.spread import MIN_SEEDS, NO_SPREAD, Spread


@dataclasses.dataclass(frozen=True)
class Part:
  """A mean of a trial, or of a difference between two, against a level, in the unit of the metric.

  words: 'Sink_1 of default', or 'Sink_1 of default minus that of lr-1e-4'. trials: one, or the two
  whose difference it is, the first minus the second; that of ratios is a factor. asked: 'at least
  10 %'. above: whether the mean has to be at least the level, or below it. values: one per seed.
  fits: whether the mean itself is on the side that is asked for. exact: true or false by
  construction of the model, so that one run shows it. doubt: why it cannot be decided, whatever the
  mean is; '' as a rule. paper: the paper's number, as of one seed; None where no table has it.
  proxy: whether the values are of scores that do not sum to one. never: the values in whose seed
  no sink emerged, which count as the last step, in words.

  Of what is judged: held: None where the seeds do not decide it. low, high: of the interval of the
  mean; None without a known spread, as of one seed where no trial has more. needed: how many seeds
  of this spread would decide; None if decided or not known.
  """

  words: str
  metric: str
  trials: Sequence[str]
  asked: str
  level: float
  above: bool
  mean: float
  values: Sequence[float]
  seeds: Sequence[int]
  fits: bool
  exact: bool
  doubt: str
  paper: float | None
  proxy: bool
  never: Sequence[str]
  held: bool | None = None
  low: float | None = None
  high: float | None = None
  needed: int | None = None

  @property
  def n(self) -> int:
    """How many seeds there are."""
    return len(self.values)

  def judge(self, spread: Spread | None, parts: int) -> Part:
    """The same, decided or not.

    Of truths all of three seeds or more have to be alike: if one seed in ten ends unlike the
    others, three that are alike show the rule in 999 cases of 1,000; if half of the seeds do, three
    are alike in a quarter of the cases.

    Args:
      spread: what seeds of the budget spread by; None takes the mean for the truth, as of numbers
        that were published without their spread.
      parts: how many parts the claim has. To hold, all of them have to be decided, which happens by
        chance no more often than for one; one decided against is enough for a claim not to hold,
        so the chance of that is divided among them.
    """
    metric = METRICS[self.metric]
    if spread is None or self.exact:
      return self._decided(True)
    if metric.unit == 'truth':
      return self._decided(self.n >= MIN_SEEDS and len(set(self.values)) == 1)
    values, level = [metric.scaled(value) for value in self.values], metric.scaled(self.level)
    # A mean on the wrong side decides against the claim, whose chance is divided.
    among = 1 if self.fits else parts
    interval = spread.interval(self.metric, self.trials, values, among)
    decided = interval.above(level) or interval.below(level)
    needed = None if decided or self.doubt else spread.seeds_needed(
        self.metric, self.trials, values, level, among)
    unknown = interval.low is None and self.n >= MIN_SEEDS
    natural = lambda value: None if value is None else metric.unscaled(value)
    return dataclasses.replace(
        self._decided(decided), low=natural(interval.low), high=natural(interval.high),
        needed=needed, doubt=self.doubt or (NO_SPREAD if unknown else ''))

  def _decided(self, decided: bool) -> Part:
    return dataclasses.replace(self, held=self.fits if decided and not self.doubt else None)


def unjudged(metric: str, trials: tuple[str, ...], values: Mapping[int, float], level: float,
             above: bool, strict: bool = False, exact: bool = False, doubt: str = '',
             proxy: bool = False, never: tuple[str, ...] = ()) -> Part:
  """A part that is not judged yet.

  values, level: on the scale of the metric, the values by seed. strict: whether the level itself is
  not enough.
  """
  of, mean = METRICS[metric], statistics.fmean(values.values())
  fits = not strict if mean == level else (mean > level) == above
  if of.unit == 'truth':  # a single seed that ends otherwise is one too many
    fits = mean == float(above)
  first, apart = f'{of.name} of {trials[0]}', 'over' if of.unit == 'ratio' else 'minus'
  return Part(
      words=first if len(trials) == 1 else f'{first} {apart} that of {trials[1]}',
      metric=metric, trials=trials, asked=_asked(of, len(trials) > 1, level, above, strict),
      level=of.unscaled(level), above=above, mean=of.unscaled(mean),
      values=[of.unscaled(value) for value in values.values()], seeds=list(values), fits=fits,
      exact=exact, doubt=doubt, paper=_paper(metric, trials), proxy=proxy, never=never)


def _asked(metric: Metric, difference: bool, level: float, above: bool, strict: bool) -> str:
  """'at least 10 %', 'below 5 %'; level: on the scale of the metric."""
  if metric.unit == 'truth':
    return 'yes' if above else 'no'
  if difference and level == 0:
    return f'{"above" if strict else "at least"} {"1" if metric.unit == "ratio" else "zero"}'
  side = ('more than' if above else 'below') if strict else ('at least' if above else 'at most')
  if difference and metric.unit == 'ratio':
    return f'{side} a factor of {metric.unscaled(level):.3g}'
  value, points = metric.unscaled(level), ' point' if level == 1 else ' points'
  # 10 % and 12 % are 2 points apart, and not 2 %.
  units = {'percent': points if difference else ' %', 'points': points, 'nats': ' nats'}
  return f'{side} {value:g}{units.get(metric.unit, "")}'


def _paper(metric: str, trials: tuple[str, ...]) -> float | None:
  """The paper's number; the means of its tables have no spread."""
  of, found = METRICS[metric], [numbers.trial_number(trial, metric) for trial in trials]
  known = [of.scaled(value) for value in found if value is not None]
  if len(known) < len(found):
    return None
  return of.unscaled(known[0] if len(known) == 1 else known[0] - known[1])
