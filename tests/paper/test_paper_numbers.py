"""The paper's numbers: complete, consistent, and tied to the trials of configs/."""

import json
from importlib import resources

from configs import paper
from sink_jax.paper import numbers
from sink_jax.paper.metrics import METRICS

GROUPS = numbers.ALL_TABLES


def test_every_trial_exists_and_every_trial_has_its_place():
  assert numbers.TRIALS == set(paper.TRIALS)


def test_all_tables_and_figures_are_there():
  assert {table.number for table in numbers.TABLES} == {str(n) for n in range(1, 16)}
  figures = numbers.FIGURES
  assert {f.number for f in figures if not f.paper} == {str(n) for n in range(1, 31)}
  assert [f.number for f in figures if f.paper == 'StreamingLLM'] == ['12']
  keys = [item.key for item in GROUPS + figures]
  assert len(set(keys)) == len(keys)
  # Parts of tables and figures, as the paper has them; numbers of its text may be added.
  assert (len(numbers.TABLES), len(figures)) == (20, 48)


def test_the_default_run_is_the_same_everywhere():
  rows = [row for table in numbers.TABLES for row in table.rows if row.trial == 'default']
  assert len(rows) == 10
  for row in rows:
    assert (row.values['sink_1'], row.values['valid_loss']) == (18.18, 3.73)


def test_a_trial_has_one_value_of_a_measure():
  known = {}
  for group in GROUPS:
    for row in group.rows:
      assert set(row.values) == set(group.metrics) <= set(METRICS)
      for metric, value in row.values.items():
        if value is not None and row.trial:
          assert known.setdefault((row.trial, metric), value) == value


def test_what_is_unknown_has_a_reason():
  for group in GROUPS:
    for row in group.rows:
      if None in row.values.values():
        assert (row.note or row.failed or group.key in (
            'text-random-tokens', 'text-post-norm', 'table-7-replaced', 'table-7-swapped')), row
      if row.proxy:
        assert row.trial.startswith(('sigmoid', 'elu', 'identity', 'mlp', '1b-sigmoid'))


def test_the_training_failures():
  failed = {row.trial for group in GROUPS for row in group.rows
            if row.failed or row.values.get('converges') is False}
  assert failed == {'elu-normalized', 'elu-kernel', 'identity-normalized', 'softmax-p-2',
                    'softmax-p-3', 'softmax-p-4'}


def test_the_file_is_data_of_the_package():
  text = (resources.files('sink_jax.paper') / 'numbers.json').read_text()
  assert json.loads(text)['arxiv'] == '2410.10781' and '/work' not in text
