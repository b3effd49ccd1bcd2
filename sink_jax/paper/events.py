"""The order of events in training: values drain, a sink forms, activations become massive.

Each event is the probed step from which a quantity stays on its side of a level up to the last
probe (`evaluate.sinks.emergence_step`), so that it is known to the distance between probes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from sink_jax.evaluate.activations import BEYOND
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.paper.collect import Group
from sink_jax.paper.criteria import MASSIVE, SINK, known_level
from sink_jax.paper.metrics import METRICS
from sink_jax.paper.pictures import Picture, Points, course, seed_panel
from sink_jax.report.markup import listed
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
_ENTRIES = 'entries'  # no event, but drawn beside them
_SINKS = {'sink_1': course('probe', 'sink_1'), 'sink_star': course('probe', 'sink_extra_key')}
_POINTS: dict[str, Points] = {
    DRAIN: course('probe', 'value_ratio'), MASSIVES: course('probe', 'hidden_ratio'),
    _ENTRIES: course('probe', 'max_over_median'),
    SINKS: lambda run: _SINKS[TRIALS[run.label.trial]](run)}


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


@dataclasses.dataclass(frozen=True)
class EventOrder:
  """The order of events in the runs of a group."""

  trials: Sequence[TrialEvents]
  picture: Picture


def event_orders(groups: Iterable[Group]) -> list[EventOrder]:
  """The order of events of every group in which one of the trials is done."""
  orders = []
  for group in groups:
    runs = {trial: of for trial in TRIALS
            if (of := [run for run in group.done(trial) if run.probe])}
    if runs:
      trials = [_trial_events(trial, of) for trial, of in runs.items()]
      orders.append(EventOrder(trials, _picture(group, runs, trials)))
  return orders


def _trial_events(trial: str, runs: Sequence[RunRecord]) -> TrialEvents:
  sink = TRIALS[trial]
  # As the judge has them: the null of any model of the trial raises the level of all.
  levels = {DRAIN: DRAINED, SINKS: known_level(sink, SINK, runs),
            MASSIVES: known_level('massive', MASSIVE, runs)}
  events = [Event(name, level, {run.name: step_of(points, level, falls=name == DRAIN)
                                for run in runs if (points := _POINTS[name](run))})
            for name, level in levels.items()]
  return TrialEvents(trial, sink, [run.name for run in runs], events, words(events, len(runs)),
                     order(events, len(runs)))


def step_of(points: Sequence[tuple[float, float]], level: float, falls: bool = False
            ) -> int | None:
  """The step from which values stay at or beyond a level; None where they never stay.

  points: (step, value). falls: at or below the level.
  """
  sign = -1 if falls else 1
  return emergence_step([int(step) for step, _ in points], [sign * value for _, value in points],
                        sign * level)


def words(events: Sequence[Event], seeds: int) -> str:
  """'value drain at step 300 and 350; sink at step 500 and 600; ...': the events of seeds."""
  parts = []
  for event in events:
    steps, measured = [step for step in event.steps.values() if step is not None], len(event.steps)
    if steps:
      some = '' if len(steps) == measured else f' in {len(steps)} of {measured} seeds,'
      part = f'{event.name}{some} at step {listed([f"{step:,}" for step in steps])}'
    elif measured:
      part = f'no {event.name}' + (f' in any of {measured} seeds' if measured > 1 else '')
    else:
      part = f'{event.name} not measured'
    missing = f' (not measured in {seeds - measured})' if 0 < measured < seeds else ''
    parts.append(part + missing)
  return '; '.join(parts)


def order(events: Sequence[Event], seeds: int) -> str:
  """The order of the events that all seeds have, in words; '' where there are fewer than two.

  What holds before any training is no event of training, and has no place in the order.
  """
  steps = {event.name: [*filter(None, event.steps.values())] for event in events}
  common = {name: of for name, of in steps.items() if len(of) == seeds}
  if len(common) < 2:
    return ''
  orders = {_in_order({name: of[i] for name, of in common.items()}) for i in range(seeds)}
  if len(orders) > 1:
    return f'The {seeds} seeds do not agree on the order of {listed(list(common))}.'
  of = 'in the one seed' if seeds == 1 else f'in all {seeds} seeds'
  return f'The order {of}: {orders.pop()}.'


def _in_order(steps: Mapping[str, int]) -> str:
  """'value drain, then sink and massive activations': those at one step go together."""
  together = [[name for name, _ in same] for _, same in groupby(
      sorted(steps.items(), key=itemgetter(1)), itemgetter(1))]
  return ', then '.join(listed(names) + (' (at one probe)' if len(names) > 1 else '')
                        for names in together)


def _picture(group: Group, runs: Mapping[str, Sequence[RunRecord]], trials: Sequence[TrialEvents]
             ) -> Picture:
  sinks = ' or '.join(dict.fromkeys(METRICS[of.sink].name for of in trials))
  panels = []
  for name, title, y in (
      (SINKS, 'Sink', f'{sinks} in % of heads'),
      (DRAIN, 'Values of the first token', 'smallest value ratio of a block'),
      (MASSIVES, 'Norms of the first token', 'largest hidden norm ratio of a block'),
      (_ENTRIES, 'Entries of hidden states', 'largest over median entry')):
    levels = {event.level for of in trials for event in of.events if event.name == name}
    # Ratios have logarithmic axes: halves and doubles are equally far from 1.
    panels.append(seed_panel(title, y, runs, _POINTS[name], levels=sorted(levels or BEYOND[:1]),
                             log='' if name == SINKS else 'y'))
  return Picture(f'events-{group.key}.png', group.name, budget=group.budget,
                 protocol=group.protocol, across=2,
                 panels=[panel for panel in panels if panel.series])
