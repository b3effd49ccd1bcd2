"""Child processes that somebody asks to end."""

import multiprocessing
import os
import signal
import time

import pytest

from sink_jax.io.exit_code import EXIT_SAVED
from sink_jax.io.parent_process import call


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_slow_imports_ends_a_child_as_saved(tmp_path, monkeypatch, number):
  (tmp_path / 'slow_module.py').write_text(
      f'import pathlib, time\npathlib.Path({str(tmp_path / "importing")!r}).touch()\ntime.sleep(60)')
  monkeypatch.syspath_prepend(tmp_path)  # which a child inherits
  # So it does a signal that is ignored, as SIGHUP is where the tests run under nohup.
  before = signal.signal(number, signal.SIG_DFL)
  child = multiprocessing.get_context('spawn').Process(target=call, args=('slow_module:run',))
  try:
    child.start()
  finally:
    signal.signal(number, before)
  deadline = time.monotonic() + 60
  while not (tmp_path / 'importing').exists():
    assert child.is_alive() and time.monotonic() < deadline
    time.sleep(0.02)
  os.kill(child.pid, number)
  child.join(30)
  assert child.exitcode == EXIT_SAVED
