"""Compiled programs on disk: second starts, damaged entries, other settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sink_jax.io.compile_cache import VARIABLE

ROOT = Path(__file__).parents[2]
PROGRAMS = '''
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
'''


def hits(folder, **environment):
  done = subprocess.run(
      [sys.executable, '-c', PROGRAMS], capture_output=True, text=True, cwd=ROOT,
      env={name: value for name, value in os.environ.items() if 'COMPILATION_CACHE' not in name} | {
          'JAX_PLATFORMS': 'cpu', VARIABLE: str(folder)} | environment)
  assert done.returncode == 0, done.stderr
  return int(done.stdout)


def test_a_second_start_compiles_nothing_and_damage_costs_one_compilation(tmp_path):
  assert hits(tmp_path) == 0
  first = hits(tmp_path)
  assert first >= 4
  entries = sorted(tmp_path.glob('*-cache'))
  entries[0].write_bytes(entries[0].read_bytes()[:100])  # written in part by a process that died
  next(tmp_path.glob('*-atime')).unlink()
  assert 0 < hits(tmp_path) <= first


@pytest.mark.parametrize('folder, own', [('', {}), ('elsewhere', {'JAX_COMPILATION_CACHE_DIR': 'mine'})])
def test_an_empty_value_and_a_cache_of_the_user_s_own_stand(tmp_path, folder, own):
  own = {name: str(tmp_path / value) for name, value in own.items()}
  assert hits(folder and tmp_path / folder, **own) == 0
  assert not (tmp_path / 'elsewhere').exists()
