"""Checks of claims: each asks something of runs, and finds the numbers that decide it.

A check is made of parts, each a mean over seeds on one side of a level (`parts`); `claims`
decides them together, since the chance of a false verdict is divided among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sink_jax.paper.aggregate import MISSING, NOTHING, Aggregate, aggregate
from sink_jax.paper.cells import TrialStatistics
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, metric_summary, window_size
from sink_jax.paper.parts import Part, unjudged
from sink_jax.paper.spread import Spread
from sink_jax.report.markup import upper
from sink_jax.report.records import RunRecord

SINK, NO_SINK = 10, 5  # percent of heads: from where there is a sink, below which there is none
MASSIVE = 2  # hidden norm ratio from which activations are massive
POINTS = 2  # points of Sink_k that are a difference
NATS = 0.1  # of loss that are a difference
NOISE = 1.0  # points that an ordered row may go the other way
# Rates that are all near 100 % have reached a ceiling: what orders them is noise.
_FULL = 95  # percent
OPEN_SINK = 'it is undecided'  # how the doubt begins that further seeds may remove


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What runs say to a check: the parts to decide, in words and with the numbers of its trials.

  reason: why the check cannot hold whatever its parts say, short enough to group claims by; '' if
  it can. One part decided against it is enough all the same.
  """

  words: str
  parts: Sequence[Part]
  numbers: tuple[TrialStatistics, ...]
  reason: str = ''


class Check:
  """What is asked of runs of `trials`; `evidence` has what answers it."""

  trials: tuple[str, ...]

  @property
  def asked(self) -> tuple[str, ...]:
    """Every trial that the answer hangs on."""
    return self.trials

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    """What the runs of a group say. spread: None takes means for the truth."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Every(Check):
  """A metric of each trial is at least, or below, a level.

  some: this many measured trials are enough, though others are still to come. sinks: only
  trials that have a sink on the first token count. exact: what is asked is an identity of the
  architecture, which no seed changes, so that one run shows it.
  """

  metric: str
  trials: tuple[str, ...]
  at_least: float | None = None
  below: float | None = None
  some: int | None = None
  sinks: bool = False
  exact: bool = False

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    measured = aggregate(group, self.metric, self.trials)
    sinks = {trial: _has_sink(group, trial, spread) for trial in measured.summaries
             } if self.sinks else {}
    measured = measured.without({trial: 'no sink' for trial, has in sinks.items() if has is False})
    above = self.below is None
    level = self.at_least if self.below is None else self.below
    assert level is not None, 'a check needs at_least or below'
    levels = {trial: known_level(self.metric, level, group.done(trial))
              for trial in measured.summaries}
    parts = [measured.part(
        (trial,), METRICS[self.metric].scaled(least), above, not above, self.exact,
        f'{OPEN_SINK} whether {trial} has a sink' if sinks.get(trial, True) is None else '')
             for trial, least in levels.items()]
    # A counterexample decides at once; that all hold is known when none is missing.
    if self.some:
      return _evidence(measured, parts, measured.lacking if len(parts) < self.some else '')
    return _evidence(measured, parts, measured.incomplete(1))


@dataclasses.dataclass(frozen=True)
class Ordered(Check):
  """A metric falls, or rises, along trials, by a margin in all.

  margin: on the scale of the metric, so that of a ratio it is the logarithm of a factor. ends: only
  the first and the last that are measured count.
  """

  metric: str
  trials: tuple[str, ...]
  margin: float
  falls: bool = True
  ends: bool = False

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    measured = aggregate(group, self.metric, self.trials)
    # An order is a matter of all its trials: one that is missing may stand anywhere in it.
    if measured.pending or len(measured.summaries) < 2:
      return _evidence(measured, (), measured.lacking)
    means, rate = measured.summaries, METRICS[self.metric].unit == 'percent'
    if rate and min(summary.mean for summary in means.values()) >= _FULL:
      return _evidence(measured, (), f'all rates are {_FULL} % or more, which leaves no room for '
                       'an order', ': no room for an order')
    known, noise = list(means), NOISE if rate else 0.05 * self.margin
    steps = [] if self.ends or len(known) == 2 else [
        (a, b, -noise, False) for a, b in zip(known, known[1:])]
    # Also with a margin of 0 the ends must differ: equal values are no order.
    steps.append((known[0], known[-1], self.margin, not self.margin))
    return _evidence(measured, [
        measured.part((a, b) if self.falls else (b, a), least, True, strict)
        for a, b, least, strict in steps], measured.incomplete(2))


@dataclasses.dataclass(frozen=True)
class Near(Check):
  """A metric of each trial lies within a margin of the default run's."""

  metric: str
  trials: tuple[str, ...]
  margin: float

  @property
  def asked(self) -> tuple[str, ...]:
    return ('default', *self.trials)

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    return _within(aggregate(group, self.metric, self.asked), self.margin, True)


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

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    numbers, parts, words, waiting = [], [], [], False
    for trial in self.trials:
      runs = group.runs(trial)
      states = {run.status for run in runs}
      words.append(f'{trial} ({group.status(trial)})')
      if summary := metric_summary('converges', runs):
        numbers.append(TrialStatistics(trial, 'converges', summary.statistics()))
        parts.append(unjudged('converges', (trial,), summary.by_seed, 0.5, not self.diverges))
      # A seed under way may still end either way; a trial that the budget leaves out never does.
      waiting = waiting or states != {'not expressible'} and not (
          states and states <= {'done', 'diverged'})
    ends = Evidence(f'runs: {", ".join(words)}', parts, tuple(numbers),
                    MISSING if waiting else '' if parts else NOTHING)
    # The loss of a run that diverged is no number: how it ended says all.
    if self.within is None or not all(part.fits for part in parts):
      return ends
    losses = _within(aggregate(group, 'valid_loss', self.asked), self.within, False)
    return Evidence('. '.join(filter(None, (ends.words, upper(losses.words)))),
                    [*parts, *losses.parts], ends.numbers + losses.numbers,
                    ends.reason or losses.reason)


