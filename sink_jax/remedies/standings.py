"""Where each remedy stands on each axis of a task, by its seeds beside those of softmax.

Differences are paired by seed. Their variance is joined with that of the other variants of the
task, as verdicts on the paper's claims do it (`paper.spread`); the chances of the variants of a
task are corrected by Holm's method, axis by axis.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sink_jax.paper.collect import Group, grouped
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.spread import CONFIDENCE, MIN_SEEDS, Spread, spread_of
from sink_jax.remedies.axes import AXES, EXTRA_KEY, Axis, null_level
from sink_jax.remedies.trials import SOFTMAX
from sink_jax.report.records import RunRecord

TASKS = {'trigger': 'Trigger averaging', 'bigram': 'Bigram-Backcopy', 'desk': 'text (desk)'}
_DEFAULT = 'default'  # what a group calls the trial that the others are changes of
REMOVES, MOVES, SAME = 'removes', 'moves to the extra key', 'no difference'
UNDECIDED, NO_BASELINE, NOT_JUDGED = 'undecided', 'baseline has none', 'cannot be judged'
_TRIAL = re.compile(rf'({"|".join(TASKS)})-(.+)')
_DESK = 'desk'
# What a remedy may change. Runs that differ in anything else, as in their data, their number of
# steps or how they are probed, are not paired: the difference would be of that as well.
_VARIED = ('attention.', 'model.norm', 'model.init', 'model.linear', 'model.sink_tokens',
           'optimizer.rule')
# Trials of the paper at that budget are variants as well, and need not be trained twice.
_OF_THE_PAPER = (_DEFAULT, 'k-bias', 'kv-bias', 'v-bias', 'sink-token', 'sigmoid',
                 'sigmoid-normalized')


@dataclasses.dataclass(frozen=True)
class Standing:
  """A trial on an axis, beside another one, on the scale of the metric.

  Attributes:
    trials: the other one, of the leaderboard softmax, and the trial itself.
    values: {seed: of the trial}.
    differences: {seed: the trial's minus the other's} of the seeds that both have.
    difference: their mean; None where there is none.
    low, high: the ends of its interval; None where no spread is known.
    verdict: one of the constants of this module, or the axis' words for less and more.
    reason: why there is none, or in what it differs; '' otherwise.
  """

  axis: Axis
  trials: tuple[str, str]
  values: Mapping[int, float]
  differences: Mapping[int, float] = dataclasses.field(default_factory=dict)
  difference: float | None = None
  low: float | None = None
  high: float | None = None
  verdict: str = ''
  reason: str = ''

  def text(self) -> str:
    """The difference with its interval and number of seeds; without a difference the reason."""
    if self.difference is None:
      return self.reason
    words, of = self.axis.text(self.difference), self.axis.text
    if self.low is None or self.high is None:
      return words
    return f'{words} ({of(self.low)} to {of(self.high)}, n = {len(self.differences)})'


@dataclasses.dataclass(frozen=True)
class Variant:
  """A remedy on a task: its runs, and its standing on every axis, by the key of the axis."""

  name: str
  runs: Sequence[RunRecord]
  status: str
  standings: Mapping[str, Standing]

  @property
  def done(self) -> list[RunRecord]:
    return [run for run in self.runs if run.status == 'done']


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

  def by_verdict(self, axis: Axis) -> dict[str, list[str]]:
    """{verdict: the names of the variants that have it on an axis}."""
    found: dict[str, list[str]] = {}
    for variant in self.variants:
      found.setdefault(variant.standings[axis.key].verdict, []).append(variant.name)
    return found


def groups(runs: Iterable[RunRecord]) -> list[Group]:
  """The runs of configs/remedies.py by task; variants under their names, softmax as the default.

  Raises:
    ValueError: there is none; with the command that makes them.
  """
  tasks = {group.budget: group for group in grouped(runs, _named, _VARIED)}
  if not tasks:
    raise ValueError('no run of configs/remedies.py is there. To train them: python -m '
                     'sink_jax.sweep --config=configs/remedies.py --seeds=0,1,2,3,4 '
                     '--workdir=runs/remedies')
  return [tasks[key] for key in TASKS if key in tasks]


def _named(run: RunRecord) -> tuple[str, str, str] | None:
  """(task, '', variant) of a run; None for any that is no part of the leaderboard."""
  label = run.label
  match = _TRIAL.fullmatch(label.trial)
  if match is None:
    of_the_paper = (label.budget, label.protocol) == (_DESK, 'paper')
    return (_DESK, '', label.trial) if of_the_paper and label.trial in _OF_THE_PAPER else None
  task, variant = match.groups()
  # A budget that a person changed, such as 'desk with steps=50', is another one.
  return (task, '', _DEFAULT if variant == SOFTMAX else variant) if label.budget == (
      _DESK if task == _DESK else '') else None


def task_of(group: Group) -> Task:
  """The standings of a task's variants."""
  spread, softmax = spread_without(group, group.incomparable), group.done(_DEFAULT)
  closed = {axis.key: why for axis in AXES if (why := _closed(axis, group, spread))}
  names = [name for name in group.trials if name != _DEFAULT]
  standings: dict[str, dict[str, Standing]] = {name: {} for name in group.trials}
  for axis in AXES:
    found = decided([_measured(axis, name, group, spread, closed.get(axis.key, ''))
                     for name in names], spread, lambda it, share: _effect(
                         it, share, group, spread, softmax))
    # Softmax beside itself has no difference; its values are shown first.
    for it in (Standing(axis, (_DEFAULT, _DEFAULT), values_of(axis, softmax)), *found):
      standings[it.trials[1]][axis.key] = it
  make = lambda name: Variant(SOFTMAX if name == _DEFAULT else name, group.runs(name),
                              group.status(name), standings[name])
  return Task(group.budget, make(_DEFAULT), tuple(map(make, names)), closed,
              {axis.key: _power(axis, group, spread) for axis in AXES})


