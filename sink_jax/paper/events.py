"""The order of events in training: values drain, a sink forms, activations become massive.

Each event is the probed step from which a quantity stays on its side of a level up to the last
probe (`evaluate.sinks.emergence_step`), so that it is known to the distance between probes alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from sink_jax.evaluate.activations import BEYOND
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.paper.collect import Group
from sink_jax.paper.criteria import MASSIVE, SINK, known_level
from sink_jax.paper.curves import series
from sink_jax.paper.pictures import Panel, Picture, Series
from sink_jax.report.markup import listed, upper
from sink_jax.report.probe_record import Curves
from sink_jax.report.records import RunRecord

# Values of the first token that are half as long as the others': beyond what untrained models vary
# by, whose least ratio is 0.84 to 1.00 in the runs of configs/baseline.py. There all softmax runs
# come to it, with a sink or without; most of sigmoid without normalisation never do.
DRAINED = 0.5
DRAIN, SINKS, MASSIVES = 'value drain', 'sink', 'massive activations'
# The trials, and the sink that each keeps: the first token's, or that of an extra key or token.
TRIALS = {'default': 'sink_1', 'k-bias': 'sink_star', 'sink-token': 'sink_star'}
NOTE = (
    'The step of an event is that of the probe from which on a quantity stays on its side of a '
    'level up to the last probe; step 0 is before any training. Value drain: the smallest value '
    f'ratio of a block is {DRAINED:g} or less. Sink: Sink_1, or Sink_* of trials with an extra key '
    f'or a sink token, is {SINK:g} % or more. Massive activations: the largest hidden norm ratio '
    f'of a block is {MASSIVE:g} or more. Of Sink_1 and the hidden norm ratio the 99th percentile '
    'of untrained models over random positions is the level where it is more. Runs that are done '
    'count. Both ratios are of the first token.')
CAPTION = ('What the events are read from while models trained: means over seeds, each seed as a '
           'thin line, and the levels dotted.')
# The fields of `Curves` that events are read from.
_VALUES, _HIDDEN, _ENTRIES = 'value_ratio', 'hidden_ratio', 'max_over_median'
_SINK_FIELDS = {'sink_1': 'sink_1', 'sink_star': 'sink_extra_key'}


@dataclasses.dataclass(frozen=True)
class Event:
  """When a quantity came to its level to stay.

  steps: {run: the step of the first probe of those that stay; None where it never stays}, of the
  runs in which it was measured.
  """

  name: str
  level: float
  steps: Mapping[str, int | None]


@dataclasses.dataclass(frozen=True)
class TrialEvents:
  """The events of a trial. sink: the metric that its sink is read from. runs: one per seed.

  words: the steps of the events. order: theirs where the seeds have one, or that they disagree.
  """

  trial: str
  sink: str
  runs: Sequence[str]
  events: Sequence[Event]
  words: str
  order: str

  @property
  def sentences(self) -> str:
    return ' '.join(filter(None, [f'{upper(self.words)}.', self.order]))


@dataclasses.dataclass(frozen=True)
class EventOrder:
  """The order of events in the runs of a group."""

  trials: Sequence[TrialEvents]
  picture: Picture


def event_orders(groups: Iterable[Group]) -> list[EventOrder]:
  """The order of events of every group in which one of the trials is done."""
  orders = []
  for group in groups:
    trials = [trial_events(trial, runs) for trial in TRIALS
              if (runs := [run for run in group.done(trial) if run.probe])]
    if trials:
      orders.append(EventOrder(trials, _picture(group, trials)))
  return orders


def trial_events(trial: str, runs: Sequence[RunRecord]) -> TrialEvents:
  """The events of the seeds of a trial. runs: at least one, all probed."""
  sink = TRIALS[trial]
  # As the judge has them: the null of any model of the trial raises the level of all.
  least_sink, massive = known_level(sink, SINK, runs), known_level('massive', MASSIVE, runs)
  events = [Event(DRAIN, DRAINED, _steps(runs, _VALUES, DRAINED, falls=True)),
            Event(SINKS, least_sink, _steps(runs, _SINK_FIELDS[sink], least_sink)),
            Event(MASSIVES, massive, _steps(runs, _HIDDEN, massive))]
  return TrialEvents(trial, sink, [run.name for run in runs], events, words(events, len(runs)),
                     order(events, len(runs)))


def step_of(curves: Curves, course: str, level: float, falls: bool = False) -> int | None:
  """The step from which a course stays at or beyond a level; None where it never stays.

  course: a field of the curves. falls: at or below the level. Probes without a number are left out.
  """
  known = [(step, value) for step, value in zip(curves.step, getattr(curves, course))
           if value is not None]
  sign = -1 if falls else 1
  return emergence_step([step for step, _ in known], [sign * value for _, value in known],
                        sign * level)


def words(events: Sequence[Event], seeds: int) -> str:
  """'value drain at step 300 and 350; sink at step 500 and 600; ...': the events of seeds."""
  return '; '.join(_words(event, seeds) for event in events)


def order(events: Sequence[Event], seeds: int) -> str:
  """The order of the events that all seeds have, in words; '' where there are fewer than two.

  What holds before any training is no event of training, and has no place in the order.
  """
  common = {event.name: list(event.steps.values()) for event in events
            if len(event.steps) == seeds and all(event.steps.values())}
  if len(common) < 2:
    return ''
  orders = {_names_in_order({name: steps[i] for name, steps in common.items()})
            for i in range(seeds)}
  if len(orders) > 1:
    return f'The {seeds} seeds do not agree on the order of {listed(list(common))}.'
  of = 'in the one seed' if seeds == 1 else f'in all {seeds} seeds'
  return f'The order {of}: {orders.pop()}.'


def _steps(runs: Sequence[RunRecord], course: str, level: float, falls: bool = False
           ) -> dict[str, int | None]:
  """{run: its step}, of the runs in which the quantity was measured."""
  return {run.name: step_of(run.probe.curves, course, level, falls) for run in runs
          if run.probe and any(value is not None for value in getattr(run.probe.curves, course))}


def _names_in_order(steps: dict[str, int | None]) -> str:
  """'value drain, then sink and massive activations': those at one step go together."""
  by_step: dict[int, list[str]] = {}
  for name, step in sorted(steps.items(), key=lambda item: item[1] or 0):
    by_step.setdefault(step or 0, []).append(name)
  return ', then '.join(listed(names) + (' (at one probe)' if len(names) > 1 else '')
                        for names in by_step.values())


def _words(event: Event, seeds: int) -> str:
  measured, steps = len(event.steps), [step for step in event.steps.values() if step is not None]
  if not measured:
    return f'{event.name} not measured'
  missing = '' if measured == seeds else f' (not measured in {seeds - measured})'
  if not steps:
    return f'no {event.name}' + (f' in any of {measured} seeds' if measured > 1 else '') + missing
  at = listed([f'{step:,}' for step in steps])
  if len(steps) == measured:
    return f'{event.name} at step {at}{missing}'
  return f'{event.name} in {len(steps)} of {measured} seeds, at step {at}{missing}'


def _picture(group: Group, trials: Sequence[TrialEvents]) -> Picture:
  runs = [[run for run in group.done(of.trial) if run.name in of.runs] for of in trials]
  levels = {name: sorted({event.level for of in trials for event in of.events
                          if event.name == name}) for name in (DRAIN, SINKS, MASSIVES)}
  sinks = ' or '.join({'sink_1': 'Sink_1', 'sink_star': 'Sink_*'}[sink]
                      for sink in dict.fromkeys(of.sink for of in trials))
  # Ratios have logarithmic axes: halves and doubles are equally far from 1.
  kinds = [('Sink', f'{sinks} in % of heads', '', levels[SINKS], ''),
           ('Values of the first token', 'smallest value ratio of a block', 'y', levels[DRAIN],
            _VALUES),
           ('Norms of the first token', 'largest hidden norm ratio of a block', 'y',
            levels[MASSIVES], _HIDDEN),
           ('Entries of hidden states', 'largest over median entry', 'y', BEYOND[:1], _ENTRIES)]
  panels = []
  for title, y, log, level, course in kinds:
    means: list[Series] = []
    seeds: list[Series] = []
    for trial, members in zip(trials, runs):
      points = functools.partial(_points, course or _SINK_FIELDS[trial.sink])
      # Older runs have not measured some of the quantities.
      each = [(run, seed) for run in members if (seed := series(trial.trial, [run], points))]
      if mean := series(trial.trial, [run for run, _ in each], points):
        means.append(mean)
        seeds += [seed for _, seed in each]
    if means:
      panels.append(Panel(title, 'step', y, means, log=log, seeds=seeds, levels=level))
  return Picture(f'events-{group.key}.png', group.name, panels=panels, across=2,
                 budget=group.budget, protocol=group.protocol)


def _points(course: str, run: RunRecord) -> list[tuple[int, float | None]]:
  return list(zip(run.probe.curves.step, getattr(run.probe.curves, course))) if run.probe else []
