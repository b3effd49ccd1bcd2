"""Checks that decide a claim: what they ask, in words, and what the runs answer."""

from __future__ import annotations

import dataclasses

from sink_jax.report.paper.collect import Group
from sink_jax.report.paper.measures import MEASURES, Summary, summary, window_size

SINK, NO_SINK = 10, 5  # percent of heads: from where there is a sink, below which there is none
MASSIVE = 2  # hidden norm ratio from which activations are massive
_FULL = 95  # percent: no room for an order above it
_UNITS = {'percent': ' %', 'points': ' points'}
_NOISE = 1.0  # points that an ordered row may go the other way


@dataclasses.dataclass(frozen=True)
class Outcome:
  """held: None where nothing can be decided. words: the deciding numbers, or why not."""

  held: bool | None
  words: str
  numbers: tuple[dict, ...] = ()


class Check:
  """`criterion` in words, and `judge(group)`."""

  criterion: str

  def judge(self, group: Group) -> Outcome:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Evidence:
  """Means by trial; pending: why others may still come; left_out: why others never will."""

  found: dict[str, Summary]
  pending: list[str]
  left_out: list[str]

  def numbers(self) -> tuple[dict, ...]:
    return tuple({'trial': trial, 'measure': _name(found.measure), **found.as_dict()}
                 for trial, found in self.found.items())

  def words(self) -> str:
    """'Sink_1: default 18.18 %, batch-128 16.45 %', and what is missing."""
    measures = [found.measure for found in self.found.values()]
    parts = [f'{trial} {found.text(_UNITS.get(found.measure.unit, ""))}'
             for trial, found in self.found.items()]
    line = f'{_plain(measures[0])}: {", ".join(parts)}' if parts else ''
    told = lambda words, trials: f'{words}: {", ".join(trials)}' if trials else ''
    return '; '.join(filter(None, [line, told('missing', self.pending),
                                   told('left out', self.left_out)]))


def gather(group: Group, measure: str, trials) -> Evidence:
  """Of the runs that are done: nothing is judged before the last step."""
  found, pending, left_out = {}, [], []
  for trial in trials:
    value = summary(measure, group.done(trial))
    if value is not None:
      found[trial] = value
      continue
    ended = {run['status'] for run in group.runs(trial)}
    words = f'{trial} ({group.status(trial) if not group.done(trial) else "not measured"})'
    never = ended and ended <= {'diverged', 'not expressible'}
    (left_out if never else pending).append(words)
  return Evidence(found, pending, left_out)


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
    where = ' where there is a sink on the first token' if self.sinks else ''
    level = self.at_least if self.below is None else self.below
    side = 'at least' if self.below is None else 'below'
    return (f'{_heading(self.measure)} of {_listed(self.trials)} is {side} '
            f'{_level(self.measure, level)}{where}')

  def judge(self, group):
    seen = gather(group, self.measure, self.trials)
    if self.sinks:
      faint = [trial for trial in seen.found
               if (sink := summary('sink_1', group.done(trial))) is None or sink.mean < SINK]
      seen = Evidence({t: v for t, v in seen.found.items() if t not in faint}, seen.pending,
                      seen.left_out + [f'{trial} (no sink)' for trial in faint])
    wrong = [trial for trial, found in seen.found.items() if not self._fits(found.mean)]
    if wrong:
      return Outcome(False, seen.words(), seen.numbers())
    enough = len(seen.found) >= self.some if self.some else not seen.pending
    if not seen.found or not enough:
      return Outcome(None, seen.words(), seen.numbers())
    return Outcome(True, seen.words(), seen.numbers())

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
    heading, margin = _heading(self.measure), _level(self.measure, self.margin, True)
    least = f' by at least {margin}' if self.margin else ''
    if self.ends or len(self.trials) == 2:
      side = 'below' if self.falls else 'above'
      return f'{heading} of {self.trials[-1]} is{least} {side} that of {self.trials[0]}'
    verb, other = ('falls', 'rises') if self.falls else ('rises', 'falls')
    way = _level(self.measure, self._noise, True)
    return (f'{heading} {verb}{least} along {", ".join(self.trials)}'
            + (f', and {other} by no more than {way} on the way' if self._noise else
               f', and never {other}'))

  @property
  def _noise(self):
    return _NOISE if MEASURES[self.measure].unit == 'percent' else 0.05 * self.margin

  def judge(self, group):
    seen = gather(group, self.measure, self.trials)
    if seen.pending or len(seen.found) < 2:
      return Outcome(None, seen.words(), seen.numbers())
    means = [found.mean for found in seen.found.values()]
    if MEASURES[self.measure].unit == 'percent' and min(means) >= _FULL:
      return Outcome(None, f'{seen.words()}: no room for an order', seen.numbers())
    if self.falls:
      means = [-mean for mean in means]
    # never emerging twice is no step in either direction
    steps = [0.0 if a == b else b - a for a, b in zip(means, means[1:])]
    total = 0.0 if means[0] == means[-1] else means[-1] - means[0]
    steady = self.ends or all(step >= -self._noise for step in steps)
    held = steady and total > 0 and total >= self.margin
    return Outcome(held, seen.words(), seen.numbers())


