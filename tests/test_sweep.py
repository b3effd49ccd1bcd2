"""The sweep: trials in order, finished ones skipped, failures recorded, the rest carried on."""

import json

import pytest

from sink_jax.sweep import load_trials, run_trials
from sink_jax.train.workdir import read_status
from tests.train import runs

FAST = dict(steps=2, probe__every=0, validation__every=0)


def test_failures_do_not_stop_the_rest(tmp_path, capsys):
  configs = {
      'bad': runs.config(**FAST, data__source="TextFolder(path='no/such/folder')"),
      'diverging': runs.config(**FAST | dict(steps=40), optimizer__name='sgd', model__norm='none',
                               optimizer__learning_rate=1e7, optimizer__clip=0.0),
      'good': runs.config(**FAST)}
  statuses = run_trials(configs, tmp_path, show_progress=False)
  assert statuses == {'bad': 'failed', 'diverging': 'diverged', 'good': 'done'}
  assert 'no/such/folder' in read_status(tmp_path / 'bad')['error']
  before = (tmp_path / 'good' / 'metrics.jsonl').stat().st_mtime_ns
  assert run_trials({'good': configs['good']}, tmp_path, False) == {'good': 'done'}
  assert (tmp_path / 'good' / 'metrics.jsonl').stat().st_mtime_ns == before


def test_a_finished_folder_of_another_config_is_not_taken_for_done(tmp_path, capsys):
  run_trials({'a': runs.config(**FAST)}, tmp_path, show_progress=False)
  statuses = run_trials({'a': runs.config(**FAST, seed=1)}, tmp_path, show_progress=False)
  assert 'seed: 0 -> 1' in capsys.readouterr().err
  assert statuses['a'] != 'done'
  assert json.loads((tmp_path / 'a' / 'config.json').read_text())['seed'] == 0


def test_a_damaged_or_failing_trial_stops_nothing_and_loses_nothing(tmp_path, capsys):
  run_trials({'a': runs.config(**FAST), 'b': runs.config(**FAST)}, tmp_path, show_progress=False)
  (tmp_path / 'a' / 'config.json').write_text('{')
  kept = (tmp_path / 'b' / 'status.json').read_text()
  statuses = run_trials({
      'a': runs.config(**FAST), 'b': runs.config(**FAST, data__source="Jsonl(path='none')"),
      'c': runs.config(**FAST)}, tmp_path, show_progress=False)
  assert statuses == {'a': 'failed', 'b': 'failed', 'c': 'done'}
  assert (tmp_path / 'b' / 'status.json').read_text() == kept


def test_bad_config_files_are_explained(tmp_path):
  with pytest.raises(ValueError, match='does not exist'):
    load_trials(tmp_path / 'none.py')
  (tmp_path / 'wrong.py').write_text('TRIALS = {')
  with pytest.raises(ValueError, match='wrong.py: SyntaxError'):
    load_trials(tmp_path / 'wrong.py')
  (tmp_path / 'empty.py').write_text('')
  with pytest.raises(ValueError, match='no table TRIALS'):
    load_trials(tmp_path / 'empty.py')
