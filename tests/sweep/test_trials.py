"""Trials of config files, and one trial after the other."""

import json
import time
from pathlib import Path

import pytest

from sink_jax.cli.parser import parse
from sink_jax.cli.sweep import _table, run_sweep
from sink_jax.sweep.config_keys import parse_settings
from sink_jax.sweep.options import Options
from sink_jax.sweep.pool import _cause
from sink_jax.sweep.runner import record_failure, run_trial
from sink_jax.sweep.summary import RemainingTime, keep_summary, read_states, write_summary
from sink_jax.sweep.trials import Trial, load_trials, select_shard
from sink_jax.train.workdir import lock_workdir, read_config, read_status, write_outcome
from tests.train import runs

CONFIGS = Path(__file__).parents[2] / 'configs'
FAST = dict(steps=2, probe__every=0, validation__every=0)


def run(root, **configs):
  return {name: run_trial(Trial(name, config), root, show_progress=False)
          for name, config in configs.items()}


def test_failures_do_not_stop_the_rest(tmp_path, capsys):
  statuses = run(
      tmp_path, bad=runs.config(**FAST, data__source="TextFolder(path='no/such/folder')"),
      diverging=runs.config(**FAST | dict(steps=40), optimizer__rule='Sgd()', model__norm='none',
                            optimizer__learning_rate=1e7, optimizer__clip=0.0),
      good=runs.config(**FAST))
  assert statuses == {'bad': 'failed', 'diverging': 'diverged', 'good': 'done'}
  assert 'no/such/folder' in read_status(tmp_path / 'bad')['error']
  before = (tmp_path / 'good' / 'metrics.jsonl').stat().st_mtime_ns
  assert run(tmp_path, good=read_config(tmp_path / 'good')) == {'good': 'done'}
  assert (tmp_path / 'good' / 'metrics.jsonl').stat().st_mtime_ns == before


def test_a_finished_folder_of_another_config_is_not_taken_for_done(tmp_path, capsys):
  run(tmp_path, a=runs.config(**FAST))
  assert run(tmp_path, a=runs.config(**FAST, seed=1)) == {'a': 'failed'}
  assert 'seed: 0 -> 1' in capsys.readouterr().err
  assert json.loads((tmp_path / 'a' / 'config.json').read_text())['seed'] == 0
  other, same = (Trial('a', runs.config(**FAST, seed=seed)) for seed in (1, 0))
  state, = read_states({'a': other}, tmp_path)
  assert (state.status, state.note) == ('another config', 'seed: 0 -> 1')
  assert [state.status for state in read_states({'a': same}, tmp_path)] == ['done']


def test_a_damaged_or_failing_trial_stops_nothing_and_loses_nothing(tmp_path, capsys):
  run(tmp_path, a=runs.config(**FAST), b=runs.config(**FAST))
  (tmp_path / 'a' / 'config.json').write_text('{')
  kept = (tmp_path / 'b' / 'status.json').read_text()
  (tmp_path / 'file').touch()  # where a folder is to be made
  statuses = run(tmp_path, a=runs.config(**FAST), file=runs.config(**FAST),
                 b=runs.config(**FAST, data__source="Jsonl(path='none')"), c=runs.config(**FAST))
  assert statuses == {'a': 'failed', 'file': 'failed', 'b': 'failed', 'c': 'done'}
  assert (tmp_path / 'b' / 'status.json').read_text() == kept


def test_a_trial_that_another_process_runs_is_left_to_it(tmp_path, monkeypatch):
  monkeypatch.setattr('sink_jax.sweep.runner.PATIENCE', 0.1)
  with lock_workdir(tmp_path / 'a', runs.config(**FAST), {'content': ''}):
    assert run(tmp_path, a=runs.config(**FAST)) == {'a': 'busy'}
  assert not (tmp_path / 'a' / 'status.json').exists()


def test_records_of_finished_runs_are_kept(tmp_path, capsys, monkeypatch):
  run(tmp_path, a=runs.config(**FAST))
  record_failure(Trial('a', None), tmp_path, 'its process died')
  assert read_status(tmp_path / 'a')['status'] == 'done'
  assert run(tmp_path, a=None) == {'a': 'failed'}  # of a budget that cannot express it
  assert 'another budget' in capsys.readouterr().err
  assert read_status(tmp_path / 'a')['status'] == 'done'
  monkeypatch.setattr('sink_jax.sweep.runner.write_analyses', lambda folder: 1 / 0)
  assert run(tmp_path, a=read_config(tmp_path / 'a')) == {'a': 'not analysed'}
  assert read_status(tmp_path / 'a')['status'] == 'done'


def test_a_failure_is_recorded_without_asking_a_device(tmp_path, monkeypatch):
  monkeypatch.setattr('jax.devices', None)  # a parent that took them would starve its processes
  record_failure(Trial('a', None, {'trial': 'a'}), tmp_path, 'its process died')
  status = read_status(tmp_path / 'a')
  assert (status['status'], status['label']) == ('failed', {'trial': 'a'})


