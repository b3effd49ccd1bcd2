"""Where each remedy stands on each axis of a task, by its seeds beside those of softmax.

Differences are paired by seed. Their variance is joined with that of the other variants of the
task, as verdicts on the paper's claims do it (`paper.spread`); the chances of the variants of a
task are corrected by Holm's method, axis by axis.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from sink_jax.paper.collect import Group, seed_and_name
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.spread import CONFIDENCE, MIN_SEEDS, Spread, spread_of
from sink_jax.remedies.axes import AXES, EXTRA_KEY, Axis, null_level
from sink_jax.remedies.trials import SOFTMAX
from sink_jax.report.records import RunRecord

TASKS = {'trigger': 'Trigger averaging', 'bigram': 'Bigram-Backcopy', 'desk': 'text (desk)'}
_DEFAULT = 'default'  # what a group calls the trial that the others are changes of
_EQUIVALENT = 0.90  # two one-sided tests at 5 % each: the whole interval lies inside the margin
REMOVES, MOVES, SAME = 'removes', 'moves to the extra key', 'no difference'
UNDECIDED, NO_BASELINE, NOT_JUDGED = 'undecided', 'baseline has none', 'cannot be judged'
_TRIAL = re.compile(rf'({"|".join(TASKS)})-(.+)')
_DESK = 'desk'
# What a remedy may change. Runs that differ in anything else, as in their data, their number of
# steps or how they are probed, are not paired: the difference would be of that as well.
_VARIED = ('attention.', 'model.norm', 'model.init', 'model.linear', 'model.sink_tokens',
           'optimizer.rule')
# Trials of the paper at that budget are variants as well, and need not be trained twice.
_OF_THE_PAPER = {_DEFAULT: SOFTMAX, **{name: name for name in (
    'k-bias', 'kv-bias', 'v-bias', 'sink-token', 'sigmoid', 'sigmoid-normalized')}}
Pair = tuple[tuple[str, str], Sequence[float]]  # two trials, and their differences seed by seed


@dataclasses.dataclass(frozen=True)
class Standing:
  """A variant on an axis of a task.

  Attributes:
    values: {seed: on the scale of the metric}; of two trials that are compared (`grafts`), their
      differences.
    difference: mean difference from softmax over the seeds that both have, on that scale.
    low, high: the ends of its interval; None where no spread is known.
    n: seeds that both have.
    verdict: one of the constants of this module, or the axis' words for less and more.
    reason: why there is none, or in what it differs; '' otherwise.
  """

  axis: Axis
  values: Mapping[int, float]
  difference: float | None
  low: float | None
  high: float | None
  n: int
  verdict: str
  reason: str = ''


@dataclasses.dataclass(frozen=True)
class Variant:
  """A remedy on a task: its runs, and its standing on every axis, by the key of the axis."""

  name: str
  runs: tuple[RunRecord, ...]
  status: str
  standings: Mapping[str, Standing]


@dataclasses.dataclass(frozen=True)
class Task:
  """A task: softmax and the other variants, the axes that softmax leaves open, the power.

  Attributes:
    closed: {axis: why softmax has nothing there to remedy}.
    power: {axis: the smallest difference that the usual number of seeds can show}, on the scale of
      the metric; None where no spread is known.
  """

  key: str
  softmax: Variant
  variants: tuple[Variant, ...]
  closed: Mapping[str, str]
  power: Mapping[str, float | None]

  @property
  def words(self) -> str:
    return TASKS[self.key]

  @property
  def open_axes(self) -> list[Axis]:
    """The axes on which softmax has something to remedy."""
    return [axis for axis in AXES if axis.key not in self.closed]


def groups(runs: Iterable[RunRecord]) -> list[Group]:
  """The runs of configs/remedies.py by task; variants under their names, softmax as the default.

  Raises:
    ValueError: there is none; with the command that makes them.
  """
  tasks: dict[str, dict[str, list[RunRecord]]] = {}
  for run in runs:
    if named := _named(run):
      task, variant = named
      name = _DEFAULT if variant == SOFTMAX else variant
      tasks.setdefault(task, {}).setdefault(name, []).append(run)
  if not tasks:
    raise ValueError('no run of configs/remedies.py is there. To train them: python -m '
                     'sink_jax.sweep --config=configs/remedies.py --seeds=0,1,2,3,4 '
                     '--workdir=runs/remedies')
  return [Group(key, '', {name: tuple(sorted(members, key=seed_and_name))
                          for name, members in tasks[key].items()}, _VARIED)
          for key in TASKS if key in tasks]


def _named(run: RunRecord) -> tuple[str, str] | None:
  """(task, variant) of a run; None for any that is no part of the leaderboard."""
  label = run.label
  match = _TRIAL.fullmatch(label.trial)
  if match is None:
    of_the_paper = (label.budget, label.protocol) == (_DESK, 'paper')
    variant = _OF_THE_PAPER.get(label.trial) if of_the_paper else None
    return (_DESK, variant) if variant else None
  # A budget that a person changed, such as 'desk with steps=50', is another one.
  return (match[1], match[2]) if label.budget == (_DESK if match[1] == _DESK else '') else None


def task_of(group: Group) -> Task:
  """The standings of a task's variants."""
  spread, softmax = _spread_of_alike(group), group.done(_DEFAULT)
  closed = {axis.key: why for axis in AXES if (why := _closed(axis, group, spread))}
  names = [name for name in group.trials if name != _DEFAULT]
  standings: dict[str, dict[str, Standing]] = {name: {} for name in names}
  for axis in AXES:
    found = {name: _measured(axis, name, group, spread, closed.get(axis.key, ''))
             for name in names}
    for name, standing in _decided(axis, found, group, spread, softmax).items():
      standings[name][axis.key] = standing
  make = lambda name, own: Variant(SOFTMAX if name == _DEFAULT else name, group.runs(name),
                                   group.status(name), own)
  power = {axis.key: _power(axis, group, spread) for axis in AXES}
  return Task(group.budget, make(_DEFAULT, {axis.key: _of_softmax(axis, softmax) for axis in AXES}),
              tuple(make(name, standings[name]) for name in names), closed, power)


