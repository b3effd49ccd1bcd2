"""Child processes that are asked to end, and programs that one process compiles for the next."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sink_jax.io.process import EXIT_SAVED, call

ROOT = Path(__file__).parents[2]
PROGRAMS = """
import collections
import jax, jax.numpy as jnp
from jax import monitoring
from sink_jax.io import compile_cache

seen = collections.Counter()
monitoring.register_event_listener(lambda event, **_: seen.update([event]))
compile_cache.enable()
for n in range(1, 5):
  assert float(jax.jit(lambda x: jnp.sin(x) @ x.T + n)(jnp.eye(3))[0, 0]) > n
print(seen['/jax/compilation_cache/cache_hits'])
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_slow_imports_ends_a_child_as_saved(tmp_path, monkeypatch, number):
  begun = str(tmp_path / 'importing')
  (tmp_path / 'slow_module.py').write_text(
    f'import pathlib, time\npathlib.Path({begun!r}).touch()\ntime.sleep(60)'
  )
  monkeypatch.syspath_prepend(tmp_path)  # the child inherits this
  # A child also inherits ignored signals, and SIGHUP is ignored when the tests run under nohup.
  before = signal.signal(number, signal.SIG_DFL)
  child = multiprocessing.get_context('spawn').Process(target=call, args=('slow_module:run',))
  try:
    child.start()
  finally:
    signal.signal(number, before)
  deadline = time.monotonic() + 60
  while not (tmp_path / 'importing').exists():
    assert child.is_alive()
    assert time.monotonic() < deadline
    time.sleep(0.02)
  os.kill(child.pid, number)
  child.join(30)
  assert child.exitcode == EXIT_SAVED


def hits(folder, **environment):
  done = subprocess.run(
    [sys.executable, '-c', PROGRAMS],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={name: value for name, value in os.environ.items() if 'COMPILATION_CACHE' not in name}
    | {'JAX_PLATFORMS': 'cpu', 'SINK_JAX_COMPILE_CACHE': str(folder)}
    | environment,
  )
  assert done.returncode == 0, done.stderr
  return int(done.stdout)


def test_a_second_start_compiles_nothing_and_other_settings_stand(tmp_path):
  assert hits(tmp_path / 'a') == 0
  assert hits(tmp_path / 'a') >= 4
  assert hits('') == 0
  assert hits(tmp_path / 'elsewhere', JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'mine')) == 0
  assert not (tmp_path / 'elsewhere').exists()
