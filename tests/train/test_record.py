"""What goes with each checkpoint: digests of metrics and probe inputs, and what they catch."""

import contextlib
import fcntl
import json
import shutil

import numpy as np
import pytest

from sink_jax.report.read_runs import read_run
from sink_jax.sweep import runner
from sink_jax.sweep.summary import as_markdown, read_states
from sink_jax.sweep.trials import Trial
from sink_jax.train import record, run_dir as runs_files
from sink_jax.train.checksums import forget_checksums, write_checksums
from sink_jax.train.metrics_log import MetricsWriter, read_metrics
from sink_jax.train.probe_tokens import read_probe_tokens, write_probe_tokens
from sink_jax.train.record import metrics_problem, read_record, settle_metrics, write_record
from tests.train import runs

TOKENS = np.arange(64, dtype=np.int32).reshape(4, 16)


@pytest.fixture
def workdir(tmp_path):
  """A run of 10 steps, one row each, with checkpoints 4 and 8; no model was trained."""
  metrics = MetricsWriter(tmp_path)
  sha256 = write_probe_tokens(tmp_path, TOKENS)
  for step in range(1, 11):
    metrics.write('train', step, {'loss': 1 / step})
    if step in (4, 8):
      (tmp_path / 'checkpoints' / str(step)).mkdir(parents=True)
      metrics.flush()
      write_record(tmp_path, step, {'metrics.jsonl': metrics.record(),
                                    'probe_tokens.npy': {'sha256': sha256},
                                    'data': {'content': 'abc'}})
  metrics.close()
  return tmp_path


def steps_of(workdir):
  return [row['step'] for row in read_metrics(workdir)]


def lines(workdir):
  return (workdir / 'metrics.jsonl').read_bytes().splitlines(keepends=True)


def test_rows_as_they_were_written_are_cut_and_keep_their_bytes(workdir):
  before = lines(workdir)
  kept = settle_metrics(workdir, 8)
  assert (kept.whole_from, kept.remark) == (0, '') and lines(workdir) == before[:8]
  assert settle_metrics(workdir, 4).remark == '' and lines(workdir) == before[:4]
  assert not (workdir / 'damaged').exists() and metrics_problem(workdir)  # of step 8, which is cut away


CHANGES = {
    'missing': lambda rows: rows[:5] + rows[6:],
    'doubled': lambda rows: rows[:6] + rows[5:],
    'changed': lambda rows: rows[:5] + [rows[5].replace(b'0.1', b'0.2')] + rows[6:],
    'cut': lambda rows: rows[:7] + [rows[7][:9]],
    'reordered': lambda rows: rows[:5] + [rows[6], rows[5]] + rows[7:]}


@pytest.mark.parametrize('how', CHANGES)
def test_rows_that_do_not_fit_are_set_aside(workdir, how):
  harmed = b''.join(CHANGES[how](lines(workdir)))
  (workdir / 'metrics.jsonl').write_bytes(harmed)
  assert 'digest of step 8' in metrics_problem(workdir)
  kept = settle_metrics(workdir, 8)
  assert kept.whole_from == 8 and 'the record is whole from step 8 on' in kept.remark
  assert 'remove checkpoints/8' in kept.remark  # and 5 to 8 are made again
  assert steps_of(workdir) == [1, 2, 3, 4]
  assert (workdir / 'damaged' / 'metrics.jsonl').read_bytes() == harmed
  # A second start finds what the first has left; a later checkpoint remembers the gap.
  metrics = MetricsWriter(workdir, 8)
  assert (metrics.whole_from, metrics.remark) == (8, '') and metrics_problem(workdir) == ''
  assert metrics.record()['whole_from'] == 8
  metrics.close()
  assert len(list((workdir / 'damaged').iterdir())) == 1
  # Without checkpoint 8 the rows are made again, and nothing is missing any more.
  (workdir / 'checkpoints' / '8').rmdir()
  assert settle_metrics(workdir, 4)[1:] == (0, '')


def test_damage_before_all_checkpoints_leaves_no_row(workdir):
  (workdir / 'metrics.jsonl').write_bytes(b''.join(lines(workdir)[1:]))
  assert settle_metrics(workdir, 8).whole_from == 8 and steps_of(workdir) == []
  (workdir / 'metrics.jsonl').unlink()
  assert settle_metrics(workdir, 4).whole_from == 4


def test_runs_without_digests_go_on_with_one_line(workdir):
  for step in (4, 8):
    forget_checksums(workdir, step)
  kept = settle_metrics(workdir, 8)
  assert kept.whole_from == 0 and 'has no digest of step 8' in kept.remark
  assert steps_of(workdir) == list(range(1, 9)) and metrics_problem(workdir) == ''