def _spread_of_alike(group: Group) -> Spread:
  """The spread within trials that can be compared: what others spread by is no measure of it."""
  return spread_of(dataclasses.replace(group, trials={
      name: runs for name, runs in group.trials.items() if name not in group.incomparable}))


def values_of(axis: Axis, runs: Sequence[RunRecord]) -> dict[int, float]:
  """{seed: on the scale of the metric} of the runs that have it."""
  summary = metric_summary(axis.metric, runs)
  return dict(summary.by_seed) if summary else {}


def _of_softmax(axis: Axis, runs: Sequence[RunRecord]) -> Standing:
  values = values_of(axis, runs)
  return Standing(axis, values, None, None, None, len(values), '')


def _closed(axis: Axis, group: Group, spread: Spread) -> str:
  """Why nothing can be remedied on an axis; '' where softmax has it beyond its null."""
  if strange := group.incomparable.get(_DEFAULT):
    return f'of softmax, {strange}'
  if axis.present is None:
    return ''
  softmax = group.done(_DEFAULT)
  values = list(values_of(axis, softmax).values())
  if len(values) < MIN_SEEDS:
    return f'softmax has {len(values)} of {MIN_SEEDS} seeds'
  metric = METRICS[axis.metric]
  level = metric.scaled(max(axis.present, null_level(axis, softmax)))
  interval = spread.interval(axis.metric, (_DEFAULT,), values)
  if interval.below(level) if axis.small else interval.above(level):
    return ''
  mean = statistics.fmean(values)
  if (mean < level) if axis.small else (mean > level):
    return f'whether softmax lies beyond {metric.text(metric.unscaled(level))} is undecided'
  return NO_BASELINE


def _measured(axis: Axis, name: str, group: Group, spread: Spread, closed: str) -> Standing:
  """The difference from softmax with its interval, and why it gets no verdict, if it gets none."""
  mine, its = (values_of(axis, group.done(trial)) for trial in (name, _DEFAULT))
  seeds = sorted(mine.keys() & its.keys())
  diverged = sum(run.status == 'diverged' for run in group.runs(name))
  if strange := group.incomparable.get(name):
    return Standing(axis, mine, None, None, None, 0, NOT_JUDGED, strange)
  if _DEFAULT in group.incomparable:  # what is closed says in what its runs differ
    return Standing(axis, mine, None, None, None, 0, NOT_JUDGED, closed)
  if diverged:
    return Standing(axis, mine, None, None, None, len(seeds), NOT_JUDGED,
                    f'{diverged} of {len(group.runs(name))} runs diverged')
  if not seeds:
    return Standing(axis, mine, None, None, None, 0, NOT_JUDGED, group.status(name))
  differences = [mine[seed] - its[seed] for seed in seeds]
  interval = spread.interval(axis.metric, (_DEFAULT, name), differences)
  verdict, reason = UNDECIDED, ''
  if closed:
    verdict, reason = (closed if closed == NO_BASELINE else NOT_JUDGED), closed
  elif len(seeds) < MIN_SEEDS:
    verdict, reason = NOT_JUDGED, f'{len(seeds)} of {MIN_SEEDS} seeds'
  return Standing(axis, mine, interval.mean, interval.low, interval.high, len(seeds), verdict,
                  reason)


