"""Criteria of claims: each asks something of runs, in words, and decides it by their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sink_jax.paper.aggregate import Aggregate, aggregate, heading, level, listed
from sink_jax.paper.cells import TrialStatistics
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, metric_summary, window_size
from sink_jax.report.markup import upper

SINK, NO_SINK = 10, 5  # percent of heads: from where there is a sink, below which there is none
MASSIVE = 2  # hidden norm ratio from which activations are massive
# Rates that are all near 100 % have reached a ceiling: what orders them is noise.
_FULL = 95  # percent
_NOISE = 1.0  # points that an ordered row may go the other way
_CLOSE = 0.05  # of a level: another seed might lie on its other side
_MISSING, _NOTHING = 'runs are missing', 'nothing was measured'


@dataclasses.dataclass(frozen=True)
class Outcome:
  """held: None where nothing can be decided. words: the deciding numbers, or why not.

  close: does the answer hang on a number close to its level? reason: why nothing can be
  decided, short enough to group claims by.
  """

  held: bool | None
  words: str
  numbers: tuple[TrialStatistics, ...] = ()
  close: bool = False
  reason: str = ''


class Check:
  """What is asked of runs: `criterion` in words, of `trials`; `judge` answers it of a group."""

  trials: tuple[str, ...]

  @property
  def criterion(self) -> str:
    raise NotImplementedError

  @property
  def asked(self) -> tuple[str, ...]:
    """Every trial that the answer hangs on."""
    return self.trials

  def judge(self, group: Group) -> Outcome:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Every(Check):
  """A metric of each trial is at least, or below, a level.

  some: this many measured trials are enough, though others are still to come. sinks: only
  trials that have a sink on the first token count.
  """

  metric: str
  trials: tuple[str, ...]
  at_least: float | None = None
  below: float | None = None
  some: int | None = None
  sinks: bool = False

  @property
  def criterion(self) -> str:
    of = listed(self.trials)
    of = f'each of {of}' if len(self.trials) > 1 else of
    if self.some:
      of += f' that was measured ({self.some} at least)'
    of += ' and has a sink on the first token' if self.sinks else ''
    side = 'at least' if self.below is None else 'below'
    return f'{heading(self.metric)} of {of} is {side} {level(self.metric, self._level)}'

  @property
  def _level(self) -> float:
    level = self.at_least if self.below is None else self.below
    assert level is not None, 'a check needs at_least or below'
    return level

  def judge(self, group: Group) -> Outcome:
    measured = aggregate(group, self.metric, self.trials)
    if self.sinks:
      measured = measured.without({trial: 'no sink' for trial in measured.summaries
                                   if not _has_sink(group, trial)})
    means = [summary.mean for summary in measured.summaries.values()]
    # A counterexample decides at once; that all hold is known when none is missing.
    wrong = [mean for mean in means if not self._fits(mean)]
    if wrong:
      return _outcome(False, measured, all(_close(mean, self._level) for mean in wrong))
    enough = len(means) >= self.some if self.some else not measured.pending
    if not means or not enough:
      return _undecided(measured)
    return _outcome(True, measured, any(_close(mean, self._level) for mean in means))

  def _fits(self, mean: float) -> bool:
    return mean >= self._level if self.below is None else mean < self._level


@dataclasses.dataclass(frozen=True)
class Ordered(Check):
  """A metric falls, or rises, along trials, by a margin in all.

  ends: only the first and the last that are measured count.
  """

  metric: str
  trials: tuple[str, ...]
  margin: float
  falls: bool = True
  ends: bool = False

  @property
  def criterion(self) -> str:
    name, margin = heading(self.metric), level(self.metric, self.margin, True)
    least = f'at least {margin} ' if self.margin else ''
    side = f'{least}{"below" if self.falls else "above"}'
    if len(self.trials) == 2:
      return f'{name} of {self.trials[-1]} is {side} that of {self.trials[0]}'
    if self.ends:
      return (f'{name} of the last one measured of {listed(self.trials)} is {side} that of the '
              'first one measured')
    verb, other = ('falls', 'rises') if self.falls else ('rises', 'falls')
    way = level(self.metric, self._noise, True)
    return (f'{name} {verb} along {listed(self.trials)}'
            + (f', by at least {margin} in all' if self.margin else '')
            + (f', and {other} by no more than {way} on the way' if self._noise else
               f', and never {other}'))

  @property
  def _noise(self) -> float:
    return _NOISE if METRICS[self.metric].unit == 'percent' else 0.05 * self.margin

  def judge(self, group: Group) -> Outcome:
    measured = aggregate(group, self.metric, self.trials)
    # An order is a matter of all its trials: one that is missing may stand anywhere in it.
    if measured.pending or len(measured.summaries) < 2:
      return _undecided(measured)
    means = [summary.mean for summary in measured.summaries.values()]
    if METRICS[self.metric].unit == 'percent' and min(means) >= _FULL:
      return Outcome(None, f'{measured.words()}: no room for an order', measured.numbers(),
                     reason=f'all rates are {_FULL} % or more, which leaves no room for an order')
    # A metric that falls is judged as one that rises, with its sign turned.
    if self.falls:
      means = [-mean for mean in means]
    # Where no sink ever emerges the step is infinite: two such are no step in either direction,
    # and their difference would not be a number.
    steps = [0.0 if a == b else b - a for a, b in zip(means, means[1:])]
    total = 0.0 if means[0] == means[-1] else means[-1] - means[0]
    steady = self.ends or all(step >= -self._noise for step in steps)
    # Also with a margin of 0 the ends must differ: equal values are no order.
    held = steady and total > 0 and total >= self.margin
    return _outcome(held, measured, steady and _close(total, self.margin))


def _within(measured: Aggregate, base: str, limit: float,
            distance: Callable[[float], float] = float) -> Outcome:
  """Is every mean within a limit of the base's, or above it by no more, without distance=abs?"""
  if base not in measured.summaries or len(measured.summaries) < 2:
    return _undecided(measured)
  apart = [distance(summary.mean - measured.summaries[base].mean)
           for summary in measured.summaries.values()]
  # One trial too far away decides, whatever the missing ones will show.
  far = [value for value in apart if value > limit]
  if far:
    return _outcome(False, measured, all(_close(value, limit) for value in far))
  if measured.pending:
    return _undecided(measured)
  return _outcome(True, measured, any(_close(value, limit) for value in apart))


