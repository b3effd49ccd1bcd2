"""Groups of trials on one device: equal to each trial alone, through stops and divergence."""

import contextlib
import gc
import json
import shutil
import signal
import threading
import weakref

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.batches import Dataset
from sink_jax.sweep import batched
from sink_jax.sweep.batched import run_batched
from sink_jax.sweep.runner import run_trial
from sink_jax.sweep.trials import Trial
from sink_jax.train import group
from sink_jax.train.checksums import saved_steps
from sink_jax.train.loop import train
from sink_jax.train.outcome import Interrupted
from sink_jax.train.run_dir import lock_workdir, read_config, read_data_summary, read_status
from tests.train import runs

THREE = {name: dict(seed=i % 2, optimizer__learning_rate=rate)
         for i, (name, rate) in enumerate(dict(a=1e-3, b=1e-3, c=5e-4).items())}


def trials(table=THREE, **changes):
  return {name: Trial(name, runs.config(**row | changes)) for name, row in table.items()}


def assert_close(ours, theirs):
  """Rows of a trial in a group and alone; rates are counts, so they are left out."""
  assert [(r['kind'], r['step']) for r in ours] == [(r['kind'], r['step']) for r in theirs]
  for a, b in zip(ours, theirs, strict=True):
    assert a.keys() == b.keys()
    rel = 1e-4 if a['kind'] == 'probe' else 1e-5
    for key in a.keys() - {'kind', 'sink', 'sink_1', 'null_p99'}:
      if a[key] is not None:
        np.testing.assert_allclose(a[key], b[key], rtol=rel, atol=1e-8, err_msg=key)


def assert_same_bits(root, other, *names):
  for name in names:
    assert runs.rows(root / name) == runs.rows(other / name)
    ours, theirs = sj.load_run(root / name), sj.load_run(other / name)
    assert ours.step == theirs.step
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """Three trials of eight steps as a group, in one go."""
  root = tmp_path_factory.mktemp('whole')
  assert dict(run_batched(trials(), root)) == dict.fromkeys('abc', 'done')
  return root


@pytest.mark.parametrize('changes', [
    dict(data__source="TextFolder(path='{}')"),
    pytest.param(dict(microbatches=2), marks=pytest.mark.full),
    pytest.param(dict(steps=5, data__source='TriggerAveraging()', model__ffn='none'),
                 marks=pytest.mark.full),
    pytest.param(dict(steps=5, optimizer__rule='Muon(eps=0.1)'), marks=pytest.mark.full),
    pytest.param(dict(steps=5, optimizer__rule='OrthoAdam(eps=0.1)'), marks=pytest.mark.full),
], ids=['corpus', 'tokens', 'continuous', 'muon', 'orthoadam'])
def test_each_trial_of_a_group_equals_the_trial_alone(tmp_path, changes):
  text = tmp_path / 'text'
  text.mkdir()
  for i in range(40):
    (text / f'{i}.txt').write_text(f'{i} is a number, and {i * i} its square. ' * 9)
  if 'data__source' in changes:
    changes = changes | dict(data__source=changes['data__source'].format(text),
                             data__cache_dir=str(tmp_path / 'cache'))
  table = trials(**dict(steps=20, checkpoint_every=0, log_every=5, probe__every=10,
                        validation__every=10) | changes)
  assert dict(run_batched(table, tmp_path / 'group')) == dict.fromkeys('abc', 'done')
  for name in 'bc':
    run_trial(table[name], tmp_path / 'alone', show_progress=False)
    assert_close(runs.rows(tmp_path / 'group' / name), runs.rows(tmp_path / 'alone' / name))
    assert 'group_widths' not in read_status(tmp_path / 'alone' / name)


def test_a_group_leaves_the_record_of_a_run_for_each_trial(whole):
  assert json.loads((whole / 'a.group.json').read_text()) == {'width': 3, 'trials': list('abc')}
  for name in 'abc':
    status = read_status(whole / name)
    assert (status['status'], status['step'], status['group_widths']) == ('done', 8, {'0': 3})
    assert saved_steps(whole / name) == [8, 4]
    kinds = [(row['kind'], row['step']) for row in runs.rows(whole / name)]
    assert [s for k, s in kinds if k == 'train'] == list(range(1, 9))
    for kind in ('probe', 'valid'):
      assert [s for k, s in kinds if k == kind] == [0, 4, 8]