def spread_without(group: Group, apart: Collection[str]) -> Spread:
  """The spread within trials that can be compared: what others spread by is no measure of it."""
  return spread_of(dataclasses.replace(group, trials={
      name: runs for name, runs in group.trials.items() if name not in apart}))


def values_of(axis: Axis, runs: Sequence[RunRecord]) -> dict[int, float]:
  """{seed: on the scale of the metric} of the runs that have it."""
  summary = metric_summary(axis.metric, runs)
  return dict(summary.by_seed) if summary else {}


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


def paired(axis: Axis, trials: tuple[str, str], group: Group, spread: Spread,
           alike: bool = True) -> Standing:
  """What the second of two trials differs by from the first, seed by seed, and no verdict yet.

  alike: False where the two cannot be compared, and have no difference.
  """
  its, mine = (values_of(axis, group.done(trial)) for trial in trials)
  differences = {seed: mine[seed] - its[seed] for seed in sorted(mine.keys() & its.keys()) if alike}
  if not differences:
    return Standing(axis, trials, mine)
  it = spread.interval(axis.metric, trials, list(differences.values()))
  return Standing(axis, trials, mine, differences, it.mean, it.low, it.high)


def _measured(axis: Axis, name: str, group: Group, spread: Spread, closed: str) -> Standing:
  """The difference from softmax with its interval: undecided, or why it gets no verdict."""
  gone = sum(run.status == 'diverged' for run in group.runs(name))
  apart = group.incomparable.get(name) or (
      closed if _DEFAULT in group.incomparable else  # which says in what softmax's runs differ
      f'{gone} of {len(group.runs(name))} runs diverged' if gone else '')
  found = paired(axis, (_DEFAULT, name), group, spread, not apart)
  n = len(found.differences)
  few = f'{n} of {MIN_SEEDS} seeds' if n < MIN_SEEDS else ''
  reason = apart or (closed or few if n else group.status(name))
  verdict = (UNDECIDED if not reason else NO_BASELINE if reason == NO_BASELINE else NOT_JUDGED)
  return dataclasses.replace(found, verdict=verdict, reason=reason)


def decided(found: Sequence[Standing], spread: Spread, effect: Callable[[Standing, float], str]
            ) -> list[Standing]:
  """The same with verdicts where they are undecided, by Holm's method over all of them.

  effect: what a difference beyond the margin is called, by the standing and its share of the chance
    of a false verdict.
  """
  chances = {i: _chance_beyond_margin(it, spread) for i, it in enumerate(found)
             if it.verdict == UNDECIDED}
  standings, allowed = list(found), True
  for rank, i in enumerate(sorted(chances, key=lambda i: chances[i])):
    share = (1 - CONFIDENCE) / (len(chances) - rank)
    # Once one is not decided, none with a larger chance is.
    allowed = allowed and chances[i] <= share
    it = found[i]
    verdict = effect(it, share) if allowed else SAME if spread.negligible(
        it.axis.metric, it.trials, list(it.differences.values()), it.axis.margin) else UNDECIDED
    standings[i] = dataclasses.replace(it, verdict=verdict)
  return standings


def _chance_beyond_margin(it: Standing, spread: Spread) -> float:
  """The chance of so large a mean difference if the truth were just within the margin."""
  values = list(it.differences.values())
  mean, margin = statistics.fmean(values), it.axis.margin
  if abs(mean) <= margin:
    return 1.0
  return spread.chance(it.axis.metric, it.trials, values, math.copysign(margin, mean))


def _effect(it: Standing, share: float, group: Group, spread: Spread,
            softmax: Sequence[RunRecord]) -> str:
  """What a variant does whose difference is beyond the margin."""
  axis, name = it.axis, it.trials[1]
  smaller = statistics.fmean(it.differences.values()) < 0
  words = axis.less if smaller else axis.more
  if axis.absent is None or smaller == axis.small:
    return words
  level = METRICS[axis.metric].scaled(
      axis.absent if axis.small else max(axis.absent, null_level(axis, softmax)))
  values = list(it.values.values())
  mean = statistics.fmean(values)
  beyond = mean > level if axis.small else mean < level
  if not beyond or spread.chance(axis.metric, (name,), values, level) > share:
    return words
  return MOVES if axis.metric == 'sink_1' and moved(name, group, spread, softmax) else REMOVES


def moved(name: str, group: Group, spread: Spread, softmax: Sequence[RunRecord]) -> bool:
  """Whether the extra key has what the first token has lost, beyond its null."""
  summary = metric_summary(EXTRA_KEY, group.done(name))
  if summary is None or len(summary.by_seed) < MIN_SEEDS:
    return False
  axis = AXES[0]
  assert axis.present is not None
  level = max(axis.present, null_level(axis, softmax))
  return spread.interval(EXTRA_KEY, (name,), list(summary.by_seed.values())).above(level)


def _power(axis: Axis, group: Group, spread: Spread) -> float | None:
  """The difference that lies as far from the margin as an interval without own spread is wide."""
  n = len(values_of(axis, group.done(_DEFAULT)))
  if n < MIN_SEEDS:
    return None
  others = max(1, len(group.trials) - 1)
  interval = spread.interval(axis.metric, (_DEFAULT, _DEFAULT), [0.0] * n, parts=others)
  return None if interval.high is None else interval.high + axis.margin
