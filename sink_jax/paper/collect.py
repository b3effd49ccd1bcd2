"""Runs grouped by budget, protocol and trial; how far each is, and which can be compared."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from sink_jax.paper import numbers
from sink_jax.paper.budgets import BUDGETS
from sink_jax.report.records import RunRecord, differing_settings
from sink_jax.train.config import where_keys

SYNTHETIC = 'synthetic-'  # the trials of the synthetic task, which the paper does not have
_UNDER_WAY = ('running', 'interrupted')
# Settings that may differ between runs that are averaged: they change where, in what order and how
# exactly a step is computed, not what it means.
FREE = ('seed', 'microbatches', *where_keys())
_SHAPE = ('model.size', 'model.layers', 'model.d_model', 'model.heads')
# Settings that all trials of a group share with its default run, but those that a trial is about.
_SHARED = ('data.source', 'data.valid_source', 'data.tokenizer', 'data.context',
           'batch_size', 'probe.sequences', 'probe.length', 'probe.epsilon', 'probe.dtype', *_SHAPE)
_SWEPT = {'batch-': ('batch_size',), 'heads-': ('model.heads',), 'layers-': ('model.layers',),
          '1b-': _SHAPE}


@dataclasses.dataclass(frozen=True)
class Group:
  """The runs of one budget and protocol: {trial: its runs, one per seed}.

  varied: the settings, or the sections of them ('attention.'), that trials are about, where all
  others have to be the default's; () for the paper's trials, which share what `_SHARED` lists.
  """

  budget: str
  protocol: str
  trials: Mapping[str, Sequence[RunRecord]]
  varied: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    """'smoke budget, paper protocol', or 'synthetic axis'."""
    return f'{self.budget} budget, {self.protocol} protocol' if self.protocol else (
        f'{self.budget} axis')

  @property
  def key(self) -> str:
    """Of file names: no two groups have the same, whatever their labels are."""
    words = [re.sub(r'[^a-z0-9]+', '-', part.lower()) for part in (self.budget, self.protocol)]
    # A label is any text that a person gave; what is no plain file name gets a hash of the label.
    if words == [self.budget, self.protocol] and '-' not in ''.join(words):
      return '-'.join(words)
    mark = hashlib.sha256(repr((self.budget, self.protocol)).encode()).hexdigest()[:8]
    return '-'.join([*(word[:40].strip('-') for word in words), mark]).lstrip('-')

  @property
  def rules(self) -> str:
    """The budget whose rules apply: 'smoke' of 'smoke with steps=50'."""
    return (self.budget.split() or [''])[0]

  def runs(self, trial: str) -> Sequence[RunRecord]:
    """All runs of a trial, whatever their status; none of a trial that is not there."""
    return self.trials.get(trial, ())

  def readable(self, trial: str) -> list[RunRecord]:
    """The runs whose config is known."""
    return [run for run in self.runs(trial) if run.readable]

  def done(self, trial: str) -> list[RunRecord]:
    """The runs that reached their last step."""
    return [run for run in self.runs(trial) if run.status == 'done']

  def measured(self, trial: str) -> list[RunRecord]:
    """The runs to show a trial by: those that are done, else those under way."""
    # Never both: a mean over runs of unequal length says nothing.
    return self.done(trial) or [run for run in self.runs(trial) if run.status in _UNDER_WAY]

  @functools.cached_property
  def incomparable(self) -> dict[str, str]:
    """Trials that differ from the default run in more than they are about, and in what.

    Also those whose own runs differ in more than their seeds: a mean over them is of nothing.
    """
    # The default run is what every other trial is a change of. One that is done comes first; one
    # under way has its config as well, and that suffices.
    defaults = sorted(self.readable('default'), key=lambda run: run.status != 'done')
    if not defaults:
      return {}
    strange = {}
    for trial in self.trials:
      words = [difference for run in self.readable(trial)
               for difference in unlike(trial, run, defaults[0], self.varied)]
      if own := self.differing(trial):
        words.append(f'its runs differ in {own}')
      if words:
        strange[trial] = ', '.join(dict.fromkeys(words))
    return strange

  def differing(self, trial: str) -> str:
    """The settings in which runs of a trial differ, but for those that make no difference."""
    known = self.readable(trial)
    _, different = differing_settings(known)
    keys = {key for settings in different.values() for key in settings} - set(FREE)
    contents = {run.text.content for run in known if run.text and run.text.content}
    return ', '.join(sorted(keys) + (['the content of their data'] if len(contents) > 1 else []))

  def same_as_default(self, trial: str) -> bool:
    """Whether a trial has the settings of the default, as fixed-1 where budgets fix token 1."""
    runs, defaults = self.readable(trial), self.readable('default')
    if trial == 'default' or not runs or not defaults:
      return False
    mine, its = runs[0].known_setup.settings, defaults[0].known_setup.settings
    return all(mine.get(key) == its.get(key) for key in {**mine, **its} if key not in FREE)

  def not_done(self, trial: str) -> str:
    """The runs of a trial that are not done, in words; '' if all are."""
    return self._statuses([run for run in self.runs(trial) if run.status != 'done'], True)

  def status(self, trial: str) -> str:
    """How far a trial is, in words."""
    runs = self.runs(trial)
    return self._statuses(runs, len(runs) > 1) if runs else 'not run'

  def _statuses(self, runs: Iterable[RunRecord], several: bool) -> str:
    """The statuses of runs, each with its seeds where there are several."""
    seeds: dict[str, list[int | None]] = {}
    for run in runs:
      seeds.setdefault(self._status(run), []).append(run.setup.seed if run.setup else None)
    listed = lambda seeds: '' if None in seeds else (
        f', seed{"s" if len(seeds) > 1 else ""} {", ".join(map(str, sorted(seeds)))}')
    return '; '.join(words + (listed(of) if several else '') for words, of in seeds.items())

  def _status(self, run: RunRecord) -> str:
    if run.status == 'done' and self.budget:
      return f'done at {self.budget}'
    if run.status in (*_UNDER_WAY, 'diverged'):
      of = f' of {run.setup.steps:,}' if run.setup else ''
      return f'{run.status} (step {run.step:,}{of})'
    if run.status in ('failed', 'not expressible', 'unreadable'):
      return f'{run.status} ({run.reason or run.error or "for an unknown reason"})'
    return run.status


def is_of_the_paper(run: RunRecord) -> bool:
  """Whether it is a run of one of the paper's trials, at a budget."""
  return bool(run.label.budget) and run.label.trial in numbers.TRIALS


