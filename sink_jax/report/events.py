"""The order in which a sink and what goes with it emerge, by seed.

An event is the first probe from which a quantity stays beyond its threshold to the end. The
thresholds were written down before the runs. Each quantity has a second threshold, half of its
final change, so that an order does not hang on the first. Two events are ordered if they lie two
probes apart in every seed, by both thresholds.
"""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from sink_jax.report.runs import EMERGED, Runs

APART = 2  # probes
TRIALS = 'default', 'sigmoid-normalized', 'sigmoid'


class Event(NamedTuple):
  """words: what happens. beyond: (values, the first, importance of uniform attention) -> bools."""

  words: str
  beyond: Callable[[np.ndarray, float, float], np.ndarray]


EVENTS = {
  'value_ratio': Event('the value norm ratio halves', lambda x, first, uniform: x < first / 2),
  'hidden_ratio': Event('the hidden norm ratio doubles', lambda x, first, uniform: x > 2 * first),
  'largest_importance': Event(
    'the largest importance is twice uniform', lambda x, first, uniform: x > 2 * uniform
  ),
  'sink_1': Event(f'Sink_1 exceeds {EMERGED} %', lambda x, first, uniform: x > EMERGED),
}
THRESHOLDS = 'written', 'half of the final change'


def stays(steps: Sequence[float], beyond: Sequence[bool]) -> float:
  """The first step from which `beyond` holds to the last; infinite if it fails at the end."""
  since = math.inf
  for step, holds in zip(steps, beyond):
    since = min(since, step) if holds else math.inf
  return since


def half_way(values: np.ndarray) -> np.ndarray:
  """Which values have made at least half of the change from the first to the last."""
  change = values[-1] - values[0]
  return (values - values[0]) * np.sign(change) > abs(change) / 2


def events(runs: Runs, table: pd.DataFrame) -> pd.DataFrame:
  """A row for each valid run of `TRIALS`, event and threshold.

  table: of `runs.table`. Columns: trial, seed, event, threshold, step (infinite: never), every
  (updates between two probes).
  """
  rows = []
  valid = table[table.trial.isin(TRIALS) & table.valid.eq('')]
  of_models = runs.metrics[runs.metrics.block.isna()]
  for run in valid.itertuples():
    of_run = of_models[of_models.run == run.run]
    for name, event in EVENTS.items():
      course = of_run[of_run.metric.eq(name)].sort_values('step')
      steps, values = course.step.to_numpy(float), course.value.to_numpy(float)
      if len(steps) < APART + 1:
        continue
      found = event.beyond(values, values[0], run.uniform_importance), half_way(values)
      rows += [
        {
          'trial': run.trial,
          'seed': run.seed,
          'event': name,
          'threshold': threshold,
          'step': stays(steps, beyond),
          'every': np.median(np.diff(steps)),
        }
        for threshold, beyond in zip(THRESHOLDS, found)
      ]
  return pd.DataFrame(rows, columns=['trial', 'seed', 'event', 'threshold', 'step', 'every'])


def ordered(found: pd.DataFrame, trial: str) -> list[tuple[str, str]]:
  """Pairs of events (earlier, later) of a trial that every seed orders so by both thresholds."""
  of_trial = found[found.trial == trial]
  steps = of_trial.pivot_table('step', ['seed', 'threshold'], 'event')
  return [
    (first, second)
    for first, second in itertools.permutations(EVENTS, 2)
    if {first, second} <= {*steps}
    and (steps[second] >= steps[first] + APART * of_trial.every.max()).all()
    and np.isfinite(steps[first]).all()
  ]