@pytest.mark.parametrize('code, words', [(3, 'exit code 3'), (-9, 'SIGKILL'), (-35, 'signal 35')])
def test_a_death_by_any_signal_is_described(code, words):
  assert _cause(code) == words


def test_what_a_budget_cannot_express_is_recorded(tmp_path):
  trial = load_trials(CONFIGS / 'heads.py', {'budget': 'smoke', 'protocol': 'released'})['heads-1']
  assert run_trial(trial, tmp_path) == 'not expressible'
  status = read_status(tmp_path / 'heads-1')
  assert status['label'] == {'trial': 'heads-1', 'budget': 'smoke', 'protocol': 'released'}
  assert '0.5 of 4' in status['reason']


def test_bad_config_files_are_explained(tmp_path):
  with pytest.raises(ValueError, match='does not exist'):
    load_trials(tmp_path / 'none.py')
  (tmp_path / 'wrong.py').write_text('TRIALS = {')
  with pytest.raises(ValueError, match='wrong.py: SyntaxError'):
    load_trials(tmp_path / 'wrong.py')
  (tmp_path / 'empty.py').write_text('')
  with pytest.raises(ValueError, match='no table TRIALS'):
    load_trials(tmp_path / 'empty.py')
  with pytest.raises(ValueError, match='trial text-softmax.*neither budgets nor protocols'):
    load_trials(CONFIGS / 'quickstart.py', {'budget': 'smoke'})
  with pytest.raises(ValueError, match='quickstart.py, trial text-softmax: .*tiny, 60m, 1b'):
    load_trials(CONFIGS / 'quickstart.py', settings={'model.size': '2b'})


def test_options_seeds_and_settings_reach_the_config():
  trials = load_trials(CONFIGS / 'window.py', {'budget': 'smoke', 'protocol': 'released'}, [3, 5],
                       {'steps': '7', 'optimizer.clip': '2', 'model.vocab_size': 'null',
                        'data.source': 'Stdlib(max_files=3)', 'model.remat': 'blocks'})
  assert list(trials)[:2] == ['window-32-seed-3', 'window-32-seed-5'] and len(trials) == 12
  config = trials['window-64-seed-5'].config
  assert (config['seed'], config['steps'], config['optimizer']['clip']) == (5, 7, 2.0)
  assert config['data']['source'] == 'Stdlib(max_files=3)' and config['model']['remat'] == 'blocks'
  assert config['attention']['mask'] == 'Window(size=2)'
  assert config['label'] == {'trial': 'window-64', 'protocol': 'released',
                             'budget': 'smoke with steps=7, optimizer.clip=2'}
  assert not trials['window-64-seed-5'].overridden


@pytest.mark.parametrize('setting, words', [
    ({'step': '1'}, "no such key: 'step'. Did you mean steps"),
    ({'model': 'null'}, "'model' is a section"), ({'mesh.data': 'null'}, 'mesh.data is empty'),
    ({'steps': 'null'}, 'key steps is empty'),
    ({'data.sources': 'x'}, "key: 'data.sources'. Did you mean data.source"),
    ({'optimizer.name': 'sgd'}, "optimizer.name.*optimizer.rule='Sgd"),
    ({'budget': 'smoke'}, 'budget=.* --budget of a sweep'), ({'steps.x': '1'}, "key: 'steps.x'"),
    ({'steps': 'many'}, 'steps=many: it takes a whole number'), ({'steps': '1.5'}, 'steps=1.5'),
    ({'data.bos': 'x'}, 'it takes true or false.'), ({'=': '1'}, "key: '='"),
    ({'batch_size': '0'}, 'batch_size must be at least 1'),
    ({'data.source': 'Nothing()'}, 'Nothing')])
def test_bad_settings_are_refused_before_anything_runs(setting, words):
  with pytest.raises(ValueError, match=words):
    load_trials(CONFIGS / 'default.py', settings=setting)


def test_settings_do_not_replace_what_a_trial_is_about():
  trials = load_trials(CONFIGS / 'learning_rate.py', settings={'steps': '50'})
  assert {name for name, trial in trials.items() if trial.overridden == ('steps',)} == {
      'lr-8e-4-10k', 'lr-2e-4-40k', 'lr-1e-4-80k', 'lr-1e-5-80k'}
  assert trials['lr-2e-4'].config['label']['budget'] == 'full with steps=50'
  shared = load_trials(CONFIGS / 'synthetic.py', settings={'steps': '50'})  # all have as many
  assert not any(trial.overridden for trial in shared.values())


