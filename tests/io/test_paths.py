"""Users without a home, and files that may not grow."""

import errno
import os
import resource
import signal

import numpy as np
import pytest

from sink_jax.io import paths
from sink_jax.io.files import named_in_errors, write_atomically
from sink_jax.io.paths import cache_root, to_path
from sink_jax.train.metrics import Metrics


@pytest.fixture
def homeless(monkeypatch):
  """No HOME, and no entry of this user in the list of users."""
  def nobody(*_):
    raise KeyError('no such user')

  monkeypatch.delenv('HOME', raising=False)
  monkeypatch.delenv('SINK_JAX_CACHE', raising=False)
  monkeypatch.setattr('pwd.getpwuid', nobody)


def test_a_user_without_a_home_hears_of_the_variable(homeless, monkeypatch, tmp_path):
  with pytest.raises(ValueError, match='~/.cache/sink_jax: .*SINK_JAX_CACHE=/PATH'):
    cache_root()
  with pytest.raises(ValueError, match='~/runs: .*write the path in full'):
    to_path('~/runs')
  monkeypatch.setenv('SINK_JAX_CACHE', str(tmp_path))
  assert cache_root() == tmp_path and cache_root('/else') == paths.expanded('/else')


@pytest.fixture
def small_files():
  """No file of this process may become larger than 64 KiB."""
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, before)
  signal.signal(signal.SIGXFSZ, handler)


def large_metrics(folder):
  metrics = Metrics(folder, 0)
  try:
    for step in range(100):
      metrics.write('train', step, {'values': [0.0] * 1000})
  finally:
    metrics.abandon()


@pytest.mark.parametrize('write, name', [
    (large_metrics, 'metrics.jsonl'),
    (lambda folder: write_atomically(folder / 'probe_tokens.npy', bytes(1 << 17)),
     'probe_tokens.npy')])
def test_a_limit_of_sizes_names_the_file(small_files, tmp_path, write, name):
  with pytest.raises(OSError, match=f'ulimit -f.*{name}') as error:
    write(tmp_path)
  assert error.value.errno == errno.EFBIG and os.path.basename(error.value.filename) == name


def test_other_errors_stay_as_they_are():
  for error in (FileNotFoundError(errno.ENOENT, 'no', 'there'), OSError('words')):
    with pytest.raises(OSError) as caught, named_in_errors('here'):
      raise error
    assert caught.value is error
