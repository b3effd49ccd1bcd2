"""Several small trials at a time on one machine: a process each, with its share of the cores."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection

from sink_jax.sweep.runner import record_failure, run_trial
from sink_jax.sweep.trials import Trial
from sink_jax.train.loop import EXIT_SAVED, Interrupted, quiet_logs
from sink_jax.train.provenance import pass_on_command

_LOOK_EVERY = 0.5  # seconds


class Stopped(RuntimeError):
  """The sweep was asked to stop; what was running is saved."""


@dataclasses.dataclass
class _Worker:
  process: multiprocessing.Process
  pipe: connection.Connection
  trial: str | None = None


def run_at_once(trials: Mapping[str, Trial], root, processes: int,
                at_rest: Callable[[list[str]], None]) -> Iterator[tuple[str, str]]:
  """Runs trials in so many processes; yields (name, status) as each ends.

  A process that dies takes only its trial with it, which is recorded as failed.

  Args:
    at_rest: called about twice a second with the names of the trials that are running.

  Raises:
    Stopped: SIGTERM or SIGINT came; the trials that were running have saved their states.
  """
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{0.9 / processes:.3f}')
  pass_on_command()
  waiting, workers, stopped = list(trials), [], []
  before = {number: signal.signal(number, lambda *_: stopped.append(True))
            for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    workers = [_started(i, processes, root) for i in range(min(processes, len(waiting)))]
    while True:
      for worker in workers:
        if worker.trial is None and waiting and not stopped:
          worker.trial = waiting.pop(0)
          worker.pipe.send(trials[worker.trial])
      busy = [worker for worker in workers if worker.trial is not None]
      if stopped or not busy:
        break
      at_rest([worker.trial for worker in busy])
      for pipe in connection.wait([worker.pipe for worker in busy], _LOOK_EVERY):
        worker = next(worker for worker in busy if worker.pipe is pipe)
        name, worker.trial = worker.trial, None
        try:
          yield name, pipe.recv()
        except EOFError:
          worker.process.join()
          code = worker.process.exitcode
          if code == EXIT_SAVED:
            stopped.append(True)
            continue
          error = (f'its process died ({signal.Signals(-code).name})' if code < 0
                   else f'its process ended with exit code {code}')
          record_failure(trials[name], root, error + '; out of memory? Try fewer --processes.')
          i = workers.index(worker)
          workers[i] = _started(i, processes, root)
          yield name, 'failed'
    if stopped:
      raise Stopped
  finally:
    _end(workers)
    for number, handler in before.items():
      signal.signal(number, handler)


def _started(number, processes, root):
  context = multiprocessing.get_context('spawn')  # a forked jax does not work
  ours, theirs = context.Pipe()
  started = context.Process(target=_work, args=(theirs, os.getpid(), number, processes, str(root)))
  started.start()
  theirs.close()
  return _Worker(started, ours)


def _end(workers):
  """Lets idle workers go, asks the others to save, and waits for them."""
  for worker in workers:
    worker.pipe.close()
    if worker.trial is not None and worker.process.is_alive():
      worker.process.terminate()
  for worker in workers:
    worker.process.join()


def _work(pipe, parent, number, processes, root):
  """Runs the trials that come through a pipe, until it is closed."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and tells us
  threading.Thread(target=_follow, args=(parent,), daemon=True).start()
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[number * len(cores) // processes:(number + 1) * len(cores) // processes]
    os.sched_setaffinity(0, mine or cores)
  quiet_logs()
  while True:
    try:
      trial = pipe.recv()
    except EOFError:
      return
    try:
      pipe.send(run_trial(trial, root, show_progress=False))
    except Interrupted:
      raise SystemExit(EXIT_SAVED) from None


def _follow(parent):
  """Ends this process when its parent is gone, killed in a way that told nobody."""
  while os.getppid() == parent:
    time.sleep(_LOOK_EVERY)
  os._exit(1)