def stop_at(monkeypatch, step):
  """Sends SIGTERM to ourselves after a step of the group, whose calls are of one step then."""
  report = group._Member.report

  def report_and_stop(member, before, *rest):
    report(member, before, *rest)
    if before + 1 == step:
      signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(group, '_SECONDS', 0)
  monkeypatch.setattr(group._Member, 'report', report_and_stop)


def test_stopped_and_resumed_from_own_steps_equals_in_one_go(whole, tmp_path, monkeypatch):
  with monkeypatch.context() as patch, pytest.raises(Interrupted, match='saved at step 6 of 8'):
    stop_at(patch, 5)
    list(run_batched(trials(), tmp_path))
  for name in 'abc':
    status = read_status(tmp_path / name)
    assert (status['status'], status['step'], saved_steps(tmp_path / name)) == (
        'interrupted', 6, [6, 4])
  for folder in ('checkpoints', 'checksums'):  # as if it was killed before b was saved
    shutil.rmtree(tmp_path / 'b' / folder / '6', ignore_errors=True)
  for path in (tmp_path / 'b' / 'checksums').glob('6.*'):
    path.unlink()
  # c runs with the others next time: its slot rests, and the width stays.
  assert dict(run_batched(trials(dict(list(THREE.items())[:2])), tmp_path)) == {
      'a': 'done', 'b': 'done'}
  assert read_status(tmp_path / 'c')['status'] == 'interrupted'
  assert dict(run_batched(trials(), tmp_path)) == dict.fromkeys('abc', 'done')
  assert_same_bits(tmp_path, whole, *'abc')
  assert read_status(tmp_path / 'c')['group_widths'] == {'0': 3}


@pytest.mark.parametrize('others', ['', 'b'])
def test_killed_between_its_last_save_and_its_status_a_trial_ends_as_done(whole, tmp_path, others):
  shutil.copy(whole / 'a.group.json', tmp_path)
  for name in 'abc':
    shutil.copytree(whole / name, tmp_path / name)
  status = read_status(tmp_path / 'a') | {'status': 'running'}
  (tmp_path / 'a' / 'status.json').write_text(json.dumps(status))
  for name in others:
    shutil.rmtree(tmp_path / name)
  assert dict(run_batched(trials(), tmp_path)) == dict.fromkeys('abc', 'done')
  assert_same_bits(tmp_path, whole, *'abc')
  assert read_status(tmp_path / 'a')['step'] == 8


def test_a_diverged_trial_leaves_its_neighbours_bits_as_they_are(whole, tmp_path, capsys):
  table = trials(THREE | {'b': dict(seed=1, optimizer__learning_rate=1e30)})
  assert dict(run_batched(table, tmp_path)) == {'a': 'done', 'b': 'diverged', 'c': 'done'}
  assert_same_bits(tmp_path, whole, 'a', 'c')
  assert 'b: Step' in capsys.readouterr().err
  run_trial(table['b'], tmp_path / 'alone', show_progress=False)
  ours, theirs = (read_status(folder / 'b') for folder in (tmp_path, tmp_path / 'alone'))
  assert ours['step'] == theirs['step'] and ours['group_widths'] == {'0': 3}
  assert len(runs.rows(tmp_path / 'b', 'train')) == ours['step'] - 1


def test_a_trial_of_a_group_goes_on_alone(whole, tmp_path):
  shutil.copytree(whole / 'a', tmp_path / 'a')
  shutil.rmtree(tmp_path / 'a' / 'checkpoints' / '8')
  train(trials()['a'].config, tmp_path / 'a', show_progress=False)
  assert read_status(tmp_path / 'a')['group_widths'] == {'0': 3, '4': 1}
  assert_close(runs.rows(tmp_path / 'a'), runs.rows(whole / 'a'))


