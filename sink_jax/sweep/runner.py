"""Trains one trial, analyses it, and records how it ended."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sink_jax.analyses.training import write_analyses
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.pretrained.source import open_source
from sink_jax.sweep.trials import Trial
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.checksums import saved_steps
from sink_jax.train.loop import train
from sink_jax.train.multihost import broadcast_from_process0, is_first
from sink_jax.train.outcome import Diverged, Interrupted
from sink_jax.train.run_dir import (
  PATIENCE,
  LockLost,
  WorkdirLocked,
  has_ended,
  read_status,
  settle_finished,
  write_outcome,
)

_KEPT = ('done', 'diverged')  # statuses that a later failure does not replace


def run_trial(trial: Trial, root: str | AnyPath, show_progress: bool = True) -> str:
  """Trains a trial in ROOT/NAME from where it stands, analyses it, and returns its status.

  All processes of a job call this function and get the same answer; the first of them writes and
  analyses.

  Returns:
    A status of `read_status`; 'failed' where the trial could not even begin; 'not analysed' where
    the analysis failed after the training; 'busy' where another process trains it.

  Raises:
    Interrupted: the process was asked to stop; the state is saved.
  """
  def train_rest(folder, config):
    if not broadcast_from_process0(lambda: has_ended(folder, config), ValueError):
      _train(trial.name, config, folder, show_progress)

  return finish_trial(trial, root, train_rest)


def finish_trial(trial: Trial, root: str | AnyPath,
                 train_rest: Callable[[AnyPath, Mapping[str, Any]], None]) -> str:
  """Does what `run_trial` does, with `train_rest(folder, config)` in the place of the training."""
  folder = to_path(root) / trial.name
  try:
    if trial.config is None:
      return broadcast_from_process0(lambda: _not_expressible(trial, folder), ValueError)
    train_rest(folder, trial.config)
  except WorkdirLocked:
    return 'busy'
  except Interrupted:
    raise
  except Diverged as error:  # the run has recorded it
    if is_first():
      print(f'{trial.name}: {error}', file=sys.stderr)
  except Exception as error:  # whatever it is, the other trials can still run
    # All processes raise the same ValueError. Another error may be that of this process alone; were
    # it swallowed, the others would wait for this one in the next collective.
    if jax.process_count() > 1 and not isinstance(error, ValueError):
      raise
    _print_error(trial, error)
    if is_first() and not (folder / 'config.json').exists():  # a run that has begun has a record
      with contextlib.suppress(OSError):  # where the folder cannot be made: that was the error
        record_failure(trial, root, str(error))
    return 'failed'
  return broadcast_from_process0(lambda: _analysed(trial, folder))


def _analysed(trial: Trial, folder: AnyPath) -> str:
  """Returns the status of a trial that has ended, after its analyses where it is done."""
  status = read_status(folder)['status']
  try:
    if status == 'done':
      steps = saved_steps(folder)
      if steps and (line := settle_finished(folder, steps[0])):
        print(f'{trial.name}: {line}', file=sys.stderr)
      write_analyses(folder)
  except Exception as error:  # as above; the run itself is complete
    _print_error(trial, error)
    return 'not analysed'
  return status


def record_failure(trial: Trial, root: str | AnyPath, error: str) -> None:
  """Records in a trial's folder that it failed, where its process could not."""
  folder = to_path(root) / trial.name
  status = read_status(folder)
  if status['status'] not in _KEPT:
    # A trial that goes on later is still one that was trained in groups of these widths.
    widths = {key: status[key] for key in ('group_widths',) if key in status}
    write_outcome(folder, 'failed', error=error, label=dict(trial.label), **widths)


def _not_expressible(trial: Trial, folder: AnyPath) -> str:
  """Records why a trial has no counterpart at the budget."""
  if (folder / 'config.json').exists():
    raise ValueError(f'{folder} holds a run of another budget: use another --workdir.')
  write_outcome(folder, 'not expressible', reason=trial.reason, label=dict(trial.label))
  return 'not expressible'


def _train(name: str, config: Mapping[str, Any], folder: AnyPath, show_progress: bool) -> None:
  """Trains; waits for a workdir that is still held by a process killed a moment ago."""
  began = time.monotonic()
  while True:
    try:
      train(config, folder, name=name, show_progress=show_progress, open_source=open_source)
      return
    except LockLost:  # another process has taken the workdir over, and keeps it
      raise
    except WorkdirLocked:
      if broadcast_from_process0(lambda: time.monotonic() - began > PATIENCE):
        raise
      time.sleep(0.5)


def _print_error(trial: Trial, error: Exception) -> None:
  """Prints an error in a line, after its traceback where it is not one that a user can cause."""
  if not isinstance(error, (ValueError, CheckpointError)):
    traceback.print_exception(error)
  print(f'{trial.name}: error: {error}', file=sys.stderr)
