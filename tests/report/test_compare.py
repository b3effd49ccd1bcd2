"""Trials against a baseline, compared by seed: differences, intervals and verdicts."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sink_jax.report.compare import MEASURES, against, written


def table(trials, **columns):
  """A table of runs: trials of {name: Sink_1 by seed}."""
  rows = [
    {
      'trial': trial,
      'seed': seed,
      'content': 'data',
      'steps': 100,
      'valid': '',
      'heads': 8.0,
      'budget': 'desk',
      'protocol': '',
      'sink_1': value,
      'sink_star': math.nan,
      'valid_loss': 3.0 + seed / 100,
      'value_ratio': 0.2,
      'hidden_ratio': 3.0,
    }
    for trial, values in trials.items()
    for seed, value in enumerate(values)
  ]
  return pd.DataFrame(rows).assign(**columns)


def verdicts(found, metric='sink_1'):
  of = found[found.metric == metric]
  return dict(zip(of.trial, of.verdict))


def test_differences_are_paired_by_seed():
  softmax = [23.5, 25.0, 30.0]
  gate = [3.1, 0.0, 6.0]
  # The rows are in another order, and only one trial has the last seed.
  runs = table({'softmax': softmax, 'gate': [*gate, 90.0]})
  found = against(runs.sample(frac=1, random_state=0), 'softmax')
  row = found[found.metric == 'sink_1'].iloc[0]
  differences = np.subtract(gate, softmax)
  low, high = stats.t.interval(0.99, 2, differences.mean(), stats.sem(differences))

  np.testing.assert_allclose([row.difference, row.low, row.high], [differences.mean(), low, high])
  assert row.n == 3
  assert row.p == pytest.approx(stats.ttest_rel(gate, softmax).pvalue)
  assert (
    written(row, MEASURES['sink_1'])
    == f'{differences.mean():+.1f} ({low:+.1f} to {high:+.1f}), n = 3'
  )


def test_ratios_are_compared_as_logarithms():
  found = against(
    table({'softmax': [25.0] * 3, 'gate': [0.0] * 3}).assign(
      value_ratio=[0.1, 0.2, 0.4, 0.2, 0.4, 0.8]
    ),
    'softmax',
  )
  row = found[found.metric == 'value_ratio'].iloc[0]

  assert row.difference == pytest.approx(math.log(2))
  assert written(row, MEASURES['value_ratio']).startswith('2.00')


def test_verdicts():
  runs = table(
    {
      'softmax': [23.5, 25.0, 25.0],
      'gone': [0.0, 0.0, 1.0],
      'key': [0.0, 1.0, 0.0],
      'weaker': [10.0, 11.0, 12.0],
      'same': [24.0, 25.0, 26.0],
      'unlike': [0.0, 50.0, 20.0],
      'few': [0.0, 0.0],
      'dead': [0.0] * 3,
    }
  )
  runs.loc[runs.trial == 'key', 'sink_star'] = 40.0
  runs.loc[(runs.trial == 'dead') & (runs.seed > 0), 'valid'] = 'dead'
  found = against(runs, 'softmax')

  assert verdicts(found) == {
    'gone': 'removed',
    'key': 'moved to the extra key',
    'weaker': 'lower',
    'same': 'no difference in 3 seeds',
    'unlike': 'open',
    'few': 'open',
    'dead': 'not testable',
  }
  assert set(verdicts(found, 'valid_loss').values()) == {'no difference', 'open', 'not testable'}
  assert found[found.trial == 'dead'].invalid.iloc[0] == 'dead 2'


def test_softmax_without_a_sink_leaves_nothing_to_remove():
  assert verdicts(against(table({'softmax': [0.0, 1.0, 0.0], 'gate': [0.0] * 3}), 'softmax')) == {
    'gate': 'nothing to change'
  }


def test_other_data_steps_or_budgets_make_no_pairs():
  runs = table(
    {'softmax': [25.0, 24.0, 23.0], **dict.fromkeys(('gate', 'long', 'wide'), [0.0, 1.0, 0.0])}
  )
  runs.loc[runs.trial == 'gate', 'content'] = 'other'
  runs.loc[runs.trial == 'long', 'steps'] = 200
  runs.loc[runs.trial == 'wide', 'budget'] = 'full'
  found = against(runs, 'softmax')

  assert set(found.n) == {0}
  assert set(found.verdict) == {'open'}
  assert written(found.iloc[0], MEASURES['sink_1']) == '-'


def test_a_seed_counts_once_however_many_budgets_ran_it():
  desk = table({'softmax': [25.0, 24.0], 'gate': [1.0, 2.0]})
  found = against(
    pd.concat([desk, desk.assign(budget='tenth', sink_1=desk.sink_1 + [4, 4, 0, 0])]), 'softmax'
  )
  row = found[found.metric == 'sink_1'].iloc[0]

  assert row.n == 2
  assert row.difference == pytest.approx(-25)
  assert row.verdict == 'open'


@pytest.mark.parametrize('scenario', ['one head', 'collapse', 'nothing', 'unstable softmax'])
def test_unlike_seeds_seldom_give_a_wrong_verdict(scenario, pytestconfig):
  """20 remedies change some seeds or none; a wrong or absent direction in a verdict is an error."""
  experiments = 1000 if pytestconfig.getoption('--full') else 10
  wrong = 0
  draw = np.random.default_rng(0)

  for _ in range(experiments):
    collapsed = (draw.random(3) < 0.1) * (scenario == 'unstable softmax')
    trials = {'softmax': 50.0 * ~collapsed.astype(bool) + draw.normal(0, 1, 3)}
    for i in range(20):
      of = np.full(3, 50.0) + draw.normal(0, 1, 3)
      share, loss = {'one head': (0.2, 25.0), 'collapse': (0.1, 50.0)}.get(scenario, (0, 0))
      of -= loss * (draw.random(3) < share)
      trials[f'remedy-{i}'] = of
    right = (
      {'lower', 'removed'}
      if scenario in ('one head', 'collapse')
      else ({'higher'} if scenario == 'unstable softmax' else set())
    )
    found = set(
      verdicts(against(table(trials), 'softmax', {'sink_1': MEASURES['sink_1']})).values()
    )
    wrong += bool(found & ({'lower', 'removed', 'higher', 'no difference'} - right))

  assert wrong <= 0.05 * experiments
