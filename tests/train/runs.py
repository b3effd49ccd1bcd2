"""A run small enough to train within a second, for tests."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from configs import base
from sink_jax.models.transformer import init_params
from sink_jax.train.checkpoint import Checkpoints
from sink_jax.train.metrics import read_metrics
from sink_jax.train.workdir import Workdir

ROOT = Path(__file__).parents[2]

SMALL = {
  'steps': 8,
  'batch_size': 8,
  'log_every': 1,
  'checkpoint_every': 4,
  'model.size': 'tiny',
  'model.d_model': 16,
  'model.ffn_hidden': 24,
  'model.dtype': 'float32',
  'data.source': 'BigramBackcopy(length=16)',
  'data.context': 16,
  'optimizer.learning_rate': 1e-2,
  'optimizer.warmup_steps': 2,
  'probe.every': 4,
  'probe.sequences': 4,
  'probe.length': 16,
  'validation.every': 4,
  'validation.batches': 1,
}


def config(**changes):
  """The small run. In the names of changes, __ stands for a dot."""
  changes = {key.replace('__', '.'): value for key, value in changes.items()}
  return base.experiment({'small': SMALL | changes}, 'small')


def start(workdir, *arguments, devices=1, job=None, **changes):
  """Starts `python -m sink_jax train` on the small run; returns the process.

  job: (port, processes, index of this one), if it is one of several.
  """
  changes = {key.replace('__', '.'): value for key, value in changes.items()}
  flags = [f'--config.{key}={value}' for key, value in (SMALL | changes).items()]
  flags_of_xla = (
    os.environ.get('XLA_FLAGS', ''),
    f'--xla_force_host_platform_device_count={devices}',
  )
  environment = dict(
    os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT), XLA_FLAGS=' '.join(flags_of_xla)
  )
  if job:
    port, processes, index = job
    environment |= {
      'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
      'JAX_NUM_PROCESSES': str(processes),
      'JAX_PROCESS_ID': str(index),
    }
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      'sink_jax',
      'train',
      f'--config={ROOT / "configs" / "base.py"}',
      f'--workdir={workdir}',
      *flags,
      *arguments,
    ],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


# Ports below those that Linux gives to connections. Another process could take one of those in the
# seconds before the job listens on it. Processes of tests begin far apart.
_PORTS = itertools.cycle(range(20_000 + 97 * os.getpid() % 10_000, 32_000))


def free_port():
  for port in _PORTS:
    with socket.socket() as free, contextlib.suppress(OSError):
      free.bind(('127.0.0.1', port))
      return port


def run_python(*words, devices=1, cwd=ROOT, **environment):
  """Runs `python WORDS` on this many devices; returns what it prints. It must succeed."""
  flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={devices}'
  done = subprocess.run(
    [sys.executable, *words],
    capture_output=True,
    text=True,
    cwd=cwd,
    env=os.environ
    | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': flags}
    | environment,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def start_job(workdir, *arguments, processes=2, devices=4, **changes):
  """Starts a job of several processes on the small run; returns them in order."""
  port = free_port()
  return [
    start(workdir, *arguments, devices=devices, job=(port, processes, i), **changes)
    for i in range(processes)
  ]


def wait_for(condition, *processes, seconds=180):
  """Waits until a condition holds. Fails if one of the processes ends before that."""
  deadline = time.monotonic() + seconds
  while not condition():
    for process in processes:
      assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline, 'it did not happen'
    time.sleep(0.05)


def last_step(workdir):
  """The last step with metrics; 0 if there is none."""
  return max((row['step'] for row in read_metrics(workdir) if row['kind'] == 'train'), default=0)


def rows(workdir, *kinds):
  return without_timings((Path(workdir) / 'metrics.jsonl').read_text().splitlines(), *kinds)


def without_timings(lines, *kinds):
  """Metric rows without their timings, which differ between runs."""
  return [
    {k: v for k, v in row.items() if k not in ('tokens_per_second', 'mfu')}
    for row in map(json.loads, lines)
    if row['kind'] in (kinds or ('train', 'valid', 'probe', 'graft'))
  ]


def untrained(workdir, experiment):
  """Writes the folder of a run at step 2, as training leaves it; its parameters are random."""
  with Workdir(workdir, experiment, {'content': 'random'}):
    pass
  np.save(workdir / 'probe_tokens.npy', np.random.default_rng(0).integers(0, 64, (6, 12)))
  checkpoints = Checkpoints(workdir)
  checkpoints.save(2, {'params': init_params(experiment.model_config(), 0)})
  checkpoints.close()
  return workdir