@dataclasses.dataclass(frozen=True)
class Near(Check):
  """A metric of each trial lies within a margin of another trial's."""

  metric: str
  trials: tuple[str, ...]
  other: str
  margin: float

  @property
  def asked(self) -> tuple[str, ...]:
    return (self.other, *self.trials)

  @property
  def criterion(self) -> str:
    return (f'{heading(self.metric)} of {listed(self.trials)} lies within '
            f'{level(self.metric, self.margin, True)} of that of {self.other}')

  def judge(self, group: Group) -> Outcome:
    return _within(aggregate(group, self.metric, self.asked), self.other, self.margin, abs)


@dataclasses.dataclass(frozen=True)
class Trains(Check):
  """Every seed of each trial reaches its last step, or (diverges) none does.

  within: by how many nats the valid loss may lie above that of the default run at most.
  """

  trials: tuple[str, ...]
  diverges: bool = False
  within: float | None = None

  @property
  def asked(self) -> tuple[str, ...]:
    return self.trials if self.within is None else ('default', *self.trials)

  @property
  def criterion(self) -> str:
    line = (f'every run of {listed(self.trials)} '
            + ('diverges' if self.diverges else 'reaches its last step'))
    return line if self.within is None else (
        f'{line}, and the valid loss is at most {level("valid_loss", self.within)} above that of '
        'default')

  def judge(self, group: Group) -> Outcome:
    # Where runs did not end as asked, their losses change nothing.
    ends = self._ends(group)
    if self.within is None or ends.held is False:
      return ends
    losses = self._losses(group, self.within)
    held = False if losses.held is False else None if None in (ends.held, losses.held) else True
    return Outcome(held, '. '.join(filter(None, (ends.words, upper(losses.words)))),
                   ends.numbers + losses.numbers, losses.close, ends.reason or losses.reason)

  def _ends(self, group: Group) -> Outcome:
    wanted = 'diverged' if self.diverges else 'done'
    numbers, decided, words = [], [], []
    for trial in self.trials:
      runs = group.runs(trial)
      states = {run.status for run in runs}
      words.append(f'{trial} ({group.status(trial)})')
      if summary := metric_summary('converges', runs):
        numbers.append(TrialStatistics(trial, 'converges', summary.statistics()))
      if states != {'not expressible'}:  # else the budget leaves it out
        # One seed that ended the other way decides; a seed under way may still do so.
        decided.append(False if states & ({'done', 'diverged'} - {wanted}) else
                       True if states == {wanted} else None)
    held = False if False in decided else None if None in decided or not decided else True
    reason = '' if held is not None else _MISSING if decided else _NOTHING
    return Outcome(held, f'runs: {", ".join(words)}', tuple(numbers), reason=reason)

  def _losses(self, group: Group, within: float) -> Outcome:
    return _within(aggregate(group, 'valid_loss', self.asked), 'default', within)


