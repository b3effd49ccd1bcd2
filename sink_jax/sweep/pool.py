"""Runs several small trials at a time on one machine, in a process each.

A worker process runs one trial after the other, so that it imports JAX once, on its share of the
cores. This process hands out the trials, and never touches JAX's devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import absl.logging

from sink_jax.io import compile_cache
from sink_jax.io.exit_code import EXIT_SAVED
from sink_jax.io.parent_process import call
from sink_jax.io.paths import AnyPath
from sink_jax.sweep.runner import record_failure, run_trial
from sink_jax.sweep.trials import Trial
from sink_jax.train.outcome import Interrupted
from sink_jax.train.provenance import pass_on_command
from sink_jax.train.stop_handler import StopHandler

_POLL = 0.5  # seconds between two looks for a signal
_GRACE = 60  # seconds that a worker gets to save its state


class SweepStopped(KeyboardInterrupt):
  """By any signal the sweep was asked to stop; what was running is saved."""


@dataclasses.dataclass
class _Worker:
  """A process, this end of its pipe, and the name of the trial that it runs (None: it is idle)."""

  process: BaseProcess
  pipe: Connection
  trial: str | None = None

  def assign(self, trial: Trial) -> None:
    """Sends the worker a trial to run."""
    self.trial = trial.name
    with contextlib.suppress(OSError):  # the process is dead, which `outcome` will notice
      self.pipe.send(trial)

  def outcome(self) -> str | None:
    """Receives the status of the worker's trial; None where the process has died."""
    try:
      return self.pipe.recv()
    except (EOFError, OSError):
      self.process.join()
      return None


def run_in_parallel(trials: Mapping[str, Trial], root: str | AnyPath,
                    processes: int) -> Iterator[tuple[str, str]]:
  """Runs trials in processes of their own; yields (name, status) as each ends.

  A process that dies takes only its trial with it, which is recorded as failed.

  Args:
    trials: by name, in the order in which they begin.
    root: the folder of the sweep; a trial goes to ROOT/NAME.
    processes: trials at a time.

  Raises:
    SweepStopped: a signal asked for it; the trials that were running have saved their states.
    Unsaved: Ctrl-C came a third time meanwhile.
  """
  # A worker without a trial would waste its share of the cores and of the GPU's memory.
  processes = min(processes, len(trials))
  # XLA would reserve most of a GPU's memory for the first of the processes.
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{0.9 / max(1, processes):.3f}')
  pass_on_command()
  waiting, workers = list(trials), []
  with StopHandler() as stop, _ending(workers):
    for i in range(processes):
      workers.append(_started(i, processes, root))
    # `asked` and not `poll`: the latter asks jax how many processes there are, which opens the
    # devices.
    while not stop.asked:
      for worker in workers:
        if worker.trial is None and waiting:
          worker.assign(trials[waiting.pop(0)])
      busy = [worker for worker in workers if worker.trial is not None]
      if not busy:
        return
      for pipe in wait([worker.pipe for worker in busy], _POLL):
        # A pipe is also ready when its other end is closed, which is how the death of a worker
        # shows.
        i = next(i for i, worker in enumerate(workers) if worker.pipe is pipe)
        name, status = workers[i].trial, workers[i].outcome()
        workers[i].trial = None
        if status is None:
          code = workers[i].process.exitcode
          if stop.asked or code == EXIT_SAVED:  # a signal reached the worker itself
            raise SweepStopped
          record_failure(trials[name], root, f'its process died ({_cause(code)}); out of memory? '
                         'Try fewer --processes.')
          status, workers[i] = 'failed', _started(i, processes, root)
        yield name, status
    raise SweepStopped


def _started(number: int, processes: int, root: str | AnyPath) -> _Worker:
  """Starts a worker, the number-th of `processes` from 0."""
  context = multiprocessing.get_context('spawn')  # the threads of JAX do not survive a fork
  pipe, workers_end = context.Pipe()
  process = context.Process(
      target=call, args=(f'{__name__}:work', workers_end, number, processes, str(root)))
  # A terminal sends Ctrl-C to every process of its group. The worker inherits that it is ignored;
  # this process hears it, and passes it on as SIGTERM (`_ending`).
  handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    process.start()
  finally:
    signal.signal(signal.SIGINT, handler)
  workers_end.close()  # so that reading the pipe ends when the worker dies
  return _Worker(process, pipe)  # pyright: ignore[reportArgumentType]  PipeConnection on Windows


def _cause(code: int) -> str:
  """Describes an exit code: the name of the signal where it is negative."""
  if code >= 0:
    return f'exit code {code}'
  try:
    return signal.Signals(-code).name
  except ValueError:  # of the real-time signals only the first and the last have a name
    return f'signal {-code}'


@contextlib.contextmanager
def _ending(workers: list[_Worker]) -> Iterator[None]:
  """Ends idle workers on leaving, asks the others to save, and waits for them for a while."""
  try:
    yield
  finally:
    for worker in workers:
      worker.pipe.close()
      if worker.trial is not None and worker.process.is_alive():
        worker.process.terminate()
    deadline = time.monotonic() + _GRACE
    try:
      for worker in workers:
        worker.process.join(max(0.1, deadline - time.monotonic()))
    finally:  # also where a third Ctrl-C interrupts the wait
      for worker in workers:
        if worker.process.is_alive():
          worker.process.kill()


def work(pipe: Connection, number: int, processes: int, root: str) -> None:
  """Runs the trials that come through a pipe, until it is closed; the body of a worker.

  Between trials there is nothing to save, as `call` has it; training installs a handler that saves.
  """
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    share = cores[number * len(cores) // processes:(number + 1) * len(cores) // processes]
    os.sched_setaffinity(0, share or cores)  # all of them where there are more processes
  absl.logging.set_verbosity(absl.logging.ERROR)  # libraries are silent, as in the sweep itself
  compile_cache.enable()  # after the affinity: programs are kept by the number of cores
  while True:
    try:
      trial = pipe.recv()
    except (EOFError, OSError):
      return
    try:
      status = run_trial(trial, root, show_progress=False)
    except Interrupted:
      raise SystemExit(EXIT_SAVED) from None
    with contextlib.suppress(OSError):  # the sweep has stopped, and nobody receives it
      pipe.send(status)
