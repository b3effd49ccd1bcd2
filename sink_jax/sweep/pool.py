"""Runs several small trials at a time on one machine, in a process each.

This process hands out the trials, and never touches JAX's devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from sink_jax.devices import keep_freed_memory
from sink_jax.io import compile_cache
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.process import EXIT_SAVED, GPU_MEMORY, call
from sink_jax.io.terminal import quiet_logs
from sink_jax.sweep.runner import record_outcome, run_trial
from sink_jax.sweep.summary import Bars
from sink_jax.sweep.trials import Trial
from sink_jax.train.config import as_dict, from_dict
from sink_jax.train.multihost import Interrupted, StopHandler
from sink_jax.train.plugins import import_plugins, plugins_of
from sink_jax.train.provenance import pass_on_command

_GRACE = 60  # seconds that a trial gets to save its state
# Exit codes of a trial's process. Python itself ends with 0 to 2.
_STATUSES = dict(
  enumerate(('done', 'diverged', 'not expressible', 'failed', 'not analysed', 'busy'), 3)
)


class SweepStopped(KeyboardInterrupt):
  """A signal asked the sweep to stop; the trials that were running are saved."""


def run_in_parallel(
  trials: Mapping[str, Trial], root: str | AnyPath, processes: int
) -> Iterator[tuple[str, str]]:
  """Runs each trial in a process; yields (name, status) as each ends.

  A process that dies takes only its trial with it, which is recorded as failed.

  Args:
    trials: by name, in the order in which they begin.
    root: the folder of the sweep; a trial goes to ROOT/NAME.
    processes: trials at a time.

  Raises:
    SweepStopped: a signal asked for it; the trials that were running have saved their states.
  """
  pass_on_command()
  waiting, running = list(trials), {}  # {place among the processes: (name, process)}
  bars = Bars(trials, to_path(root))
  with (
    StopHandler() as stop,
    _gpu_memory_divided(processes),
    _ending(running),
    contextlib.closing(bars),
  ):
    # Not `poll`, which asks jax how many processes there are, and so opens the devices.
    while (waiting or running) and not stop.asked:
      for place in range(processes):
        if place not in running and waiting:
          name = waiting.pop(0)
          running[place] = name, _started(trials[name], root, place, processes)
      wait([process.sentinel for _, process in running.values()], 0.5)  # seconds; then for a signal
      bars.show({place: name for place, (name, process) in running.items() if process.is_alive()})
      for place, (name, process) in list(running.items()):
        if process.exitcode is None:
          continue
        del running[place]
        if process.exitcode == EXIT_SAVED or stop.asked:  # a signal reached the process itself
          raise SweepStopped
        if process.exitcode not in _STATUSES:
          record_outcome(
            trials[name],
            root,
            'failed',
            error=f'its process died ({process.exitcode}); out of memory? Try fewer --processes.',
          )
        yield name, _STATUSES.get(process.exitcode, 'failed')
    if stop.asked:
      raise SweepStopped


def _started(trial: Trial, root: str | AnyPath, place: int, processes: int) -> BaseProcess:
  context = multiprocessing.get_context('spawn')  # the threads of JAX do not survive a fork
  # As text, since the process has to import the files of its components first.
  experiment = trial.experiment
  config = as_dict(experiment) if experiment else None
  files = plugins_of(experiment) if experiment else ''
  trial = dataclasses.replace(trial, experiment=None)
  process = context.Process(
    target=call,
    args=(f'{__name__}:work', trial, config, files, str(to_path(root)), place, processes),
  )
  # A terminal sends Ctrl-C to every process of its group. The trial inherits that it is ignored;
  # this process receives it and sends SIGTERM (`_ending`).
  handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    process.start()
  finally:
    signal.signal(signal.SIGINT, handler)
  return process


@contextlib.contextmanager
def _gpu_memory_divided(processes: int) -> Iterator[None]:
  """Gives each process that starts inside its share: the first one would take most of a GPU."""
  name = next(filter(os.environ.get, GPU_MEMORY), GPU_MEMORY[0])
  before = os.environ.get(name)
  os.environ[name] = f'{float(before or 0.92) / processes:.3f}'
  try:
    yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before


@contextlib.contextmanager
def _ending(running: Mapping[int, tuple[str, BaseProcess]]) -> Iterator[None]:
  """On exit asks the running trials to save, and waits for them up to a minute."""
  try:
    yield
  finally:
    for _, process in running.values():
      process.terminate()
    deadline = time.monotonic() + _GRACE
    try:
      for _, process in running.values():
        process.join(max(0.1, deadline - time.monotonic()))
    finally:  # also where a second Ctrl-C interrupts the wait
      for _, process in running.values():
        process.kill()


def work(
  trial: Trial, config: dict[str, Any] | None, plugins: str, root: str, place: int, processes: int
) -> None:
  """Runs a trial on its share of the cores; the exit code says how it ended.

  config: its experiment as config.json has it. plugins: the files of its components.
  """
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    share = cores[place * len(cores) // processes : (place + 1) * len(cores) // processes]
    os.sched_setaffinity(0, share or cores)  # all of them where there are more processes
  quiet_logs()
  compile_cache.enable()
  keep_freed_memory()
  if config:
    import_plugins(plugins)  # of the parent's config file
    trial = dataclasses.replace(trial, experiment=from_dict(config))
  try:
    status = run_trial(trial, root, show_progress=False)
  except Interrupted:
    raise SystemExit(EXIT_SAVED) from None
  except Exception as error:  # that may pass; the trial has recorded it
    print(f'{trial.name}: error: {error}', file=sys.stderr)
    status = 'failed'
  codes = {status: code for code, status in _STATUSES.items()}
  raise SystemExit(codes.get(status, codes['failed']))
