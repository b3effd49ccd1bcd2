"""Failures that may pass end a training with an exit code of their own, and not for ever."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error

import jax
import pytest

from sink_jax.train import checkpoint, failures
from sink_jax.train.checkpoint import CheckpointError, saved_steps
from sink_jax.train.loop import train
from tests.train import runs


class HttpError(Exception):
  """gcsfs.retry.HttpError as it is without a JSON answer."""


class ClientResponseError(Exception):
  """Of aiohttp."""

  def __init__(self, status):
    self.status = status
    super().__init__(f'{status}, message=...')


class Response:
  status_code = 502


class OfRequests(Exception):
  response = Response()


def of_jax(message):
  return jax.errors.JaxRuntimeError(message)


def caused(error, cause):
  error.__cause__ = cause
  return error


PASSING = [
  of_jax('UNAVAILABLE: TPU health check failed, 1 of 16 chips'),
  of_jax('ABORTED: The TPU driver was restarted'),
  of_jax('DATA_LOSS: Attempting to fetch value instead of handling error'),
  of_jax('DEADLINE_EXCEEDED: Barrier timed out'),
  of_jax('INTERNAL: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:4711'),
  RuntimeError("Unable to initialize backend 'tpu': UNKNOWN: /dev/vfio/0 is busy"),
  ConnectionResetError(errno.ECONNRESET, 'Connection reset by peer'),
  TimeoutError('timed out'),
  socket.gaierror(-3, 'Temporary failure in name resolution'),
  OSError(errno.ESTALE, 'Stale file handle'),
  HttpError('503 Service Unavailable'),
  ClientResponseError(500),
  ClientResponseError(429),
  OfRequests(),
  urllib.error.HTTPError('https://a', 504, 'Gateway Timeout', None, None),
  caused(CheckpointError('Checkpoint 4 could not be written'), HttpError('503 Service')),
  caused(ValueError('gs://a cannot be reached'), TimeoutError()),
  ValueError('UNAVAILABLE: Error writing "gs://a/b"'),  # TensorStore's
]
LASTING = [
  of_jax('RESOURCE_EXHAUSTED: Out of memory while trying to allocate'),
  of_jax('INTERNAL: RESOURCE_EXHAUSTED: Out of memory'),
  of_jax('INVALID_ARGUMENT: a shape'),
  OSError(errno.ENOSPC, 'No space left on device'),
  caused(CheckpointError('Checkpoint 4 could not be written'), OSError(errno.ENOSPC, 'full')),
  OSError(errno.EACCES, 'Permission denied'),
  ValueError('batch_size is not UNAVAILABLE'),
  HttpError('403 Forbidden'),
  ClientResponseError(404),
  failures.Repeated(of_jax('INTERNAL: a kernel')),
  KeyError('a defect'),
]


@pytest.mark.parametrize('error', PASSING, ids=repr)
def test_what_may_pass_is_started_again(error):
  assert failures.passes(error)


@pytest.mark.parametrize('error', LASTING, ids=repr)
def test_what_stays_is_not_started_again(error):
  assert not failures.passes(error)


def test_an_error_raised_while_another_was_handled_is_taken_with_it():
  try:
    try:
      raise ConnectionResetError
    except ConnectionResetError:
      raise KeyError('cleaning up')
  except KeyError as error:
    assert failures.passes(error)
  try:
    try:
      raise ConnectionResetError
    except ConnectionResetError:
      raise KeyError('the real one') from None
  except KeyError as error:
    assert not failures.passes(error)


def fail_at(patch, number, error):
  """Lets the batch of this number, from 0, fail: threads of an earlier training read some too."""
  from sink_jax.data.dataset import SyntheticDataset

  make = SyntheticDataset._training_batch

  def flaky(self, rows, seed):
    if rows[0] // runs.SMALL['batch_size'] == number:
      raise error
    return make(self, rows, seed)

  patch.setattr(SyntheticDataset, '_training_batch', flaky)


def starts(workdir):
  file = workdir / 'restarts.json'
  return json.loads(file.read_text())['starts'] if file.exists() else 0


def end_with(workdir, monkeypatch, number, error, **changes):
  """Trains until the batch of this number fails; returns the error that ends it."""
  with monkeypatch.context() as patch, pytest.raises(Exception) as ended:
    fail_at(patch, number, error)
    train(runs.config(**changes), workdir, show_progress=False)
  return ended.value


def test_a_run_that_never_reaches_a_checkpoint_ends(tmp_path, monkeypatch):
  for start in range(1, failures.STARTS + 1):
    ended = end_with(tmp_path, monkeypatch, 1, ConnectionResetError())
    assert isinstance(ended, ConnectionResetError) and starts(tmp_path) == start
  refused = end_with(tmp_path, monkeypatch, 1, ConnectionResetError())
  assert isinstance(refused, ValueError) and not failures.passes(refused)
  assert starts(tmp_path) == 0  # a person's start is a first one


def test_a_new_checkpoint_counts_anew_and_an_end_forgets(tmp_path, monkeypatch):
  every = dict(checkpoint_every=1)
  for start in range(1, failures.STARTS + 2):  # each takes a step and saves it
    end_with(tmp_path, monkeypatch, start, ConnectionResetError(), **every)
    assert starts(tmp_path) == 1
  train(runs.config(**every), tmp_path, show_progress=False)
  assert starts(tmp_path) == 0


def test_an_internal_error_is_started_again_once(tmp_path, monkeypatch):
  internal = of_jax('INTERNAL: a kernel that was compiled wrong')
  assert failures.passes(end_with(tmp_path, monkeypatch, 1, internal))
  assert isinstance(end_with(tmp_path, monkeypatch, 1, internal), failures.Repeated)
  # Other processes of a job ended with a code to start again: the next start tells all of them.
  refused = end_with(tmp_path, monkeypatch, 1, internal)
  assert isinstance(refused, ValueError) and not failures.passes(refused)
  assert failures.passes(end_with(tmp_path, monkeypatch, 1, internal))  # a person started it


def test_a_run_that_is_done_can_be_opened_any_number_of_times(tmp_path):
  for _ in range(failures.STARTS + 2):
    train(runs.config(steps=1), tmp_path, show_progress=False)
    assert starts(tmp_path) == 0


def test_a_store_that_fails_while_a_checkpoint_is_read_is_not_damage(tmp_path, monkeypatch):
  train(runs.config(), tmp_path, show_progress=False)
  before = saved_steps(tmp_path)

  def unavailable(*_):
    raise ValueError('UNAVAILABLE: Error reading "gs://bucket/manifest.ocdbt": HTTP 503')

  with monkeypatch.context() as patch, pytest.raises(ValueError, match='HTTP 503'):
    patch.setattr(checkpoint.ocp.PyTreeCheckpointHandler, 'metadata', unavailable)
    train(runs.config(), tmp_path, show_progress=False)
  assert saved_steps(tmp_path) == before and not (tmp_path / 'damaged').exists()


# Process 1 of a job meets a failure at its third batch.
SCRIPT = """
import os, sys
import jax
from sink_jax.cli.main import run
from sink_jax.data.dataset import SyntheticDataset
make, count = SyntheticDataset._training_batch, [0]
def flaky(self, *arguments):
  count[0] += 1
  if count[0] == 3 and os.environ['JAX_PROCESS_ID'] == '1':
    raise jax.errors.JaxRuntimeError('UNAVAILABLE: a chip')
  return make(self, *arguments)
SyntheticDataset._training_batch = flaky
run('train', sys.argv[1:])
"""


def test_all_processes_of_a_job_end_with_a_code_to_start_again(tmp_path):
  port, job = runs.free_port(), []
  words = [f'--config.{key}={value}' for key, value in (runs.SMALL | {'steps': 10**6}).items()]
  for i in range(2):
    environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'PYTHONPATH': str(runs.ROOT),
      'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
      'JAX_NUM_PROCESSES': '2',
      'JAX_PROCESS_ID': str(i),
    }
    job.append(
      subprocess.Popen(
        [sys.executable, '-c', SCRIPT, f'--workdir={tmp_path}', *words],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  said = [process.communicate(timeout=120)[1] for process in job]
  codes = [process.returncode for process in job]
  assert codes[1] == failures.EXIT_PASSING and 'It may pass' in said[1], said
  assert codes[0] in (failures.EXIT_PASSING, -signal.SIGABRT), said
