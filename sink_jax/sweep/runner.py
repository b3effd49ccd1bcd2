"""One trial: train it, analyse it, record whatever happened."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from sink_jax.analyses.training import write_analyses
from sink_jax.sweep.trials import Trial
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import Diverged, Interrupted, train
from sink_jax.train.workdir import Busy, has_ended, read_status, write_outcome

_PATIENCE = 15  # seconds: the processes of a sweep that was killed need some to notice it
ENDED = ('done', 'diverged', 'not expressible')
_KEPT = ('done', 'diverged')  # records that nothing replaces


def run_trial(trial: Trial, root, show_progress: bool = True) -> str:
  """Trains a trial in ROOT/NAME, or what is left of it; returns what became of it.

  That is a status of `read_status`, 'failed' where it could not even begin, 'not analysed'
  where only that failed after the training, or 'busy' where another process is at it.

  Raises:
    Interrupted: the process was asked to stop; the state is saved.
  """
  folder = Path(root) / trial.name
  try:
    if trial.config is None:
      return _not_expressible(trial, folder)
    if not has_ended(folder, trial.config):
      _train(trial, folder, show_progress)
  except Busy:
    return 'busy'
  except Interrupted:
    raise
  except Diverged as error:  # recorded by the run itself
    print(f'{trial.name}: {error}', file=sys.stderr)
  except Exception as error:  # whatever it is, the other trials can still run
    _tell(trial, error)
    if not (folder / 'config.json').exists():  # what stands there keeps its own record
      record_failure(trial, root, str(error))
    return 'failed'
  status = read_status(folder)['status']
  try:
    if status == 'done':
      write_analyses(folder)
  except Exception as error:  # as above; the run itself is good
    _tell(trial, error)
    return 'not analysed'
  return status


def record_failure(trial: Trial, root, error: str) -> None:
  """Says in a trial's folder that it failed, where it could not do so itself."""
  folder = Path(root) / trial.name
  if read_status(folder)['status'] not in _KEPT:
    write_outcome(folder, 'failed', error=error, label=dict(trial.label))


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
    except Busy:
      if time.monotonic() - began > _PATIENCE:
        raise
      time.sleep(0.5)


def _tell(trial, error):
  if not isinstance(error, (ValueError, CheckpointError)):
    traceback.print_exception(error)
  print(f'{trial.name}: error: {error}', file=sys.stderr)
