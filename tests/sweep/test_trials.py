"""Trials of config files, which run one after the other."""

import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from sink_jax.sweep import pool
from sink_jax.sweep.runner import record_outcome, run_trial
from sink_jax.sweep.summary import as_markdown, cost_of, keep_summary, remaining
from sink_jax.sweep.trials import Trial, load_trials, select_shard
from sink_jax.train.config import Label, from_dict
from sink_jax.train.workdir import Workdir, read_config, read_status, write_status
from tests.train import runs

CONFIGS = Path(__file__).parents[2] / 'configs'
FAST = dict(steps=2, probe__every=0, validation__every=0)


def run(root, **experiments):
  return {
    name: run_trial(Trial(name, experiment), root, show_progress=False)
    for name, experiment in experiments.items()
  }


def stored(folder):
  return from_dict(read_config(folder))


def test_failures_do_not_stop_the_rest(tmp_path, capsys):
  statuses = run(
    tmp_path,
    bad=runs.config(**FAST, data__source="TextFolder(path='no/such/folder')"),
    diverging=runs.config(
      **FAST | dict(steps=40),
      optimizer__rule='Sgd()',
      model__norm='none',
      optimizer__learning_rate=1e7,
      optimizer__clip=0.0,
    ),
    good=runs.config(**FAST),
  )
  assert statuses == {'bad': 'failed', 'diverging': 'diverged', 'good': 'done'}
  assert 'no/such/folder' in read_status(tmp_path / 'bad')['error']
  for name in ('diverging', 'good'):  # neither is trained again
    before = (tmp_path / name / 'status.json').stat().st_mtime_ns
    assert run(tmp_path, **{name: stored(tmp_path / name)}) == {name: statuses[name]}
    assert (tmp_path / name / 'status.json').stat().st_mtime_ns == before


@pytest.mark.parametrize('code, status', [(1, 'failed'), (4, 'diverged'), (137, 'failed')])
def test_how_a_process_ends_is_the_status_of_its_trial(tmp_path, monkeypatch, code, status):
  def started(*_):
    process = multiprocessing.get_context('spawn').Process(target=sys.exit, args=(code,))
    process.start()
    return process

  monkeypatch.setattr(pool, '_started', started)
  trials = {'a': Trial('a', runs.config(**FAST))}
  assert list(pool.run_in_parallel(trials, tmp_path, 1)) == [('a', status)]
  assert (tmp_path / 'a' / 'status.json').exists() == (
    status == 'failed'
  )  # a trial itself writes the others


