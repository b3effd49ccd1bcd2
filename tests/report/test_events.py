"""Events of planted courses, and which of them are called ordered."""

import math

import numpy as np
import pandas as pd
import pytest

from sink_jax.report import events
from sink_jax.report.runs import Runs

STEPS = np.arange(0, 2001, 200)


def course(before, after, since):
  return np.where(STEPS >= since, after, before).astype(float)


def planted(**since):
  """Runs of one trial; since: {event: its step in each seed}. Values jump at that step."""
  levels = {
    'value_ratio': (0.9, 0.2),
    'hidden_ratio': (1.0, 9.0),
    'largest_importance': (0.08, 0.6),
    'sink_1': (0.0, 40.0),
  }
  rows = []
  runs = []
  for seed in range(len(next(iter(since.values())))):
    name = f'default-seed-{seed}'
    runs.append(
      {'run': name, 'trial': 'default', 'seed': seed, 'valid': '', 'uniform_importance': 0.074}
    )
    rows += [
      {'run': name, 'metric': metric, 'step': step, 'block': math.nan, 'value': value}
      for metric, (before, after) in levels.items()
      for step, value in zip(STEPS, course(before, after, since[metric][seed]))
    ]
  table = pd.DataFrame(runs)
  return events.events(Runs(pd.DataFrame(rows), table), table)


def test_an_event_is_the_first_step_that_stays():
  assert events.stays([0, 1, 2, 3], [False, True, False, True]) == 3
  assert events.stays([0, 1, 2, 3], [True] * 4) == 0
  assert events.stays([0, 1, 2], [True, True, False]) == math.inf
  assert events.half_way(np.array([1.0, 0.8, 0.4, 0.2])).tolist() == [False, False, True, True]
  assert not events.half_way(np.array([1.0, 1.0])).any()


def test_events_and_their_order():
  found = planted(
    value_ratio=(400, 600, 400),
    hidden_ratio=(800, 1000, 1200),
    largest_importance=(1000, 1000, 1000),
    sink_1=(1600, 1600, math.inf),
  )
  steps = found[found.threshold == 'written'].pivot(index='seed', columns='event', values='step')

  assert steps.value_ratio.tolist() == [400, 600, 400]
  assert steps.sink_1.iloc[2] == math.inf

  ordered = events.ordered(found, 'default')
  # Two probes are 400 steps. The hidden ratio and the importance are ordered differently by seed.
  assert ('value_ratio', 'hidden_ratio') in ordered
  assert ('value_ratio', 'sink_1') in ordered
  assert not {('hidden_ratio', 'largest_importance'), ('largest_importance', 'hidden_ratio')} & {
    *ordered
  }
  assert not [pair for pair in ordered if pair[0] == 'sink_1']


@pytest.mark.parametrize('later', [200, 400])
def test_two_probes_apart_are_ordered_and_one_is_not(later):
  found = planted(
    value_ratio=(400,), hidden_ratio=(400 + later,), largest_importance=(400,), sink_1=(400,)
  )
  assert (('value_ratio', 'hidden_ratio') in events.ordered(found, 'default')) == (later == 400)


def test_an_invalid_run_has_no_events():
  table = pd.DataFrame(
    [{'run': 'a', 'trial': 'default', 'seed': 0, 'valid': 'dead', 'uniform_importance': 0.07}]
  )
  metrics = pd.DataFrame(
    [{'run': 'a', 'metric': 'sink_1', 'step': 0, 'block': math.nan, 'value': 0.0}]
  )
  assert events.events(Runs(metrics, table), table).empty
