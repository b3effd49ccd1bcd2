"""One trial: train it, analyse it, record whatever happened."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from sink_jax.analyses import write_analyses
from sink_jax.sweep.trials import Trial
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import Diverged, Interrupted, train
from sink_jax.train.workdir import Busy, has_ended, read_status, write_status

_PATIENCE = 15  # seconds: the processes of a sweep that was killed need some to notice it
ENDED = ('done', 'diverged', 'not expressible')


def run_trial(trial: Trial, root, show_progress: bool = True) -> str:
  """Trains a trial in ROOT/NAME, or what is left of it; returns its status.

  That is a status of `read_status`, 'failed' where it could not even begin, or 'busy'
  where another process is at it.

  Raises:
    Interrupted: the process was asked to stop; the state is saved.
  """
  folder = Path(root) / trial.name
  if trial.config is None:
    _record(folder, 'not expressible', reason=trial.reason, label=dict(trial.label))
    return 'not expressible'
  try:
    if not has_ended(folder, trial.config):
      _train(trial, folder, show_progress)
    status = read_status(folder)['status']
    if status == 'done':
      write_analyses(folder)
    return status
  except Busy:
    return 'busy'
  except Interrupted:
    raise
  except Diverged as error:  # recorded by the run itself
    print(f'{trial.name}: {error}', file=sys.stderr)
    return 'diverged'
  except Exception as error:  # whatever it is, the other trials can still run
    if not isinstance(error, (ValueError, CheckpointError)):
      traceback.print_exc()
    print(f'{trial.name}: error: {error}', file=sys.stderr)
    if not (folder / 'config.json').exists():  # what stands there keeps its own record
      record_failure(trial, root, str(error))
    return 'failed'


def record_failure(trial: Trial, root, error: str) -> None:
  """Says in a trial's folder that it failed, where it could not do so itself."""
  _record(Path(root) / trial.name, 'failed', error=error, label=dict(trial.label))


def _train(trial, folder, show_progress):
  began = time.monotonic()
  while True:
    try:
      return train(trial.config, folder, name=trial.name, show_progress=show_progress)
    except Busy:
      if time.monotonic() - began > _PATIENCE:
        raise
      time.sleep(0.5)


def _record(folder, status, **details):
  if read_status(folder)['status'] != status:
    folder.mkdir(parents=True, exist_ok=True)
    write_status(folder, status, **details)