@pytest.fixture
def trained(monkeypatch):
  """What would be trained: names of a group's slots, or of a trial alone."""
  trained = []

  def train_group(group, root, begun):
    trained.append(group.names)
    begun(list(group.runs))
    return dict.fromkeys(group.runs)

  monkeypatch.setattr('sink_jax.sweep.batched.train_group', train_group)
  monkeypatch.setattr('sink_jax.sweep.batched.run_trial', lambda trial, root: (
      trained.append(trial.name) or 'done'))
  monkeypatch.setattr(group.Group, 'compile', lambda self: None)
  return trained


def test_trials_without_a_partner_run_alone_and_one_line_says_why(
    tmp_path, capsys, monkeypatch, trained):
  odd = {'d': dict(attention__kv_bias='KBias()', seed=7), 'e': dict(optimizer__schedule='constant')}
  table = trials(THREE | odd | {'f': dict(data__source='BigramBackcopy(length=16, seed=3)')})
  list(run_batched(table, tmp_path))
  assert trained == [('a', 'b', 'c', 'e'), 'd', 'f']
  said = [line for line in capsys.readouterr().err.splitlines() if line.startswith('Alone')]
  assert len(said) == 1 and "d (unlike a: attention.kv_bias: 'NoBias()' -> 'KBias()')" in said[0]
  assert 'f (unlike a: data.content' in said[0] and 'BigramBackcopy' in said[0]
  trained.clear()  # nothing has been saved, so another width is as good
  list(run_batched(table, tmp_path, width=2))
  assert trained == [('a', 'b'), ('c', 'e'), 'd', 'f']
  monkeypatch.setattr('sink_jax.sweep.batched.saved_steps', lambda folder: folder.name == 'c')
  trained.clear()
  table['g'] = Trial('g', runs.config(seed=9))
  list(run_batched(table, tmp_path))
  assert trained == [('c', 'e'), ('a', 'b', 'g'), 'd', 'f']


def test_a_group_that_has_ended_is_let_go(tmp_path, monkeypatch, trained):
  groups, alive = [], []

  def count(*_):
    gc.collect()
    alive.append(sum(ref() is not None for ref in groups))
    return 'done'

  def train_group(group, root, begun):
    count()
    groups.append(weakref.ref(group))
    return dict.fromkeys(group.runs)

  monkeypatch.setattr(batched, 'train_group', train_group)
  monkeypatch.setattr(batched, 'run_trial', count)
  list(run_batched(trials(dict.fromkeys('abcdefg', {})), tmp_path, width=2))
  assert alive == [0] * 4  # at the beginning of three groups and of a trial alone


def test_a_group_that_begins_voids_the_records_that_overlap_it_and_have_not_begun(
    tmp_path, trained):
  list(run_batched(trials(), tmp_path, width=2))
  assert [path.name for path in tmp_path.glob('*.group.json')] == ['a.group.json']
  (tmp_path / 'z.group.json').write_text('{"trials": ["y", "z"]}')  # of other trials
  list(run_batched(trials({name: THREE[name] for name in 'cab'}), tmp_path))
  assert trained == [('a', 'b'), 'c', ('c', 'a', 'b')]
  assert sorted(path.name for path in tmp_path.glob('*.group.json')) == [
      'c.group.json', 'z.group.json']


def test_a_group_that_another_process_trains_keeps_its_record(tmp_path, trained):
  list(run_batched(trials(), tmp_path))
  record = (tmp_path / 'a.group.json').read_bytes()
  with lock_workdir(tmp_path / 'c', trials()['c'].config, {}):  # nothing is saved there so far
    list(run_batched(trials(), tmp_path, width=2))
  assert trained == [('a', 'b', 'c')] * 2
  assert (tmp_path / 'a.group.json').read_bytes() == record


def test_a_group_waits_for_workdirs_that_a_killed_sweep_still_holds(
    whole, tmp_path, monkeypatch):
  for name in 'ab':
    shutil.copytree(whole / name, tmp_path / name)
  shutil.copy(whole / 'a.group.json', tmp_path)
  with contextlib.ExitStack() as other:
    other.enter_context(lock_workdir(
        tmp_path / 'c', read_config(whole / 'c'), read_data_summary(whole / 'c')))
    monkeypatch.setattr('time.sleep', lambda seconds: other.close())
    assert dict(run_batched(trials(), tmp_path)) == dict.fromkeys('abc', 'done')
  assert_same_bits(tmp_path, whole, 'c')


