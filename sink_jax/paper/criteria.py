"""Checks that decide a claim: what they ask, in words, and what the runs answer."""

from __future__ import annotations

import dataclasses

from sink_jax.paper.aggregate import Evidence, gather, heading, level, listed
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, summary, window_size
from sink_jax.report.markup import upper

SINK, NO_SINK = 10, 5  # percent of heads: from where there is a sink, below which there is none
MASSIVE = 2  # hidden norm ratio from which activations are massive
_FULL = 95  # percent: no room for an order above it
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
  numbers: tuple[dict, ...] = ()
  close: bool = False
  reason: str = ''


class Check:
  """`criterion` in words, `trials` that are asked, and `judge(group)`."""

  criterion: str
  trials: tuple[str, ...]

  @property
  def asked(self) -> tuple[str, ...]:
    """Every trial that the answer hangs on."""
    return self.trials

  def judge(self, group: Group) -> Outcome:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Every(Check):
  """A measure of each trial is at least, or below, a level.

  some: this many measured trials are enough, though others are still to come. sinks: only
  trials that have a sink on the first token count.
  """

  measure: str
  trials: tuple[str, ...]
  at_least: float | None = None
  below: float | None = None
  some: int | None = None
  sinks: bool = False

  @property
  def criterion(self):
    of = f'each of {listed(self.trials)}' if len(self.trials) > 1 else self.trials[0]
    if self.some:
      of += f' that was measured ({self.some} at least)'
    of += ' and has a sink on the first token' if self.sinks else ''
    side = 'at least' if self.below is None else 'below'
    return f'{heading(self.measure)} of {of} is {side} {level(self.measure, self._level)}'

  @property
  def _level(self):
    return self.at_least if self.below is None else self.below

  def judge(self, group):
    seen = gather(group, self.measure, self.trials)
    if self.sinks:
      seen = seen.without({trial: 'no sink' for trial in seen.found if not _has_sink(group, trial)})
    wrong = [found.mean for found in seen.found.values() if not self._fits(found.mean)]
    if wrong:
      return _outcome(False, seen, all(_close(value, self._level) for value in wrong))
    enough = len(seen.found) >= self.some if self.some else not seen.pending
    if not seen.found or not enough:
      return _open(seen)
    return _outcome(True, seen, any(_close(found.mean, self._level)
                                    for found in seen.found.values()))

  def _fits(self, value):
    return value >= self.at_least if self.below is None else value < self.below


@dataclasses.dataclass(frozen=True)
class Ordered(Check):
  """A measure falls, or rises, along trials, by a margin in all.

  ends: only the first and the last that are measured count.
  """

  measure: str
  trials: tuple[str, ...]
  margin: float
  falls: bool = True
  ends: bool = False

  @property
  def criterion(self):
    name, margin = heading(self.measure), level(self.measure, self.margin, True)
    least = f'at least {margin} ' if self.margin else ''
    side = f'{least}{"below" if self.falls else "above"}'
    if len(self.trials) == 2:
      return f'{name} of {self.trials[-1]} is {side} that of {self.trials[0]}'
    if self.ends:
      return (f'{name} of the last one measured of {listed(self.trials)} is {side} that of the '
              'first one measured')
    verb, other = ('falls', 'rises') if self.falls else ('rises', 'falls')
    way = level(self.measure, self._noise, True)
    return (f'{name} {verb} along {listed(self.trials)}'
            + (f', by at least {margin} in all' if self.margin else '')
            + (f', and {other} by no more than {way} on the way' if self._noise else
               f', and never {other}'))

  @property
  def _noise(self):
    return _NOISE if METRICS[self.measure].unit == 'percent' else 0.05 * self.margin

  def judge(self, group):
    seen = gather(group, self.measure, self.trials)
    if seen.pending or len(seen.found) < 2:
      return _open(seen)
    means = [found.mean for found in seen.found.values()]
    if METRICS[self.measure].unit == 'percent' and min(means) >= _FULL:
      return Outcome(None, f'{seen.words()}: no room for an order', seen.numbers(),
                     reason=f'all rates are {_FULL} % or more, which leaves no room for an order')
    if self.falls:
      means = [-mean for mean in means]
    # never emerging twice is no step in either direction
    steps = [0.0 if a == b else b - a for a, b in zip(means, means[1:])]
    total = 0.0 if means[0] == means[-1] else means[-1] - means[0]
    steady = self.ends or all(step >= -self._noise for step in steps)
    held = steady and total > 0 and total >= self.margin
    return _outcome(held, seen, steady and _close(total, self.margin))


def _within(seen, base, limit, distance=float):
  """Is every mean within a limit of the base's, or above it by no more, without distance=abs?"""
  if base not in seen.found or len(seen.found) < 2:
    return _open(seen)
  apart = [distance(found.mean - seen.found[base].mean) for found in seen.found.values()]
  far = [value for value in apart if value > limit]
  if far:
    return _outcome(False, seen, all(_close(value, limit) for value in far))
  if seen.pending:
    return _open(seen)
  return _outcome(True, seen, any(_close(value, limit) for value in apart))