@dataclasses.dataclass(frozen=True)
class Onset(Check):
  """A sink in the largest window and none in the smallest, of those that could show one."""

  trials: tuple[str, ...]

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    measured = aggregate(group, 'sink_1', self.trials)
    if measured.pending:
      return _evidence(measured, (), measured.lacking)
    sizes: dict[str, int] = {}
    for trial in measured.summaries:
      run = group.done(trial)[0]
      size, probe = window_size(run), run.known_setup.experiment.probe
      # The mean weight of a key over the probe is at most the share of queries that see it.
      if size is not None and size > probe.epsilon * probe.length:
        sizes[trial] = size
    # A single window has no smaller one to compare it with.
    if len(set(sizes.values())) < 2:
      return _evidence(measured, (), 'windows are too small to show a sink',
                       f': {len(sizes)} of the windows can show a sink at all')
    small, large = min(sizes, key=lambda t: sizes[t]), max(sizes, key=lambda t: sizes[t])
    sink = known_level('sink_1', SINK, group.done(large))
    return _evidence(measured, [measured.part((small,), NO_SINK, False, True),
                                measured.part((large,), sink, True)], '',
                     f': smallest {sizes[small]}, largest {sizes[large]} tokens')


def known_level(metric: str, level: float, runs: Sequence[RunRecord]) -> float:
  """The level, or what the metric is in these models before training, where that is more.

  The latter is the 99th percentile of rows of probes that have one. It raises the levels of a sink
  and of massive activations, not those below which there is none.
  """
  key = METRICS[metric].null
  if level not in (SINK, MASSIVE) or not key:
    return level
  return max([level, *(run.probe.nulls[key] for run in runs if run.probe and key in
                       run.probe.nulls)])


def _within(measured: Aggregate, limit: float, either_side: bool) -> Evidence:
  """Whether no mean is above the default's by more than a limit; with either_side, nor below."""
  if 'default' not in measured.summaries or len(measured.summaries) < 2:
    return _evidence(measured, (), measured.lacking)
  sides = ((limit, False), (-limit, True)) if either_side else ((limit, False),)
  return _evidence(measured, [measured.part((trial, 'default'), end, above)
                              for trial in measured.summaries if trial != 'default'
                              for end, above in sides], measured.incomplete(2))


def _evidence(measured: Aggregate, parts: Sequence[Part | None], reason: str, words: str = ''
              ) -> Evidence:
  """words: behind those of the aggregate."""
  found = [part for part in parts if part]
  return Evidence(measured.words + words, found, measured.numbers, reason or (
      'no seed is common to the trials' if len(found) < len(parts) else ''))


def _has_sink(group: Group, trial: str, spread: Spread | None) -> bool | None:
  """Whether a trial has a sink on the first token; None where that is undecided."""
  sink = metric_summary('sink_1', group.done(trial))
  if sink is None:
    return False
  least = known_level('sink_1', SINK, group.done(trial))
  return unjudged('sink_1', (trial,), sink.by_seed, least, True).judge(spread, 1).held