def is_synthetic(run: RunRecord) -> bool:
  """Whether it is a run of a trial of the synthetic axis."""
  return run.label.trial.startswith(SYNTHETIC)


def grouped(runs: Iterable[RunRecord],
            label: Callable[[RunRecord], tuple[str, str, str] | None],
            varied: tuple[str, ...] = ()) -> list[Group]:
  """The runs that have a label, which is their budget, protocol and trial, in groups."""
  found: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
  for run in runs:
    if named := label(run):
      budget, protocol, trial = named
      found.setdefault((budget, protocol), {}).setdefault(trial, []).append(run)
  return [Group(*of, {trial: sorted(members, key=seed_and_name)
                      for trial, members in trials.items()}, varied)
          for of, trials in found.items()]


def seed_and_name(run: RunRecord) -> tuple[int, str]:
  """The order of runs in a group; those without a config come first."""
  return (run.setup.seed if run.setup else -1, run.name)


def groups_of(runs: Iterable[RunRecord],
              chosen: Callable[[RunRecord], bool] = is_of_the_paper) -> list[Group]:
  """The chosen runs by budget and protocol: large budgets first, and of one the paper's protocol.

  A budget without any such run makes no group.
  """
  # A trial without a config may have been asked for without naming a protocol.
  groups = grouped(filter(chosen, runs), lambda run: (
      run.label.budget, run.label.protocol or 'paper', run.label.trial))
  # 'smoke with steps=50' is a budget that a person changed: it stands with the one it is based on.
  order = {budget: i for i, budget in enumerate(BUDGETS)}
  return sorted(groups, key=lambda group: (order.get(group.rules, len(order)), group.budget,
                                           group.protocol != 'paper', group.protocol))


def synthetic_groups(runs: Iterable[RunRecord]) -> list[Group]:
  """The synthetic trials under the names of the paper's trials, as one group, if there are any.

  Only those of the config file itself: none whose budget says that settings were changed.
  """
  unchanged = [run for run in runs if is_synthetic(run) and not run.label.budget]
  return grouped(unchanged, lambda run: (
      SYNTHETIC.rstrip('-'), '', run.label.trial.removeprefix(SYNTHETIC)))


def inconsistencies(group: Group) -> list[str]:
  """Trials that cannot be compared, or whose runs differ in more than seeds or repeat one."""
  lines = [f'{trial} is not comparable with the default run: {words}. What hangs on it is not '
           'judged.' for trial, words in group.incomparable.items()]
  for trial in group.trials:
    seeds = [run.known_setup.seed for run in group.readable(trial)]
    if own := group.differing(trial):
      lines.append(f'The runs of {trial} differ in more than their seeds: {own}. Their mean says '
                   'little.')
    elif len(set(seeds)) < len(seeds):
      lines.append(f'Runs of {trial} repeat a seed.')
  return lines


def unlike(trial: str, run: RunRecord, default: RunRecord, varied: tuple[str, ...]
           ) -> Iterator[str]:
  """'data.source Stdlib() instead of Jsonl(...)' for all that should be the default's.

  varied: as of `Group`. Both runs have to be readable.
  """
  # A trial differs from the default in what its name begins with, and in nothing else here.
  swept = next((keys for start, keys in _SWEPT.items() if trial.startswith(start)), ())
  mine, its = run.known_setup.settings, default.known_setup.settings
  shared = _SHARED if not varied else [
      key for key in {**its, **mine} if key not in FREE and not key.startswith(varied)]
  for key in shared:
    if key not in swept and mine.get(key) != its.get(key):
      yield f'{key} {mine.get(key)} instead of {its.get(key)}'
  contents = [either.text.content if either.text else None for either in (run, default)]
  # The same path may hold other text on another machine; runs that are older than the hash are
  # taken to have the same.
  if None not in contents and contents[0] != contents[1]:
    yield 'other content of its data'
