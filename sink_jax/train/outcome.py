"""How a run ends, and what its status records of that."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, SupportsFloat

import jax

from sink_jax.io.paths import AnyPath
from sink_jax.train import run_dir as runs
from sink_jax.train.checkpoint import CheckpointError, Checkpoints
from sink_jax.train.stop_handler import Unsaved

_log = logging.getLogger('sink_jax')


class Diverged(RuntimeError):
  """The loss, the gradient or the state of a step was not finite, or what its model computes.

  step, loss: where, and what the loss was.
  """

  def __init__(self, step: int, loss: SupportsFloat, reason: str = ''):
    """reason: in words, in place of the loss; nothing for a loss, a gradient or a state."""
    self.step, self.loss = step, float(loss)
    reason = reason or (f'its loss is {self.loss:g}, and the loss, the gradient or the parameters '
                        'after it are not finite.')
    super().__init__(
        f'Step {step} diverged: {reason} status.json names the last good checkpoint. A lower '
        'optimizer.learning_rate or a lower optimizer.clip may help.')


class Interrupted(RuntimeError):
  """The run was asked to stop, and has saved its state."""

  def __init__(self, step: int, steps: int):
    self.step = step
    super().__init__(f'Stopped and saved at step {step} of {steps}; the same command resumes.')


def group_widths(workdir: str | AnyPath, start: int, width: int) -> dict[str, int]:
  """Members of the groups that a run was trained in, by the first step in each: {step: members}.

  1 stands for a run alone, whose last bits differ from those of a group; {} where all of it is.

  Args:
    start: the step that the run resumes from now. width: members of its group from there on.
  """
  # A status without widths is that of a run that was trained alone, from its first step on.
  before = runs.read_status(workdir).get('group_widths') or {'0': 1}
  widths = {step: w for step, w in before.items() if int(step) < start}
  # JSON keeps the order of the steps, so the last entry is that of the steps before `start`.
  if width != next(reversed(widths.values()), None):
    widths[str(start)] = width
  return {} if set(widths.values()) == {1} else widths


@contextlib.contextmanager
def recorded_outcome(workdir: str | AnyPath, checkpoints: Checkpoints, start: int, steps: int,
                     whole_from: int, attention: str, width: int = 1) -> Iterator[None]:
  """A context that leaves a status behind, however it ends, once what it saves is on the disk.

  Args:
    whole_from: the step from which on no row of metrics is missing.
    attention: name of the implementation, a part of how the result was made.
    width: members of the group that it is trained in, see `group_widths`.
  """
  always: dict[str, Any] = {'attention': attention}
  if whole_from:
    always['record_whole_from'] = whole_from
  if widths := group_widths(workdir, start, width):
    always['group_widths'] = widths
  runs.write_status(workdir, 'running', step=start, **always)
  status, details, waits = 'done', {'step': steps}, True
  try:
    yield
  except runs.WorkdirLocked:
    status = None  # the workdir is another job's by now
    raise
  except Interrupted as stop:
    status, details = 'interrupted', {'step': stop.step}
    raise
  except Diverged as diverged:
    status, details = 'diverged', {'step': diverged.step, 'loss': str(diverged.loss)}
    raise
  except Unsaved:
    status, waits = None, False  # like a kill: 'running' stays, and nothing is waited for
    raise
  except BaseException as error:
    status, details = 'failed', {'error': f'{type(error).__name__}: {error}'}
    raise
  finally:
    # Where this process alone has failed, the others are not there to complete a save.
    try:
      if waits and (status != 'failed' or jax.process_count() == 1):
        checkpoints.close()
    except Unsaved:
      status = None
      raise
    except CheckpointError as error:
      if status is not None:
        status, details = 'failed', {'error': str(error)}
        raise
      _log.warning(error)
    finally:
      # After the save: a status 'done' whose checkpoint is lost would never be trained again.
      if status is not None:
        with contextlib.suppress(OSError):  # on a full disk the error itself has to do
          runs.write_status(workdir, status, **details, **always,
                            last_good_checkpoint=checkpoints.latest)
