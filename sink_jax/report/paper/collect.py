"""Runs by budget, protocol and trial, and how far each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from sink_jax.report.paper import published
from sink_jax.report.runs import differing_settings
from sink_jax.train.budget import BUDGETS
from sink_jax.train.experiment import RESUMABLE

SYNTHETIC = 'synthetic-'  # the trials of the synthetic task, which the paper does not have
_UNDER_WAY = ('running', 'interrupted')
# Settings that may differ between runs that are averaged.
_FREE = ('seed', 'model.implementation', 'model.remat', 'microbatches', *RESUMABLE)


@dataclasses.dataclass(frozen=True)
class Group:
  """The runs of one budget and protocol: {trial: its runs, one per seed}."""

  budget: str
  protocol: str
  trials: Mapping[str, tuple[dict, ...]]

  @property
  def name(self) -> str:
    return f'{self.budget} budget, {self.protocol} protocol'

  @property
  def key(self) -> str:
    return f'{self.budget}-{self.protocol}'

  def runs(self, trial: str) -> tuple[dict, ...]:
    return self.trials.get(trial, ())

  def done(self, trial: str) -> tuple[dict, ...]:
    return tuple(run for run in self.runs(trial) if run['status'] == 'done')

  def measured(self, trial: str) -> tuple[dict, ...]:
    """The runs to show a trial by: those that are done, else those under way."""
    return self.done(trial) or tuple(
        run for run in self.runs(trial) if run['status'] in _UNDER_WAY)

  def status(self, trial: str) -> str:
    """How far a trial is, in words."""
    runs = self.runs(trial)
    if not runs:
      return 'not run'
    seeds = {}
    for run in runs:
      seeds.setdefault(self._status(run), []).append(run.get('seed'))
    told = lambda seeds: '' if None in seeds else (
        f', seed{"s" if len(seeds) > 1 else ""} {", ".join(map(str, sorted(seeds)))}')
    return '; '.join(words + (told(of) if len(runs) > 1 else '') for words, of in seeds.items())

  def _status(self, run):
    step = f'step {run["step"]:,}'
    of = f'{step} of {run["steps"]:,}' if 'steps' in run else step
    reason = run['reason'] or run['error'] or 'for an unknown reason'
    return {'done': f'done at {self.budget}' if self.budget else 'done', 'not run': 'not run',
            'running': f'running ({of})', 'interrupted': f'interrupted ({of})',
            'diverged': f'diverged ({of})', 'failed': f'failed ({reason})',
            'not expressible': f'not expressible ({reason})',
            'unreadable': f'unreadable ({reason})'}.get(run['status'], run['status'])


def is_of_the_paper(run: dict) -> bool:
  """Is it a run of one of the paper's trials, at a budget?"""
  return bool(run['label']['budget']) and run['label']['trial'] in published.trials()


def is_synthetic(run: dict) -> bool:
  return run['label']['trial'].startswith(SYNTHETIC)


def groups_of(runs: Iterable[dict]) -> list[Group]:
  """Large budgets first. A budget without any run of the paper makes no group."""
  found = {}
  for run in filter(is_of_the_paper, runs):
    # A trial without a config may have been asked for without naming a protocol.
    key = run['label']['budget'], run['label']['protocol'] or 'paper'
    found.setdefault(key, {}).setdefault(run['label']['trial'], []).append(run)
  order = {budget: i for i, budget in enumerate(BUDGETS)}
  by_seed = lambda run: (run.get('seed', -1), run['name'])
  return [Group(*key, {trial: tuple(sorted(members, key=by_seed))
                       for trial, members in found[key].items()})
          for key in sorted(found, key=lambda key: (order.get(key[0], len(order)), key))]


def inconsistencies(group: Group) -> list[str]:
  """Trials whose runs differ in more than their seeds, or repeat a seed."""
  lines = []
  for trial, runs in group.trials.items():
    runs = [run for run in runs if 'config' in run and run['status'] != 'unreadable']
    if len(runs) < 2:
      continue
    _, different = differing_settings(runs)
    keys = sorted({key for settings in different.values() for key in settings} - set(_FREE))
    if keys:
      lines.append(f'The runs of {trial} ({group.name}) differ in more than their seeds: '
                   f'{", ".join(keys)}. Their mean says little.')
    elif len({run['seed'] for run in runs}) < len(runs):
      lines.append(f'Runs of {trial} ({group.name}) repeat a seed.')
  return lines