def test_a_kill_right_after_a_save_leaves_the_older_digest_to_check(workdir):
  forget_checksums(workdir, 8)
  assert settle_metrics(workdir, 8)[1:] != (0, '') and steps_of(workdir) == list(range(1, 9))
  (workdir / 'metrics.jsonl').write_bytes(b''.join(lines(workdir)[1:]))
  assert settle_metrics(workdir, 8).whole_from == 8 and steps_of(workdir) == []


@pytest.mark.parametrize('content', [b'', b'[1]', b'{"metrics.jsonl": {"bytes": -1}}',
                                     b'{"metrics.jsonl": {"bytes": 9e99, "sha256": ""}}',
                                     b'{"metrics.jsonl": 3, "probe_tokens.npy": []}'])
def test_records_that_are_damaged_are_no_records(workdir, content):
  for step in (4, 8):
    (workdir / 'checksums' / f'{step}.record.json').write_bytes(content)
  assert 'no digest' in settle_metrics(workdir, 8).remark
  read_probe_tokens(workdir)


def test_records_go_with_their_checkpoints(workdir):
  (workdir / 'checkpoints' / '8' / '_METADATA').write_text('{}')
  (workdir / 'checkpoints' / '4').rmdir()
  write_checksums(workdir, 8)
  assert sorted(p.name for p in (workdir / 'checksums').iterdir()) == ['8.json', '8.record.json']


def test_changed_probe_inputs_are_refused_and_made_again(workdir, caplog):
  path = workdir / 'probe_tokens.npy'
  good = path.read_bytes()
  np.testing.assert_array_equal(read_probe_tokens(workdir), TOKENS)
  harmed = bytearray(good)
  harmed[-3] ^= 1
  path.write_bytes(harmed)
  with pytest.raises(ValueError, match='not the file that this run was probed with.*Training aga'):
    read_probe_tokens(workdir)
  with pytest.raises(ValueError, match='the data give other probe inputs'):
    write_probe_tokens(workdir, TOKENS + 1)
  assert path.read_bytes() == harmed
  write_probe_tokens(workdir, TOKENS)
  assert path.read_bytes() == good and 'made again from the data' in caplog.text
  path.unlink()
  write_probe_tokens(workdir, TOKENS)
  assert path.read_bytes() == good


def test_probe_inputs_of_runs_without_digests_stay(workdir):
  for step in (4, 8):
    forget_checksums(workdir, step)
  write_probe_tokens(workdir, TOKENS + 1)
  np.testing.assert_array_equal(read_probe_tokens(workdir), TOKENS)


def test_reports_and_sweeps_show_from_where_a_record_is_whole(workdir):
  (workdir / 'config.json').write_text(json.dumps(runs.config()))
  runs_files.write_outcome(workdir, 'done', step=8)
  assert read_run(workdir, 'a').metrics_note == ''
  (workdir / 'metrics.jsonl').write_bytes(b''.join(CHANGES['doubled'](lines(workdir))))
  changed = read_run(workdir, 'a')
  assert 'does not fit its digest of step 8' in changed.metrics_note
  # It is compared with a note, and is of no mean.
  assert (changed.status, changed.trusted().status) == ('done', 'unreadable')
  assert changed.trusted().error == changed.metrics_note
  assert 'set aside' not in runs_files.settle_finished(workdir, 8)
  assert runs_files.settle_finished(workdir, 8) == ''  # once
  assert runs_files.read_status(workdir)['record_whole_from'] == 8
  assert 'whole from step 8 on' in read_run(workdir, 'a').metrics_note
  table = as_markdown(read_states({workdir.name: Trial(workdir.name, None)}, workdir.parent), 'x')
  assert '| record whole from step 8 on |' in table


def test_a_sweep_tells_of_a_finished_trial_whose_rows_were_changed(workdir, monkeypatch, capsys):
  config = runs.config()
  (workdir / 'config.json').write_text(json.dumps(config))
  runs_files.write_outcome(workdir, 'done', step=8)
  monkeypatch.setattr(runner, 'write_analyses', lambda folder: None)
  (workdir / 'metrics.jsonl').write_bytes(b''.join(CHANGES['doubled'](lines(workdir))))
  trial = Trial(workdir.name, config)
  assert runner.run_trial(trial, workdir.parent) == 'done'
  assert 'does not fit its digest of step 8' in capsys.readouterr().err
  assert runs_files.read_status(workdir)['record_whole_from'] == 8
  assert runner.run_trial(trial, workdir.parent) == 'done' and not capsys.readouterr().err


def test_the_record_s_gap_reaches_a_status_that_a_kill_left_behind(workdir):
  runs_files.write_outcome(workdir, 'done', step=8)
  (workdir / 'metrics.jsonl').write_bytes(b''.join(CHANGES['doubled'](lines(workdir))))
  settle_metrics(workdir, 8)
  assert 'record_whole_from' not in runs_files.read_status(workdir)
  runs_files.settle_finished(workdir, 8)
  assert runs_files.read_status(workdir)['record_whole_from'] == 8