def test_whatever_is_wrong_with_one_trial_leaves_the_others_their_group(
    tmp_path, monkeypatch, trained):
  def prepare_or_fail(config, workdir, *rest):
    if workdir.name == 'b':
      raise TypeError('b')
    return prepare_run(config, workdir, *rest)

  prepare_run = batched.prepare_run
  monkeypatch.setattr(batched, 'prepare_run', prepare_or_fail)
  list(run_batched(trials(), tmp_path))
  assert trained == [('a', 'c'), 'b']


def test_a_group_is_recorded_once_its_workdirs_are_held(tmp_path, monkeypatch):
  monkeypatch.setattr(group.Group, 'compile', lambda self: None)
  monkeypatch.setattr(group, 'PATIENCE', 0)
  with contextlib.ExitStack() as others:
    for name in 'abc':
      others.enter_context(lock_workdir(tmp_path / name, trials()[name].config, {}))
    assert dict(run_batched(trials(), tmp_path)) == dict.fromkeys('abc', 'busy')
  assert not list(tmp_path.glob('*.group.json'))


def test_asked_to_stop_while_programs_compile_it_compiles_no_more(tmp_path, monkeypatch):
  begun, stopped = [], threading.Event()

  def compiled(self):
    begun.append(self.names)
    if len(begun) > 1:
      stopped.wait(5)

  def stop(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr('os.cpu_count', lambda: 1)
  monkeypatch.setattr(group.Group, 'compile', compiled)
  monkeypatch.setattr('sink_jax.sweep.batched.train_group', stop)
  threads = set(threading.enumerate())
  try:
    with pytest.raises(KeyboardInterrupt):
      list(run_batched(trials(dict.fromkeys('abcdef', {})), tmp_path, width=2))
  finally:
    stopped.set()
  for thread in set(threading.enumerate()) - threads:
    thread.join()
  assert begun in ([('a', 'b')], [('a', 'b'), ('c', 'd')])


def test_a_program_that_cannot_be_compiled_fails_its_trials(tmp_path, capsys, monkeypatch):
  def compiled(self):
    raise RuntimeError('RESOURCE_EXHAUSTED: no memory')

  monkeypatch.setattr(group.Group, 'compile', compiled)
  assert dict(run_batched(trials(), tmp_path)) == dict.fromkeys('abc', 'failed')
  assert 'fit: begin with a smaller --width, such as 2' in capsys.readouterr().err
  list(run_batched(trials(), tmp_path, width=2))
  assert 'A group of 2 does not fit: leave out --batched.' in capsys.readouterr().err
  record = tmp_path / 'a.group.json'
  record.write_text('{"trials": ["a", "b", "c"]}')
  monkeypatch.setattr(batched, 'saved_steps', lambda folder: [4])  # it has begun
  list(run_batched(trials(), tmp_path, width=2))
  said = capsys.readouterr().err
  assert f'--width=2 is for groups that begin: that of {record} keeps its width of 3.' in said
  assert f'remove {record} and begin with a smaller --width, such as 2.' in said
  monkeypatch.setattr('jax.device_count', lambda: 8)
  with pytest.raises(ValueError, match='8 are here: show it one'):
    list(run_batched(trials(), tmp_path))


def test_what_is_wrong_with_one_trial_ends_that_one_alone(whole, tmp_path):
  shutil.copytree(whole / 'a', tmp_path / 'a')
  (tmp_path / 'b').mkdir()
  (tmp_path / 'b' / 'metrics.jsonl').write_text('{}')  # of a run whose config is gone
  table = trials() | {'bad': Trial('bad', runs.config(data__source="Jsonl(path='x')"))}
  shutil.copy(whole / 'a.group.json', tmp_path)
  assert dict(run_batched(table, tmp_path)) == {
      'a': 'done', 'b': 'failed', 'c': 'done', 'bad': 'failed'}
  assert_same_bits(tmp_path, whole, 'a', 'c')