@dataclasses.dataclass(frozen=True)
class Onset(Check):
  """A sink in the largest window and none in the smallest, of those that could show one."""

  trials: tuple[str, ...]

  @property
  def criterion(self) -> str:
    return (f'of the windows among {listed(self.trials)} that are longer than epsilon times the '
            'probe (shorter ones cannot exceed epsilon, whatever the model learns), the smallest '
            f'has Sink_1 below {NO_SINK} %, the largest at least {SINK} %')

  def judge(self, group: Group) -> Outcome:
    measured = aggregate(group, 'sink_1', self.trials)
    if measured.pending:
      return _undecided(measured)
    sizes: dict[str, int] = {}
    for trial in measured.summaries:
      run = group.done(trial)[0]
      size, probe = window_size(run), run.known_setup.experiment.probe
      # The mean weight of a key over the probe is at most the share of queries that see it.
      if size is not None and size > probe.epsilon * probe.length:
        sizes[trial] = size
    # A single window has no smaller one to compare it with.
    if len(set(sizes.values())) < 2:
      return Outcome(None, f'{measured.words()}: {len(sizes)} of the windows can show a sink at '
                     'all', measured.numbers(), reason='windows are too small to show a sink')
    small, large = min(sizes, key=lambda t: sizes[t]), max(sizes, key=lambda t: sizes[t])
    least, most = (measured.summaries[trial].mean for trial in (small, large))
    fits = [(least < NO_SINK, _close(least, NO_SINK)), (most >= SINK, _close(most, SINK))]
    held = all(fit for fit, _ in fits)
    # It holds if both do, so that one close number suffices for doubt; it fails by one, so that all
    # that fail must be close.
    near = any(close for _, close in fits) if held else all(close for fit, close in fits if not fit)
    return Outcome(held, f'{measured.words()}: smallest {sizes[small]}, largest {sizes[large]} '
                   'tokens', measured.numbers(), near)


def _outcome(held: bool, measured: Aggregate, close: bool) -> Outcome:
  return Outcome(held, measured.words(), measured.numbers(), close)


def _undecided(measured: Aggregate) -> Outcome:
  return Outcome(None, measured.words(), measured.numbers(),
                 reason=_MISSING if measured.pending else _NOTHING)


def _close(value: float, to: float) -> bool:
  return to != 0 and abs(value - to) <= _CLOSE * abs(to)


def _has_sink(group: Group, trial: str) -> bool:
  sink = metric_summary('sink_1', group.done(trial))
  return sink is not None and sink.mean >= SINK
