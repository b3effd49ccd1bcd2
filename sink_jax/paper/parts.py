"""What answers a check: the numbers of its trials, and the parts that they decide.

A part says that one mean over seeds lies on one side of its level.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from sink_jax.paper import numbers
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import ALONE, METRICS, Metric, Statistics, metric_summary, window_size
from sink_jax.paper.spread import MIN_SEEDS, NO_SPREAD, Spread
from sink_jax.report.markup import listed

_ENDED = {'diverged', 'not expressible'}  # states that no more training changes


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
  exact: bool = False
  doubt: str = ''
  paper: float | None = None
  proxy: bool = False
  never: Sequence[str] = ()
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
    metric, low, high, needed, doubt = METRICS[self.metric], None, None, None, self.doubt
    if spread is None or self.exact:
      decided = True
    elif metric.unit == 'truth':
      decided = self.n >= MIN_SEEDS and len(set(self.values)) == 1
    else:
      # A mean on the wrong side decides against the claim, whose chance is divided.
      among, level = 1 if self.fits else parts, metric.scaled(self.level)
      sample = self.metric, self.trials, [metric.scaled(value) for value in self.values]
      interval = spread.interval(*sample, among)
      decided = interval.above(level) or interval.below(level)
      if not decided and not doubt:
        needed = spread.seeds_needed(*sample, level, among)
      if interval.low is not None and interval.high is not None:
        low, high = metric.unscaled(interval.low), metric.unscaled(interval.high)
      elif self.n >= MIN_SEEDS:
        doubt = doubt or NO_SPREAD
    held = self.fits if decided and not doubt else None
    return dataclasses.replace(self, held=held, low=low, high=high, needed=needed, doubt=doubt)


def unjudged(metric: str, trials: tuple[str, ...], values: Mapping[int, float], level: float,
             above: bool, strict: bool = False) -> Part:
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
      paper=_paper(metric, trials))


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


@dataclasses.dataclass(frozen=True)
class TrialStatistics:
  """A number that decides a claim."""

  trial: str
  metric: str
  statistics: Statistics


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What runs say to a check: the parts to decide, in words and with the numbers of its trials.

  reason: why the check cannot hold whatever its parts say, short enough to group claims by; '' if
  it can. One part decided against it is enough all the same.
  """

  words: str
  parts: Sequence[Part]
  numbers: Sequence[TrialStatistics]
  reason: str = ''


@dataclasses.dataclass
class Aggregate:
  """A metric of several trials of a group over the seeds of each, and the trials that lack it.

  pending: trials whose numbers may still come, with the reason. left_out: trials that will never
  have one. not_done: seeds of the trials in `summaries` that are not done, and so not in the means.
  diverged: trials of which a seed diverged, whether others are done or not.
  """

  metric: str
  diverged: Sequence[str]
  summaries: dict[str, Statistics] = dataclasses.field(default_factory=dict)
  pending: list[str] = dataclasses.field(default_factory=list)
  left_out: list[str] = dataclasses.field(default_factory=list)
  not_done: list[str] = dataclasses.field(default_factory=list)

  def part(self, trials: tuple[str, ...], level: float, above: bool, strict: bool = False
           ) -> Part | None:
    """A part about a trial, or about one minus another seed by seed; None where they share no seed.

    level: on the scale of the metric.
    """
    summaries = {trial: self.summaries[trial] for trial in trials}
    first, *others = [summary.by_seed for summary in summaries.values()]
    values = {seed: value - sum(other[seed] for other in others) for seed, value in first.items()
              if all(seed in other for other in others)}
    if not values:
      return None
    # Seeds that diverged have no number; the mean of the others is of those that went well.
    diverged = [trial for trial in trials if trial in self.diverged]
    return dataclasses.replace(
        unjudged(self.metric, trials, values, level, above, strict),
        doubt=f'a seed of {listed(diverged)} diverged' if diverged else '',
        proxy=any(summary.proxy for summary in summaries.values()),
        never=[f'{trial} with seed {seed}: never (at least '
               f'{summary.metric.text(summary.by_seed[seed])})'
               for trial, summary in summaries.items() for seed in summary.never])

  def evidence(self, parts: Sequence[Part | None], least: int = 0, reason: str = '',
               words: str = '') -> Evidence:
    """The parts with 'Sink_1: default 18.18 %, batch-128 16.45 %', what is missing, and words.

    least: how many trials are asked for, of which none may be still to come; 0: what is there is
    enough.
    """
    shown = [f'{trial} {summary.signed}' for trial, summary in self.summaries.items()]
    lists = ((METRICS[self.metric].name, shown), ('not in the means', self.not_done),
             ('missing', self.pending), ('left out', self.left_out))
    found = [part for part in parts if part]
    if least and (self.pending or len(self.summaries) < least):
      reason = 'runs are missing' if self.pending else 'nothing was measured'
    elif least and not self.summaries.keys() >= set(self.diverged):
      reason = 'every run of a trial diverged'
    elif not reason and len(found) < len(parts):
      reason = 'no seed is common to the trials'
    return Evidence(
        '; '.join(f'{name}: {", ".join(of)}' for name, of in lists if of) + words, found,
        [TrialStatistics(trial, self.metric, of) for trial, of in self.summaries.items()], reason)


def aggregate(group: Group, metric: str, trials: Sequence[str]) -> Aggregate:
  """Over the runs that are done: nothing is judged before the last step."""
  found = Aggregate(metric, [trial for trial in trials
                             if any(run.status == 'diverged' for run in group.runs(trial))])
  for trial in trials:
    done = group.done(trial)
    if summary := metric_summary(metric, done):
      found.summaries[trial] = summary
      # The mean of the seeds that are done counts, and the words name the others.
      if words := group.not_done(trial):
        found.not_done.append(f'{trial} ({words})')
      continue
    alone = metric in ('window_absolute', 'window_relative') and any(
        window_size(run) == 1 for run in done)
    words = 'not measured' if done else group.status(trial)
    ended = {run.status for run in group.runs(trial)}
    # A trial that can never have the number holds no verdict up.
    never = alone or ended and ended <= _ENDED
    (found.left_out if never else found.pending).append(f'{trial} ({ALONE if alone else words})')
  return found
