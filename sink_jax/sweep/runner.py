"""One trial: train it, analyse it, record whatever happened."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from sink_jax.analyses.training import write_analyses
from sink_jax.io.paths import to_path
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

_KEPT = ('done', 'diverged')  # records that nothing replaces


def run_trial(trial: Trial, root, show_progress: bool = True) -> str:
  """Trains a trial in ROOT/NAME, or what is left of it; returns what became of it.

  All processes of a job call it and get the same answer; the first one writes and analyses.
  That is a status of `read_status`, 'failed' where it could not even begin, 'not analysed'
  where only that failed after the training, or 'busy' where another process is at it.

  Raises:
    Interrupted: the process was asked to stop; the state is saved.
  """
  def train_rest(folder):
    if not broadcast_from_process0(lambda: has_ended(folder, trial.config), ValueError):
      _train(trial, folder, show_progress)

  return concluded(trial, root, train_rest)


def concluded(trial: Trial, root, train_rest: Callable[[Any], Any]) -> str:
  """`run_trial`, where `train_rest(folder)` does what is left of the training."""
  folder = to_path(root) / trial.name
  try:
    if trial.config is None:
      return broadcast_from_process0(lambda: _not_expressible(trial, folder), ValueError)
    train_rest(folder)
  except WorkdirLocked:
    return 'busy'
  except Interrupted:
    raise
  except Diverged as error:  # recorded by the run itself
    if is_first():
      print(f'{trial.name}: {error}', file=sys.stderr)
  except Exception as error:  # whatever it is, the other trials can still run
    if jax.process_count() > 1 and not isinstance(error, ValueError):
      raise  # this process may be the only one that has it
    _tell(trial, error)
    if is_first() and not (folder / 'config.json').exists():  # what is there keeps its record
      record_failure(trial, root, str(error))
    return 'failed'
  return broadcast_from_process0(lambda: _analysed(trial, folder))


def _analysed(trial, folder):
  """The status of a trial that has ended, with its analyses where it is done."""
  status = read_status(folder)['status']
  try:
    if status == 'done':
      steps = saved_steps(folder)
      if steps and (line := settle_finished(folder, steps[0])):
        print(f'{trial.name}: {line}', file=sys.stderr)
      write_analyses(folder)
  except Exception as error:  # as above; the run itself is good
    _tell(trial, error)
    return 'not analysed'
  return status


def record_failure(trial: Trial, root, error: str) -> None:
  """Says in a trial's folder that it failed, where it could not do so itself."""
  folder = to_path(root) / trial.name
  status = read_status(folder)
  if status['status'] not in _KEPT:
    groups = {key: status[key] for key in ('group_widths',) if key in status}
    write_outcome(folder, 'failed', error=error, label=dict(trial.label), **groups)


def _not_expressible(trial, folder):
  if (folder / 'config.json').exists():
    raise ValueError(f'{folder} holds a run of another budget: use another --workdir.')
  write_outcome(folder, 'not expressible', reason=trial.reason, label=dict(trial.label))
  return 'not expressible'


def _train(trial, folder, show_progress):
  began = time.monotonic()
  while True:
    try:
      return train(trial.config, folder, name=trial.name, show_progress=show_progress)
    except LockLost:
      raise
    except WorkdirLocked:
      if broadcast_from_process0(lambda: time.monotonic() - began > PATIENCE):
        raise
      time.sleep(0.5)


def _tell(trial, error):
  if not isinstance(error, (ValueError, CheckpointError)):
    traceback.print_exception(error)
  print(f'{trial.name}: error: {error}', file=sys.stderr)
