"""Parts of criteria: each says that one mean over seeds lies on one side of its level."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from sink_jax.paper import numbers
from sink_jax.paper.aggregate import heading, level
from sink_jax.paper.content import JudgedPart
from sink_jax.paper.metrics import METRICS, MetricSummary
from sink_jax.paper.spread import MIN_SEEDS, NO_SPREAD, Interval, Spread


@dataclasses.dataclass(frozen=True)
class Part:
  """A mean of a trial, or of a difference between two, against a level.

  trials: one, or the two whose difference it is, the first minus the second. values: {seed: on the
  scale of the metric}. level: on that scale as well. above: whether the mean has to be at least the
  level, or below it. strict: whether the level itself is enough. exact: true or false by
  construction of the model, so that one run shows it. doubt: why it cannot be decided, whatever the
  mean is; '' as a rule. proxy: whether the values are of scores that do not sum to one. never: the
  values in whose seed no sink emerged, which count as the last step, in words.
  """

  metric: str
  trials: tuple[str, ...]
  values: Mapping[int, float]
  level: float
  above: bool
  strict: bool = False
  exact: bool = False
  doubt: str = ''
  proxy: bool = False
  never: tuple[str, ...] = ()

  @property
  def words(self) -> str:
    """'Sink_1 of default', or 'Sink_1 of default minus that of lr-1e-4'."""
    first = f'{heading(self.metric)} of {self.trials[0]}'
    apart = 'over' if METRICS[self.metric].unit == 'ratio' else 'minus'
    return first if len(self.trials) == 1 else f'{first} {apart} that of {self.trials[1]}'

  @property
  def asked(self) -> str:
    """'at least 10 %', 'below 5 %'."""
    metric, difference = METRICS[self.metric], len(self.trials) > 1
    if metric.unit == 'truth':
      return 'yes' if self.above else 'no'
    if difference and self.level == 0:
      side = 'above' if self.strict else 'at least'
      return f'{side} {"1" if metric.unit == "ratio" else "zero"}'
    side = ('more than' if self.above else 'below') if self.strict else (
        'at least' if self.above else 'at most')
    return f'{side} {level(self.metric, self.level if difference else self._level, difference)}'

  @property
  def _level(self) -> float:
    return METRICS[self.metric].unscaled(self.level)

  def judge(self, spread: Spread | None, parts: int) -> JudgedPart:
    """Decides the part.

    Args:
      spread: what seeds of the budget spread by; None takes the mean for the truth, as of numbers
        that were published without their spread.
      parts: how many parts the claim has. To hold, all of them have to be decided, which happens by
        chance no more often than for one; one decided against is enough for a claim not to hold,
        so the chance of that is divided among them.
    """
    values = list(self.values.values())
    metric, mean = METRICS[self.metric], statistics.fmean(values)
    interval, needed, doubt = Interval(mean, None, None, len(values)), None, self.doubt
    if spread is None or self.exact:
      held = self._fits(mean)
    elif metric.unit == 'truth':
      held = self._alike(values)
    else:
      interval = spread.interval(self.metric, self.trials, values)
      against = spread.interval(self.metric, self.trials, values, parts)
      held = self._decided(interval, against)
      # A mean on the wrong side decides against the claim, whose chance is divided.
      among = 1 if self._fits(mean) else parts
      interval = interval if among == 1 else against
      if held is None:
        needed = spread.seeds_needed(self.metric, self.trials, values, self.level, among)
        if interval.low is None and len(values) >= MIN_SEEDS:
          doubt = doubt or NO_SPREAD
    held = None if self.doubt else held
    natural = lambda value: None if value is None else metric.unscaled(value)
    return JudgedPart(
        self.words, self.metric, self.trials, self.asked, self._level, held, metric.unscaled(mean),
        natural(interval.low), natural(interval.high), len(values),
        [metric.unscaled(value) for value in values], list(self.values), self._fits(mean),
        None if self.doubt else needed, doubt, self._paper(), self.proxy,
        self.never)

  def _paper(self) -> float | None:
    """The paper's number, as of one seed; the means of its tables have no spread."""
    metric = METRICS[self.metric]
    found = [numbers.trial_number(trial, self.metric) for trial in self.trials]
    known = [metric.scaled(value) for value in found if value is not None]
    if len(known) < len(found):
      return None
    return metric.unscaled(known[0] if len(known) == 1 else known[0] - known[1])

  def _fits(self, mean: float) -> bool:
    if METRICS[self.metric].unit == 'truth':  # a single seed that ends otherwise is one too many
      return mean == float(self.above)
    if mean == self.level:
      return not self.strict
    return mean > self.level if self.above else mean < self.level

  def _decided(self, within: Interval, against: Interval) -> bool | None:
    if within.n < MIN_SEEDS:
      return None
    if within.above(self.level) if self.above else within.below(self.level):
      return True
    wrong = against.below(self.level) if self.above else against.above(self.level)
    return False if wrong else None

  def _alike(self, values: list[float]) -> bool | None:
    """Of truths: decided where all of three seeds or more are alike.

    If one seed in ten ends unlike the others, three that are alike show the rule in 999 cases of
    1,000; if half of the seeds do, three are alike in a quarter of the cases.
    """
    if len(values) < MIN_SEEDS or len(set(values)) > 1:
      return None
    return values[0] == float(self.above)


def part_of(metric: str, trial: str, summary: MetricSummary, level: float, above: bool,
            strict: bool = False, exact: bool = False, doubt: str = '') -> Part:
  """A part about one trial. level: in the unit of the metric."""
  return Part(metric, (trial,), summary.by_seed, METRICS[metric].scaled(level), above, strict,
              exact, doubt, summary.proxy, _never(trial, summary))


def difference_of(metric: str, trials: tuple[str, str],
                  summaries: Mapping[str, MetricSummary], level: float, above: bool,
                  strict: bool = False, doubt: str = '') -> Part | None:
  """A part about a trial minus another, seed by seed; None where they share no seed.

  level: on the scale of the metric, as margins are.
  """
  first, second = (summaries[trial].by_seed for trial in trials)
  pairs = {seed: first[seed] - second[seed] for seed in first if seed in second}
  return Part(metric, trials, pairs, level, above, strict, doubt=doubt,
              proxy=any(summaries[trial].proxy for trial in trials), never=tuple(
                  words for trial in trials for words in _never(trial, summaries[trial]))
              ) if pairs else None


def _never(trial: str, summary: MetricSummary) -> tuple[str, ...]:
  """'lr-1e-4 with seed 2: never (at least 1,000)'."""
  return tuple(f'{trial} with seed {seed}: never (at least '
               f'{summary.metric.text(summary.by_seed[seed])})' for seed in summary.never)