def test_a_finished_run_without_its_last_checkpoint_has_not_ended(workdir):
  (workdir / 'config.json').write_text(json.dumps(runs.config()))
  runs_files.write_outcome(workdir, 'done', step=8)
  assert runs_files.has_ended(workdir, runs.config())
  shutil.rmtree(workdir / 'checkpoints' / '8')
  assert not runs_files.has_ended(workdir, runs.config())
  shutil.rmtree(workdir / 'checkpoints')  # to save room: its numbers are there
  assert runs_files.has_ended(workdir, runs.config())


def test_rows_that_were_added_after_the_end_are_seen(workdir):
  with open(workdir / 'metrics.jsonl', 'ab') as file:
    file.write(lines(workdir)[3])
  assert metrics_problem(workdir)


def test_a_run_whose_config_is_gone_is_not_resumed_by_another(workdir):
  data = {'content': 'abc'}
  for name in ('checkpoints', 'metrics.jsonl', 'probe_tokens.npy'):
    with pytest.raises(ValueError, match='config.json is missing.*another --workdir'):
      with runs_files.lock_workdir(workdir, runs.config(optimizer__learning_rate=0.5), data):
        pass
    assert not (workdir / 'config.json').exists() and not (workdir / 'data.json').exists()
    path = workdir / name
    path.rename(workdir / f'{name}.gone')
  with runs_files.lock_workdir(workdir, runs.config(), data):  # a folder with nothing of a run in it
    pass
  (workdir / 'config.json').unlink()
  with pytest.raises(ValueError, match='data.json'):
    with runs_files.lock_workdir(workdir, runs.config(), data):
      pass


@pytest.mark.parametrize('content', [None, '{', '{}'])
def test_checkpoints_know_the_data_where_data_json_is_gone(workdir, content, caplog):
  (workdir / 'config.json').write_text(json.dumps(runs.config()))
  if content is not None:
    (workdir / 'data.json').write_text(content)
  with pytest.raises(ValueError, match='the content of the data'):
    with runs_files.lock_workdir(workdir, runs.config(), {'content': 'other'}):
      pass
  with runs_files.lock_workdir(workdir, runs.config(), {'content': 'abc'}):
    pass
  assert 'data.json' in caplog.text and 'is taken in its place' in caplog.text
  for step in (4, 8):
    forget_checksums(workdir, step)
  (workdir / 'data.json').unlink()
  with runs_files.lock_workdir(workdir, runs.config(), {'content': 'other'}):
    pass
  assert 'cannot be checked' in caplog.text


def test_files_that_a_kill_left_half_written_are_cleaned(workdir):
  (workdir / 'config.json').write_text(json.dumps(runs.config()))
  left = [workdir / 'checksums' / '.8.json.0123456789ab', workdir / '.status.json.0123456789ab']
  others = [workdir / '.hidden', workdir / 'checksums' / '.gitignore']
  for path in left + others:
    path.write_text('')
  with runs_files.lock_workdir(workdir, runs.config(), {'content': 'abc'}):
    pass
  assert not any(path.exists() for path in left) and all(path.exists() for path in others)


def test_a_record_is_read_from_bounded_files(workdir):
  with open(workdir / 'checksums' / '8.record.json', 'wb') as file:
    file.truncate(1 << 28)
  assert read_record(workdir, 8) == {} and record.stored_digests(workdir, 'data', 'content') == ['abc']


@contextlib.contextmanager
def held(workdir, kind):
  with open(workdir / 'lock', 'rb') as lock:
    fcntl.flock(lock, kind)
    yield lock


def test_a_run_waits_for_those_who_only_ask_whether_its_workdir_is_in_use(tmp_path, monkeypatch):
  lock_workdir = lambda: runs_files.lock_workdir(tmp_path, runs.config(), {'content': 'abc'})
  with lock_workdir():
    pass
  slept = []
  with held(tmp_path, fcntl.LOCK_SH) as question:  # as `in_use` holds it for a moment
    monkeypatch.setattr('time.sleep', lambda seconds: (
        slept.append(seconds), fcntl.flock(question, fcntl.LOCK_UN)))
    with lock_workdir():
      assert slept and runs_files.in_use(tmp_path)
  slept.clear()
  with held(tmp_path, fcntl.LOCK_EX), pytest.raises(runs_files.WorkdirLocked), lock_workdir():
    pass
  assert not slept  # a run does not end soon
  monkeypatch.setattr(runs_files, '_MOMENT', 0)
  with held(tmp_path, fcntl.LOCK_SH), pytest.raises(runs_files.WorkdirLocked), lock_workdir():
    pass