def _decided(axis: Axis, found: Mapping[str, Standing], group: Group, spread: Spread,
             softmax: Sequence[RunRecord]) -> dict[str, Standing]:
  """The same with verdicts; Holm's method keeps the chance of a false one over the variants."""
  its = values_of(axis, softmax)
  pairs = {name: ((_DEFAULT, name), [standing.values[seed] - its[seed]
                                     for seed in sorted(standing.values.keys() & its.keys())])
           for name, standing in found.items() if standing.verdict == UNDECIDED}
  decided = dict(found)
  for name, share in holm(axis, pairs, spread).items():
    verdict = (no_effect(axis, pairs[name], spread) if share is None else
               _effect(axis, name, group, spread, softmax, found[name], share))
    decided[name] = dataclasses.replace(found[name], verdict=verdict)
  return decided


def holm(axis: Axis, pairs: Mapping[str, Pair], spread: Spread) -> dict[str, float | None]:
  """Which pairs differ by more than the margin, by Holm's method over all of them.

  Returns:
    {name: the chance of a false verdict that is its share; None where it gets no verdict}.
  """
  chances = {name: _chance_beyond_margin(axis, pair, spread) for name, pair in pairs.items()}
  shares: dict[str, float | None] = {}
  allowed = True
  for rank, name in enumerate(sorted(chances, key=lambda name: chances[name])):
    share = (1 - CONFIDENCE) / (len(chances) - rank)
    # Once a pair is not decided, none with a larger chance is.
    allowed = allowed and chances[name] <= share
    shares[name] = share if allowed else None
  return shares


def _chance_beyond_margin(axis: Axis, pair: Pair, spread: Spread) -> float:
  """The chance of so large a mean difference if the truth were just within the margin."""
  trials, differences = pair
  mean = statistics.fmean(differences)
  if abs(mean) <= axis.margin:
    return 1.0
  edge = axis.margin if mean > 0 else -axis.margin
  return spread.chance(axis.metric, trials, differences, edge)


def _effect(axis: Axis, name: str, group: Group, spread: Spread, softmax: Sequence[RunRecord],
            standing: Standing, share: float) -> str:
  """What a variant does whose difference is beyond the margin."""
  assert standing.difference is not None, 'it has been compared'
  smaller = standing.difference < 0
  words = axis.less if smaller else axis.more
  if axis.absent is None or smaller == axis.small:
    return words
  metric = METRICS[axis.metric]
  level = metric.scaled(max(axis.absent, null_level(axis, softmax)) if not axis.small
                        else axis.absent)
  values = list(standing.values.values())
  mean = statistics.fmean(values)
  beyond = mean > level if axis.small else mean < level
  if not beyond or spread.chance(axis.metric, (name,), values, level) > share:
    return words
  return MOVES if axis.metric == 'sink_1' and moved(name, group, spread, softmax) else REMOVES


def moved(name: str, group: Group, spread: Spread, softmax: Sequence[RunRecord]) -> bool:
  """Does the extra key have what the first token has lost, beyond its null?"""
  summary = metric_summary(EXTRA_KEY, group.done(name))
  if summary is None or len(summary.by_seed) < MIN_SEEDS:
    return False
  axis = AXES[0]
  assert axis.present is not None
  level = max(axis.present, null_level(axis, softmax))
  return spread.interval(EXTRA_KEY, (name,), list(summary.by_seed.values())).above(level)


def no_effect(axis: Axis, pair: Pair, spread: Spread) -> str:
  """'no difference' where the whole interval of two one-sided tests lies within the margin."""
  interval = spread.interval(axis.metric, *pair, confidence=_EQUIVALENT)
  inside = interval.above(-axis.margin) and interval.below(axis.margin)
  return SAME if inside else UNDECIDED


def _power(axis: Axis, group: Group, spread: Spread) -> float | None:
  """The difference that lies as far from the margin as an interval without own spread is wide."""
  n = len(values_of(axis, group.done(_DEFAULT)))
  if n < MIN_SEEDS:
    return None
  others = max(1, len(group.trials) - 1)
  interval = spread.interval(axis.metric, (_DEFAULT, _DEFAULT), [0.0] * n, parts=others)
  return None if interval.high is None else interval.high + axis.margin