def test_a_setting_that_does_not_fit_a_trial_is_no_matter_to_the_others(capsys):
  trials = load_trials(CONFIGS / 'quickstart.py', settings={'attention.similarity': 'Exp()'})
  problems = [name for name, trial in trials.items() if trial.problem]
  assert problems == ['text-sigmoid', 'text-sigmoid-normalized', 'backcopy-sigmoid']
  choose = lambda *names: run_sweep(parse(Options, [
      f'--config={CONFIGS}/quickstart.py', '--list', '--set=attention.similarity=Exp()',
      f'--only={",".join(names)}'], ''))
  assert choose('text-softmax', 'backcopy-softmax') == 0
  assert capsys.readouterr().out.split() == ['text-softmax', 'backcopy-softmax']
  with pytest.raises(ValueError, match='trial text-sigmoid: Exp.* overflows'):
    choose('text-softmax', 'text-sigmoid')


def test_settings_are_read_from_the_command_line():
  assert parse_settings(["data.source=TextFolder(path='a=b')", 'steps = 3']) == {
      'data.source': "TextFolder(path='a=b')", 'steps': '3'}
  with pytest.raises(ValueError, match='key=value'):
    parse_settings(['steps'])
  with pytest.raises(ValueError, match='config key steps is set twice'):
    parse_settings(['steps=1', 'steps = 2'])


def test_a_key_is_set_by_either_option():
  words = [f'--config={CONFIGS}/default.py', '--budget=smoke', '--list']
  same = [('--set=steps=7', '--config.steps=7', '--config.steps 7'),
          ('--set=data.bos=true', '--config.data.bos', '-config.data.bos=true'),
          ('--set=data.bos=false', '--noconfig.data.bos')]
  for options in same:
    tables = [_table(parse(Options, [*words, *option.split()], '')) for option in options]
    assert all(table == tables[0] for table in tables) and tables[0]['default'].config
  assert tables[0]['default'].config['data']['bos'] is False


def test_shards_are_a_partition():
  trials = {str(i): Trial(str(i), None) for i in range(11)}
  parts = [select_shard(trials, f'{k}/4') for k in range(1, 5)]
  assert sorted(name for part in parts for name in part) == sorted(trials)
  assert {len(part) for part in parts} == {2, 3}
  for wrong in ('0/4', '5/4', '2', 'a/b', '1/0', '-1/2'):
    with pytest.raises(ValueError, match='k/n'):
      select_shard(trials, wrong)


def test_a_trial_that_has_ended_is_not_read_again(tmp_path):
  trials = {name: Trial(name, runs.config(**FAST)) for name in 'ab'}
  write_outcome(tmp_path / 'a', 'done')
  write_outcome(tmp_path / 'b', 'failed', error='no room')
  ended = {}
  assert [state.status for state in read_states(trials, tmp_path, ended)] == ['done', 'failed']
  for name in 'ab':
    write_outcome(tmp_path / name, 'interrupted')
  assert [state.status for state in read_states(trials, tmp_path, ended)] == ['done', 'interrupted']


def test_a_running_trial_that_this_budget_cannot_express_has_its_line(
    tmp_path, capsys, monkeypatch):
  monkeypatch.setattr('sink_jax.sweep.summary._WRITE_EVERY', 0.01)
  with lock_workdir(tmp_path / 'a', runs.config(**FAST), {'content': ''}):
    write_outcome(tmp_path / 'a', 'running')
    with keep_summary({'a': Trial('a', None)}, tmp_path, RemainingTime({}, 60.0), lines=True):
      lines, deadline = '', time.monotonic() + 10
      while 'a 0  about' not in lines and time.monotonic() < deadline:
        time.sleep(0.02)
        lines += capsys.readouterr().err
  assert 'a 0  about' in lines


@pytest.mark.parametrize('line', [
    '{"kind": "valid", "step": "two", "valid": 9}', '{"kind": "valid", "step": null, "valid": 9}',
    '{"kind": ["valid"], "step": 2, "valid": 9}', '[' * 20000, '["kind", "step"]', '\0' * 99,
    '{"kind": "probe", "step": 2, "sink_1": "half"}'])
def test_a_damaged_row_costs_a_summary_no_other(tmp_path, line):
  write_outcome(tmp_path / 'a', 'interrupted')
  row = '{"kind": "valid", "step": 1, "valid": 3.25}'
  (tmp_path / 'a' / 'metrics.jsonl').write_text(f'{row}\n{line}\n')
  state, = write_summary({'a': Trial('a', None)}, tmp_path, 'Not running')
  assert state.valid == 3.25
  assert '| 3.250 |' in (tmp_path / 'summary.md').read_text()


def test_a_summary_finds_a_validation_far_from_the_end_of_the_rows(tmp_path):
  write_outcome(tmp_path / 'a', 'interrupted')
  rows = [dict(kind='valid', step=0, valid=3.25), dict(kind='probe', step=0, sink_1=12.5)]
  rows += [dict(kind='train', step=step, loss=3.0, note='x' * 200) for step in range(1000)]
  (tmp_path / 'a' / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  state, = read_states({'a': Trial('a', None)}, tmp_path)
  assert (state.step, state.valid, state.sink_1) == (999, 3.25, 12.5)
