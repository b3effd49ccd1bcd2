"""Signals: what is saved, what is lost, and which signals stay ignored."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sink_jax.io.process import EXIT_SAVED, stop_signals
from sink_jax.train.multihost import Interrupted, StopHandler, Unsaved
from tests.train import runs

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def hearing():
  """Restores the default handling, because tests in the background ignore some signals."""
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
  with (
    pytest.raises(Unsaved, match='second Ctrl-C.*the same command resumes'),
    StopHandler() as stop,
  ):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
      signal.raise_signal(number)
    assert stop.asked
    signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='reads /proc')
@pytest.mark.parametrize('command', ['train', 'sweep'])
def test_an_interrupt_while_preparing_is_one_line(tmp_path, command):
  config = runs.ROOT / 'configs' / ('base.py' if command == 'train' else 'quickstart.py')
  signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup; the process inherits it
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'sink_jax',
      command,
      f'--config={config}',
      f'--workdir={tmp_path / "run"}',
    ],
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env=dict(os.environ, PYTHONPATH=str(runs.ROOT)),
  )
  status = Path(f'/proc/{process.pid}/status')
  caught = lambda: int(re.search(r'SigCgt:\s*(\w+)', status.read_text())[1], 16)
  runs.wait_for(lambda: caught() >> (signal.SIGTERM - 1) & 1, process)
  process.send_signal(signal.SIGHUP)
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=60)
  assert process.returncode == EXIT_SAVED and not out
  assert err.split('\n')[1:] == [
    'Stopped; nothing was being trained. The same command continues from here.',
    '',
  ], err
  assert not (tmp_path / 'run').exists()