@dataclasses.dataclass(frozen=True)
class Near(Check):
  """A measure of each trial lies within a margin of another trial's."""

  measure: str
  trials: tuple[str, ...]
  other: str
  margin: float

  @property
  def asked(self):
    return (self.other, *self.trials)

  @property
  def criterion(self):
    return (f'{heading(self.measure)} of {listed(self.trials)} lies within '
            f'{level(self.measure, self.margin, True)} of that of {self.other}')

  def judge(self, group):
    return _within(gather(group, self.measure, self.asked), self.other, self.margin, abs)


@dataclasses.dataclass(frozen=True)
class Trains(Check):
  """Every seed of each trial reaches its last step, or (diverges) none does.

  within: by how many nats the valid loss may lie above that of the default run at most.
  """

  trials: tuple[str, ...]
  diverges: bool = False
  within: float | None = None

  @property
  def asked(self):
    return self.trials if self.within is None else ('default', *self.trials)

  @property
  def criterion(self):
    line = (f'every run of {listed(self.trials)} '
            + ('diverges' if self.diverges else 'reaches its last step'))
    return line if self.within is None else (
        f'{line}, and the valid loss is at most {level("valid_loss", self.within)} above that of '
        'default')

  def judge(self, group):
    ends = self._ends(group)
    if self.within is None or ends.held is False:
      return ends
    losses = self._losses(group)
    held = False if losses.held is False else None if None in (ends.held, losses.held) else True
    return Outcome(held, '. '.join(filter(None, (ends.words, upper(losses.words)))),
                   ends.numbers + losses.numbers, losses.close, ends.reason or losses.reason)

  def _ends(self, group):
    wanted = 'diverged' if self.diverges else 'done'
    numbers, decided, words = [], [], []
    for trial in self.trials:
      runs = group.runs(trial)
      states = {run.status for run in runs}
      words.append(f'{trial} ({group.status(trial)})')
      if value := summary('converges', runs):
        numbers.append({'trial': trial, 'measure': 'converges', **value.as_dict()})
      if states != {'not expressible'}:  # else the budget leaves it out
        # A seed under way may still go either way.
        decided.append(False if states & ({'done', 'diverged'} - {wanted}) else
                       True if states == {wanted} else None)
    held = False if False in decided else None if None in decided or not decided else True
    reason = '' if held is not None else _MISSING if decided else _NOTHING
    return Outcome(held, f'runs: {", ".join(words)}', tuple(numbers), reason=reason)

  def _losses(self, group):
    return _within(gather(group, 'valid_loss', self.asked), 'default', self.within)


@dataclasses.dataclass(frozen=True)
class Onset(Check):
  """A sink in the largest window and none in the smallest, of those that could show one."""

  trials: tuple[str, ...]

  @property
  def criterion(self):
    return (f'of the windows among {listed(self.trials)} that are longer than epsilon times the '
            'probe (shorter ones cannot exceed epsilon, whatever the model learns), the smallest '
            f'has Sink_1 below {NO_SINK} %, the largest at least {SINK} %')

  def judge(self, group):
    seen = gather(group, 'sink_1', self.trials)
    if seen.pending:
      return _open(seen)
    sizes = {}
    for trial in seen.found:
      run = group.done(trial)[0]
      size, probe = window_size(run), run.known_setup.experiment.probe
      if size is not None and size > probe.epsilon * probe.length:
        sizes[trial] = size
    if len(set(sizes.values())) < 2:
      return Outcome(None, f'{seen.words()}: {len(sizes)} of the windows can show a sink at all',
                     seen.numbers(), reason='windows are too small to show a sink')
    small, large = min(sizes, key=sizes.get), max(sizes, key=sizes.get)
    least, most = seen.found[small].mean, seen.found[large].mean
    fits = [(least < NO_SINK, _close(least, NO_SINK)), (most >= SINK, _close(most, SINK))]
    held = all(fit for fit, _ in fits)
    near = any(close for _, close in fits) if held else all(close for fit, close in fits if not fit)
    return Outcome(held, f'{seen.words()}: smallest {sizes[small]}, largest {sizes[large]} tokens',
                   seen.numbers(), near)


def _outcome(held: bool, seen: Evidence, close: bool) -> Outcome:
  return Outcome(held, seen.words(), seen.numbers(), close)


def _open(seen: Evidence) -> Outcome:
  return Outcome(None, seen.words(), seen.numbers(),
                 reason=_MISSING if seen.pending else _NOTHING)


def _close(value, to):
  return to != 0 and abs(value - to) <= _CLOSE * abs(to)


def _has_sink(group, trial):
  sink = summary('sink_1', group.done(trial))
  return sink is not None and sink.mean >= SINK
