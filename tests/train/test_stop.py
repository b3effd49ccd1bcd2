"""Signals: what is saved, what is lost, and what stays ignored."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sink_jax.io.process import EXIT_SAVED, stop_signals
from sink_jax.train import loop
from sink_jax.train.checkpoint import Checkpoints
from sink_jax.train.loop import train
from sink_jax.train.multihost import Interrupted, StopHandler, Unsaved
from tests.train import runs

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def hearing():
  """Tests that run in the background are deaf to some signals."""
  before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('number', STOPPING)
def test_a_request_that_nothing_acted_on_is_passed_on(number):
  heard = []
  signal.signal(number, lambda number, frame: heard.append(number))
  with StopHandler() as stop:
    assert not stop.asked
    signal.raise_signal(number)
    assert stop.asked and stop.poll() and not heard
  assert heard == [number]
  with pytest.raises(Interrupted), StopHandler() as stop:
    signal.raise_signal(number)
    raise Interrupted(1, 2)
  assert heard == [number]


@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_stays_ignored(number):
  signal.signal(number, signal.SIG_IGN)
  assert number not in stop_signals()
  with StopHandler() as stop:
    signal.raise_signal(number)
    assert not stop.asked and signal.getsignal(number) == signal.SIG_IGN


def test_the_second_interrupt_ends_and_other_signals_do_not_count():
  with pytest.raises(Unsaved, match='second Ctrl-C.*the same command resumes'), StopHandler() as stop:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
      signal.raise_signal(number)
    assert stop.asked
    signal.raise_signal(signal.SIGINT)


def interrupted_while_saving(monkeypatch):
  """Presses Ctrl-C in step 4, and again while its checkpoint is being written."""
  make_train_step, save = loop.make_train_step, Checkpoints.save

  def make(*args, **options):
    update = make_train_step(*args, **options)

    def asked(state, *inputs):
      if int(state.step) + 1 == 4:
        signal.raise_signal(signal.SIGINT)
      return update(state, *inputs)

    return asked

  def saving(self, *arguments):
    save(self, *arguments)
    signal.raise_signal(signal.SIGINT)

  monkeypatch.setattr(loop, 'make_train_step', make)
  monkeypatch.setattr(Checkpoints, 'save', saving)


def test_a_second_one_ends_like_a_kill(tmp_path, monkeypatch):
  interrupted_while_saving(monkeypatch)
  with pytest.raises(Unsaved):
    train(runs.config(checkpoint_every=0), tmp_path, show_progress=False)
  assert json.loads((tmp_path / 'status.json').read_text())['status'] == 'running'


def wait_for(process, what):
  """Waits until /proc/PID/status of a process says what is expected."""
  deadline = time.monotonic() + 60
  while not what(Path(f'/proc/{process.pid}/status').read_text()):
    assert process.poll() is None and time.monotonic() < deadline, process.communicate()
    time.sleep(0.01)


def has(status, kind, number):
  """Is a signal among those that a process handles (SigCgt) or ignores (SigIgn)?"""
  return int(re.search(rf'{kind}:\s*(\w+)', status)[1], 16) >> (number - 1) & 1


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='reads /proc')
@pytest.mark.parametrize('command', ['train', 'sweep'])
def test_an_interrupt_while_preparing_is_one_line(tmp_path, command):
  config = runs.ROOT / 'configs' / ('base.py' if command == 'train' else 'quickstart.py')
  signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup, for the process as well
  process = subprocess.Popen(
      [sys.executable, '-m', 'sink_jax', command, f'--config={config}',
       f'--workdir={tmp_path / "run"}'], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      env=dict(os.environ, PYTHONPATH=str(runs.ROOT)))
  wait_for(process, lambda status: has(status, 'SigCgt', signal.SIGTERM))
  process.send_signal(signal.SIGHUP)
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=60)
  assert process.returncode == EXIT_SAVED and not out
  assert err.split('\n')[1:] == ['Stopped; nothing was being trained. The same command continues '
                                 'from here.', ''], err
  assert not (tmp_path / 'run').exists()