@dataclasses.dataclass(frozen=True)
class Near(Check):
  """A measure of each trial lies within a margin of another trial's."""

  measure: str
  trials: tuple[str, ...]
  other: str
  margin: float

  @property
  def criterion(self):
    return (f'{_heading(self.measure)} of {_listed(self.trials)} lies within '
            f'{_level(self.measure, self.margin, True)} of that of {self.other}')

  def judge(self, group):
    seen = gather(group, self.measure, (self.other, *self.trials))
    if self.other not in seen.found or len(seen.found) < 2:
      return Outcome(None, seen.words(), seen.numbers())
    centre = seen.found[self.other].mean
    if any(abs(found.mean - centre) > self.margin for found in seen.found.values()):
      return Outcome(False, seen.words(), seen.numbers())
    return Outcome(None if seen.pending else True, seen.words(), seen.numbers())


@dataclasses.dataclass(frozen=True)
class Trains(Check):
  """Every seed of each trial reaches its last step, or (diverges) none does."""

  trials: tuple[str, ...]
  diverges: bool = False

  @property
  def criterion(self):
    return (f'every run of {_listed(self.trials)} '
            + ('diverges' if self.diverges else 'reaches its last step'))

  def judge(self, group):
    wanted = 'diverged' if self.diverges else 'done'
    numbers, decided, words = [], [], []
    for trial in self.trials:
      ended = [run for run in group.runs(trial) if run['status'] in ('done', 'diverged')]
      words.append(f'{trial} ({group.status(trial)})')
      if ended:
        value = summary('converges', ended)
        numbers.append({'trial': trial, 'measure': 'converges', **value.as_dict()})
      decided.append(all(run['status'] == wanted for run in ended) if ended else None)
    held = False if False in decided else None if None in self._expected(group, decided) else True
    return Outcome(held if any(d is not None for d in decided) else None,
                   f'runs: {", ".join(words)}', tuple(numbers))

  def _expected(self, group, decided):
    """Without the trials that the budget cannot express."""
    return [d for trial, d in zip(self.trials, decided)
            if {run['status'] for run in group.runs(trial)} != {'not expressible'}]


@dataclasses.dataclass(frozen=True)
class Onset(Check):
  """A sink in the largest window and none in the smallest, of those that could show one."""

  trials: tuple[str, ...]

  @property
  def criterion(self):
    return (f'of the windows among {_listed(self.trials)} that are longer than epsilon times the '
            'probe (shorter ones cannot exceed epsilon, whatever the model learns), the smallest '
            f'has Sink_1 below {NO_SINK} %, the largest at least {SINK} %')

  def judge(self, group):
    seen = gather(group, 'sink_1', self.trials)
    if seen.pending:
      return Outcome(None, seen.words(), seen.numbers())
    sizes = {}
    for trial in seen.found:
      run = group.done(trial)[0]
      size, probe = window_size(run), run['config']['probe']
      if size is not None and size > probe['epsilon'] * probe['length']:
        sizes[trial] = size
    if len(set(sizes.values())) < 2:
      return Outcome(None, f'{seen.words()}: {len(sizes)} of the windows can show a sink at all',
                     seen.numbers())
    small, large = min(sizes, key=sizes.get), max(sizes, key=sizes.get)
    held = seen.found[small].mean < NO_SINK and seen.found[large].mean >= SINK
    return Outcome(held, f'{seen.words()}: smallest {sizes[small]}, largest {sizes[large]} tokens',
                   seen.numbers())


def _name(measure):
  return next(name for name, other in MEASURES.items() if other is measure)


def _heading(measure):
  return _plain(MEASURES[measure])


def _plain(measure):
  """The heading of a column without its unit."""
  return measure.heading.replace(' %', '').replace(' in points', '')


def _level(measure, value, apart=False):
  """A level with its unit; apart: a distance between two values."""
  points = f' point{"s" if value != 1 else ""}'
  unit = {'percent': points if apart else ' %', 'points': points, 'nats': ' nats'}.get(
      MEASURES[measure].unit, '')
  return f'{value:g}{unit}'


def _listed(trials):
  return trials[0] if len(trials) == 1 else f'{", ".join(trials[:-1])} and {trials[-1]}'
