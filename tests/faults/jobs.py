"""Training jobs of one or more processes: the real command, started, watched, signalled."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from sink_jax.train.checkpoint import has_checksums, saved_steps, step_folder
from sink_jax.train.metrics import read_metrics
from tests.train import runs

EVERY = 20  # steps between saves
CONFIG = runs.SMALL | {'checkpoint_every': EVERY, 'probe.every': 0, 'validation.every': 0}
PATIENCE = 600  # seconds for anything that has to come: the machine may be busy


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a job runs: processes, devices of each, the mesh, the interpreter."""

  processes: int = 1
  devices: int = 1
  mesh: str = ''  # such as 'fsdp=2,tensor=2'
  python: str = sys.executable

  def flags(self):
    return [f'--config.mesh.{part}' for part in self.mesh.split(',') if part]


class Job:
  """One start of the training command on a workdir."""

  def __init__(self, workdir, place=Place(), only=None, environment=(), log=None,
               **changes):
    """only: of several processes, the one that is started. log: of the first, if elsewhere."""
    workdir = Path(workdir)
    self.workdir, self._place = workdir, place
    self.start = newest(workdir)
    self._status_before = _changed_at(workdir / 'status.json')
    values = CONFIG | {key.replace('__', '.'): value for key, value in changes.items()}
    flags = [f'--config.{key}={value}' for key, value in values.items()]
    command = ['nice', '-n', '10', place.python, '-P', '-m', 'sink_jax.train', '--config='
               f'{runs.ROOT / "configs" / "base.py"}', f'--workdir={workdir}', *flags,
               *place.flags()]
    address = f'127.0.0.1:{runs.free_port()}'
    self.logs, self.processes = [], []
    for index in range(place.processes) if only is None else [only]:
      several = {} if place.processes == 1 else {
          'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(place.processes),
          'JAX_PROCESS_ID': str(index)}
      path = log or workdir.with_name(f'{workdir.name}-{index}.log')
      path.parent.mkdir(parents=True, exist_ok=True)
      with open(path, 'wb') as file:
        self.processes.append(subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=_environment(place) | several | dict(environment)))
      self.logs.append(path)

  def wait(self, seconds=PATIENCE) -> list[int | None]:
    """Exit codes, signals as 128 + number; None of what had to be ended."""
    deadline, codes = time.monotonic() + seconds, []
    for process in self.processes:
      try:
        code = process.wait(max(0.1, deadline - time.monotonic()))
        codes.append(code if code >= 0 else 128 - code)
      except subprocess.TimeoutExpired:
        codes.append(None)
    self.end()
    return codes

  def end(self):
    for process in self.processes:
      if process.poll() is None:
        process.kill()
        process.wait()

  def running(self):
    return all(process.poll() is None for process in self.processes)

  def is_recorded(self):
    """Has this start come to where training begins?"""
    return _changed_at(self.workdir / 'status.json') != self._status_before

  def steps(self):
    """The last step this start has made; its first step before that."""
    return max(self.start, last_row(self.workdir)) if self.is_recorded() else self.start

  def await_steps(self, count=1):
    """Waits until that many steps are made; returns whether the job is still running."""
    deadline = time.monotonic() + PATIENCE
    while self.running() and time.monotonic() < deadline:
      if self.steps() >= self.start + count:
        return True
      time.sleep(0.02)
    return False

  def phase(self):
    if not self.is_recorded():
      return 'start-up'
    if self.steps() == self.start:
      return 'first step'
    checkpoints = step_folder(self.workdir, 0).parent
    saving = checkpoints.is_dir() and any('tmp' in path.name for path in checkpoints.iterdir())
    latest = newest(self.workdir)
    return 'saving' if saving or latest and not has_checksums(self.workdir, latest) else 'steps'

  def output(self, index=0):
    return self.logs[index].read_text(errors='replace')

  def resumed_from(self):
    """The step that the output tells of, or None."""
    found = re.search(r'resuming from step (\d+) of', self.output())
    return int(found[1]) if found else None


def handles(process, number=signal.SIGTERM) -> bool:
  """Has a process come to where it handles a signal?"""
  try:
    status = Path(f'/proc/{process.pid}/status').read_text()
  except OSError:
    return True
  return bool(int(re.search(r'SigCgt:\s*(\w+)', status)[1], 16) >> (number - 1) & 1)


def newest(workdir) -> int:
  return next(iter(saved_steps(workdir)), 0)


def last_row(workdir) -> int:
  rows = read_metrics(workdir, 'train')
  return rows[-1]['step'] if rows else 0


def state_of(workdir, step):
  """The whole saved state as NumPy arrays, whatever devices it was saved on."""
  handler = ocp.PyTreeCheckpointHandler()
  saved = step_folder(workdir, step) / 'state'
  as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
                          dict(handler.metadata(saved).items()))
  state = handler.restore(saved, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
  handler.close()
  return state


def same(a, b) -> bool:
  """Are two trees equal, bit for bit? Names of the nodes that hold them may differ."""
  a, b = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (a, b))
  return len(a) == len(b) and all(
      x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
      for x, y in zip(a, b))


def distance(a, b) -> float:
  """The largest difference of two trees, as a part of the largest value of the array."""
  return max(float(np.max(np.abs(x.astype(np.float64) - y)) / max(1e-9, np.max(np.abs(y))))
             for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def compared(workdir, reference, steps) -> str:
  """What makes a finished run another one than the reference; '' if nothing does."""
  if saved_steps(workdir)[:1] != [steps]:
    return f'it ended with checkpoints {saved_steps(workdir)}'
  if runs.rows(workdir) != runs.rows(reference):
    return 'its metrics differ from those of a run that was left alone'
  if not same(state_of(workdir, steps), state_of(reference, steps)):
    return 'its state differs from that of a run that was left alone'
  return ''


def _environment(place):
  flags = f'--xla_force_host_platform_device_count={place.devices}'
  return dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(runs.ROOT), XLA_FLAGS=flags)


def _changed_at(path):
  try:
    return path.stat().st_mtime_ns
  except OSError:
    return None
