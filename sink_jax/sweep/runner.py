"""Trains one trial, analyses it, and records how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback

import jax

from sink_jax.analyses.trained import write_analyses
from sink_jax.devices import refuse_silent_cpu
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.sweep.trials import Trial
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.evaluation import Diverged
from sink_jax.train.config import Experiment
from sink_jax.train.failures import passes
from sink_jax.train.loop import train
from sink_jax.train.multihost import Interrupted, broadcast_from_process0, is_first
from sink_jax.train.provenance import provenance
from sink_jax.train.start import completed
from sink_jax.train.workdir import WorkdirLocked, changes, read_status, write_status


def run_trial(trial: Trial, root: str | AnyPath, show_progress: bool = True) -> str:
  """Trains a trial in ROOT/NAME from where it stands, analyses it, and returns its status.

  All processes of a job call it and get the same answer; the first writes and analyses.

  Returns:
    A status of `read_status`; 'failed' where the trial could not even begin; 'not analysed' where
    the analysis failed after the training; 'busy' where another process trains it.

  Raises:
    Interrupted: the process was asked to stop; the state is saved.
  """
  folder, experiment = to_path(root) / trial.name, trial.experiment
  try:
    refuse_silent_cpu()
    if experiment is None:
      broadcast_from_process0(
        lambda: record_outcome(trial, root, 'not expressible', reason=trial.reason)
      )
      return 'not expressible'
    # A run that diverged would diverge again.
    if not broadcast_from_process0(lambda: _has_ended(folder, experiment)):
      train(experiment, folder, show_progress=show_progress)
  except WorkdirLocked:
    return 'busy'
  except Interrupted:
    raise
  except Diverged as error:  # the run has recorded it
    if is_first():
      print(f'{trial.name}: {error}', file=sys.stderr)
  except Exception as error:  # after any error the other trials can still run
    # Only a ValueError is raised in all processes: after others the rest may wait for this one. A
    # failure that may pass would meet the other trials too.
    if passes(error) or jax.process_count() > 1 and not isinstance(error, ValueError):
      raise
    _print_error(trial, error)
    if is_first() and not (folder / 'config.json').exists():  # a run that has begun has a record
      with contextlib.suppress(OSError):  # the folder cannot be made: that was the error
        record_outcome(trial, root, 'failed', error=str(error))
    return 'failed'
  return broadcast_from_process0(lambda: _analysed(trial, folder))


def _has_ended(folder: AnyPath, experiment: Experiment) -> bool:
  """True if the run in the folder is that of the experiment, and is done or has diverged."""
  if read_status(folder)['status'] not in ('done', 'diverged'):
    return False
  return not changes(folder, completed(experiment)[0])


def record_outcome(trial: Trial, root: str | AnyPath, status: str, **details: str) -> None:
  """Records the status of a trial whose process could not record it; keeps results."""
  folder = to_path(root) / trial.name
  if status == 'not expressible' and (folder / 'config.json').exists():
    raise ValueError(f'{folder} holds a run of another budget: use another --workdir.')
  if read_status(folder)['status'] not in ('done', 'diverged'):
    write_status(
      folder, status, **details, label=dataclasses.asdict(trial.label), **provenance(devices=False)
    )


def _analysed(trial: Trial, folder: AnyPath) -> str:
  """Returns the status of a trial that has ended, after its analyses where it is done."""
  status = read_status(folder)['status']
  try:
    if status == 'done':
      assert trial.experiment is not None  # it was trained
      write_analyses(folder, completed(trial.experiment)[0].data)
  except Exception as error:  # as above; the run itself is complete
    _print_error(trial, error)
    return 'not analysed'
  return status


def _print_error(trial: Trial, error: Exception) -> None:
  """Prints an error in a line, after its traceback where it is not one that a user can cause."""
  if not isinstance(error, (ValueError, CheckpointError)):
    traceback.print_exception(error)
  print(f'{trial.name}: error: {error}', file=sys.stderr)
