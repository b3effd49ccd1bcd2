"""Several small trials at a time on one machine: a process each, with its share of the cores."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing import connection

from sink_jax.io import compile_cache
from sink_jax.io.exit_code import EXIT_SAVED, exit_saved_until_training
from sink_jax.io.parent_process import end_with_parent
from sink_jax.sweep.runner import record_failure, run_trial
from sink_jax.sweep.trials import Trial
from sink_jax.train.loop import quiet_logs
from sink_jax.train.outcome import Interrupted
from sink_jax.train.provenance import pass_on_command
from sink_jax.train.stop_handler import StopHandler

_LOOK_EVERY = 0.5  # seconds
_PATIENCE = 60  # seconds that a process gets to save its state


class Stopped(RuntimeError):
  """The sweep was asked to stop; what was running is saved."""


@dataclasses.dataclass
class _Worker:
  process: multiprocessing.Process
  pipe: connection.Connection
  trial: str | None = None

  def take(self, trial: Trial) -> None:
    self.trial = trial.name
    with contextlib.suppress(OSError):  # it is dead already, which the next look will find
      self.pipe.send(trial)

  def outcome(self) -> str | None:
    """The status of its trial, once the pipe has something; None if the process died."""
    try:
      return self.pipe.recv()
    except (EOFError, OSError):
      self.process.join()
      return None


def run_at_once(trials: Mapping[str, Trial], root,
                processes: int) -> Iterator[tuple[str, str]]:
  """Runs trials in so many processes; yields (name, status) as each ends.

  A process that dies takes only its trial with it, which is recorded as failed.

  Raises:
    Stopped: a signal asked for it; the trials that were running have saved their states.
    Unsaved: Ctrl-C came a third time meanwhile.
  """
  processes = min(processes, len(trials))
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{0.9 / max(1, processes):.3f}')
  pass_on_command()
  waiting, workers = list(trials), []
  with StopHandler() as stop, _ended(workers):
    for i in range(processes):
      workers.append(_started(i, processes, root))
    while not stop.asked:
      for worker in workers:
        if worker.trial is None and waiting:
          worker.take(trials[waiting.pop(0)])
      busy = [worker for worker in workers if worker.trial is not None]
      if not busy:
        return
      for pipe in connection.wait([worker.pipe for worker in busy], _LOOK_EVERY):
        i = next(i for i, worker in enumerate(workers) if worker.pipe is pipe)
        name, status = workers[i].trial, workers[i].outcome()
        workers[i].trial = None
        if status is None:
          code = workers[i].process.exitcode
          if stop.asked or code == EXIT_SAVED:  # somebody asked the process itself to stop
            raise Stopped
          record_failure(trials[name], root, f'its process died ({_cause(code)}); out of memory? '
                         'Try fewer --processes.')
          status, workers[i] = 'failed', _started(i, processes, root)
        yield name, status
    raise Stopped


def _started(number, processes, root):
  context = multiprocessing.get_context('spawn')  # a forked jax does not work
  ours, theirs = context.Pipe()
  started = context.Process(target=_work, args=(theirs, number, processes, str(root)))
  # It inherits this, so that Ctrl-C does not end it while it is still starting; we tell it.
  handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    started.start()
  finally:
    signal.signal(signal.SIGINT, handler)
  theirs.close()
  return _Worker(started, ours)


def _cause(code):
  return signal.Signals(-code).name if code < 0 else f'exit code {code}'


@contextlib.contextmanager
def _ended(workers):
  """Lets idle workers go, asks the others to save, and waits for them, but not for ever."""
  try:
    yield
  finally:
    for worker in workers:
      worker.pipe.close()
      if worker.trial is not None and worker.process.is_alive():
        worker.process.terminate()
    deadline = time.monotonic() + _PATIENCE
    try:
      for worker in workers:
        worker.process.join(max(0.1, deadline - time.monotonic()))
    finally:  # also where a third Ctrl-C ends the waiting
      for worker in workers:
        if worker.process.is_alive():
          worker.process.kill()


def _work(pipe, number, processes, root):
  """Runs the trials that come through a pipe, until it is closed."""
  end_with_parent()
  # Between trials there is nothing to save; a trial that trains has its own answer.
  exit_saved_until_training()
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[number * len(cores) // processes:(number + 1) * len(cores) // processes]
    os.sched_setaffinity(0, mine or cores)
  quiet_logs()
  compile_cache.enable()  # for the cores of this process
  while True:
    try:
      trial = pipe.recv()
    except (EOFError, OSError):
      return
    try:
      status = run_trial(trial, root, show_progress=False)
    except Interrupted:
      raise SystemExit(EXIT_SAVED) from None
    with contextlib.suppress(OSError):  # the sweep has stopped, and asks no more
      pipe.send(status)
