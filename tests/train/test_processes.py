"""Jobs of several processes: equal to one process, stopped, killed, resumed with another number."""

import contextlib
import json
import signal

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.train.failures import EXIT_PASSING
from sink_jax.train.checkpoint import saved_steps, verify
from sink_jax.train.loop import train
from sink_jax.train.multihost import Interrupted, init_distributed
from tests.train import runs
from tests.train.test_loop import stop_after

LONG = dict(steps=100000, checkpoint_every=4, probe__every=4, validation__every=4)


def end(processes, seconds=120):
  """Waits for a job; returns exit codes and what each process printed."""
  said = []
  try:
    for process in processes:
      said.append('\n'.join(process.communicate(timeout=seconds)))
  finally:
    for process in processes:
      process.kill()
  return [process.returncode for process in processes], said


def train_until(step, workdir, monkeypatch):
  """Trains in this process, on all of its eight devices."""
  with monkeypatch.context() as patch, pytest.raises(Interrupted):
    stop_after(patch, step)
    train(runs.config(**LONG), workdir, show_progress=False)


def assert_equal_rows(ours, theirs):
  for a, b in zip(ours, theirs, strict=True):
    assert a.keys() == b.keys()
    for key in a:
      if a[key] is None or isinstance(a[key], str):
        assert a[key] == b[key]
      elif isinstance(a[key], dict):
        assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-6)
      else:
        # Both sum the same numbers in float32, but devices sum in another order: 1e-6.
        np.testing.assert_allclose(a[key], b[key], rtol=1e-6, atol=1e-6, err_msg=str((key, a, b)))


def test_one_process_two_and_one_again_equal_one(tmp_path, monkeypatch):
  # One process saves, two resume and stop on a signal to one of them, and one resumes.
  changing, alone = tmp_path / 'changing', tmp_path / 'alone'
  train_until(6, changing, monkeypatch)
  job = runs.start_job(changing, **LONG)
  with contextlib.ExitStack() as cleanup:
    cleanup.callback(lambda: [process.kill() for process in job])
    runs.wait_for(lambda: runs.last_step(changing) >= 10, *job)
    job[1].send_signal(signal.SIGTERM)
    codes, said = end(job)
  assert codes == [42, 42], said
  stopped = json.loads((changing / 'status.json').read_text())
  assert stopped['status'] == 'interrupted' and saved_steps(changing)[0] == stopped['step'] >= 10
  assert verify(changing, stopped['step']) is None
  # Each process has hashed the files that it wrote.
  files = [changing / 'checksums' / f'{stopped["step"]}.{i}.json' for i in (0, 1)]
  assert all(json.loads(file.read_text()) for file in files)
  assert all(f'Stopped and saved at step {stopped["step"]}' in text for text in said)
  assert 'resuming from step 6' in said[0] and 'resuming' not in said[1]
  last = stopped['step'] + 3
  for workdir in (changing, alone):
    train_until(last, workdir, monkeypatch)
  assert_equal_rows(*(runs.rows(workdir) for workdir in (changing, alone)))
  ours, theirs = (jax.tree.leaves(sj.load_run(workdir).params) for workdir in (changing, alone))
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_dead_process_ends_the_job_and_only_unsaved_steps_are_lost(tmp_path):
  job = runs.start_job(tmp_path, devices=1, **LONG | dict(probe__every=0, validation__every=0))
  runs.wait_for(lambda: runs.last_step(tmp_path) >= 9, *job)
  job[0].kill()  # the coordinator: the others notice at once
  codes, said = end(job, seconds=60)
  # The runtime ends the survivor, unless an operation between them fails first.
  assert codes[0] == -signal.SIGKILL and codes[1] in (-signal.SIGABRT, EXIT_PASSING), said[1]
  assert sj.load_run(tmp_path).step == saved_steps(tmp_path)[0] >= 4  # step 8 was being saved


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(seed=1), ['Process 1 has another config'] * 2),
    (dict(wandb='sinks'), ['process 1: wandb =', 'pip install wandb']),
  ],
)
def test_what_one_process_cannot_begin_ends_all(tmp_path, change, words):
  port = runs.free_port()
  begin = lambda i, **changes: runs.start(tmp_path / 'run', job=(port, 2, i), **changes)
  codes, said = end([begin(0), begin(1, **change)], seconds=60)
  assert codes == [1, 1] and all(map(str.__contains__, said, words)), said
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'settings',
  [
    dict(JAX_NUM_PROCESSES='2'),
    dict(JAX_COORDINATOR_ADDRESS='a', JAX_NUM_PROCESSES='2', JAX_PROCESS_ID='0'),
  ],
)
def test_settings_of_a_job_that_are_wrong_are_refused(settings, monkeypatch):
  for name, value in settings.items():
    monkeypatch.setenv(name, value)
  before = signal.getsignal(signal.SIGTERM)
  try:
    with pytest.raises(ValueError, match='JAX_NUM_PROCESSES=2.*: set JAX_COORDINATOR_ADDRESS='):
      init_distributed()
  finally:
    signal.signal(signal.SIGTERM, before)