def test_a_damaged_busy_or_failing_trial_stops_nothing_and_loses_nothing(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr('sink_jax.train.workdir._PATIENCE', 0.1)
  run(tmp_path, a=runs.config(**FAST), b=runs.config(**FAST))
  (tmp_path / 'a' / 'config.json').write_text('{')
  kept = (tmp_path / 'b' / 'status.json').read_text()
  (tmp_path / 'file').touch()  # a file at the path of a trial's folder
  with Workdir(
    tmp_path / 'busy', runs.config(**FAST), {'content': ''}
  ):  # in use by another process
    statuses = run(
      tmp_path,
      a=runs.config(**FAST),
      file=runs.config(**FAST),
      busy=runs.config(**FAST),
      b=runs.config(**FAST, seed=1),
      c=runs.config(**FAST),
    )
  assert statuses == {'a': 'failed', 'file': 'failed', 'busy': 'busy', 'b': 'failed', 'c': 'done'}
  assert not (tmp_path / 'busy' / 'status.json').exists()
  assert (tmp_path / 'b' / 'status.json').read_text() == kept
  assert 'seed: 0 -> 1' in capsys.readouterr().err


def test_records_of_finished_runs_are_kept(tmp_path, capsys, monkeypatch):
  run(tmp_path, a=runs.config(**FAST))
  record_outcome(Trial('a', None), tmp_path, 'failed', error='its process died')
  assert run(tmp_path, a=None) == {'a': 'failed'}  # the budget cannot express this trial
  assert 'another budget' in capsys.readouterr().err
  monkeypatch.setattr('sink_jax.sweep.runner.write_analyses', lambda *_: 1 / 0)
  assert run(tmp_path, a=stored(tmp_path / 'a')) == {'a': 'not analysed'}
  assert read_status(tmp_path / 'a')['status'] == 'done'


def test_what_a_budget_cannot_express_is_recorded(tmp_path):
  trial = load_trials(CONFIGS / 'paper.py', {'budget': 'desk', 'protocol': 'released'})['heads-1']
  assert run_trial(trial, tmp_path) == 'not expressible'
  status = read_status(tmp_path / 'heads-1')
  assert status['label'] == {
    'trial': 'heads-1',
    'task': 'paper',
    'budget': 'desk',
    'protocol': 'released',
  }
  assert status['reason']


def test_options_seeds_and_settings_reach_the_config():
  trials = load_trials(
    CONFIGS / 'paper.py',
    {'budget': 'desk', 'protocol': 'released'},
    [3, 5],
    {
      'steps': '50',
      'data.cache_dir': 'elsewhere',
      'log_every': '7',
      'data.interventions': 'FixedToken(position=2)',
      'data.max_tokens': '9000',
    },
  )
  trial = trials['window-32-seed-5']
  run = trial.experiment
  assert (run.seed, run.steps, run.log_every) == (5, 50, 7)
  # The label has settings that change the computation, and none that only say where it runs.
  assert (
    trial.label
    == run.label
    == Label(
      trial='window-32',
      task='paper',
      protocol='released',
      budget='desk with steps=50, data.interventions=FixedToken(position=2), data.max_tokens=9000',
    )
  )
  seeded = load_trials(CONFIGS / 'paper.py', {'budget': 'desk'}, settings={'seed': '3'})
  assert {trial.label.budget for trial in seeded.values()} == {'desk'}  # it is a seed of its trial


def test_shards_are_a_partition():
  trials = {str(i): Trial(str(i), None) for i in range(11)}
  parts = [select_shard(trials, f'{k}/4') for k in range(1, 5)]
  assert sorted(name for part in parts for name in part) == sorted(trials)
  assert {len(part) for part in parts} == {2, 3}
  for wrong in ('0/4', '5/4', '2', 'a/b', '1/0', '-1/2'):
    with pytest.raises(ValueError, match='k/n'):
      select_shard(trials, wrong)


@pytest.mark.parametrize(
  'line', ['{"kind": ["valid"], "step": 2, "valid": 9}', '["kind", "step"]', '\0' * 99]
)
def test_a_damaged_row_costs_a_summary_no_other(tmp_path, line):
  write_status(tmp_path / 'a', 'interrupted')
  row = '{"kind": "valid", "step": 1, "valid": 3.25}'
  (tmp_path / 'a' / 'metrics.jsonl').write_text(f'{row}\n{line}\n')
  with keep_summary({'a': Trial('a', None)}, tmp_path / 'summary.md'):
    pass
  text = (tmp_path / 'summary.md').read_text()
  assert '| 3.250 |' in text and '1 interrupted' in text and '# Not running' in text


def test_a_running_trial_shows_how_far_it_is(tmp_path):
  write_status(tmp_path / 'a', 'running')
  rows = [dict(kind='probe', step=4, sink_1=12.5), dict(kind='train', step=7, loss=3.0)]
  (tmp_path / 'a' / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
  text = as_markdown({'a': Trial('a', runs.config())}, tmp_path, 'now')
  assert '| a | running | 7 of 8 | 12.5 |' in text
  # The remaining time is proportional to the remaining work.
  costs = {name: cost_of(runs.config(steps=steps)).flops for name, steps in (('a', 8), ('b', 24))}
  assert costs['b'] == 3 * costs['a']
  assert remaining(costs, ['a', 'ended before'], 600) == 'about 30 min left'
  assert remaining(costs, [], 600) == remaining(costs, ['a', 'b'], 600) == ''
