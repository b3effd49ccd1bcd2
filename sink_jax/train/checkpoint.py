"""Checkpoints: asynchronous, checksummed, and never restored when damaged.

Orbax commits a step by renaming its folder, so a killed save leaves no step behind.
It does not notice flipped bits; checksums written after the commit do. A save passes through

  save()   copies the state to the host and returns; threads of Orbax write it;
  poll()   finds it committed, and starts a thread that hashes its files;
  close()  waits for both.

so that the training step waits for the copy alone. A run killed between commit and checksums
leaves a step without any: it is used as it is, for its name says that it is complete.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from sink_jax.io.paths import AnyPath, free_name, move_folder, to_path
from sink_jax.train.checksums import (
  forget_checksums,
  has_checksums,
  saved_steps,
  step_folder,
  verify,
  write_checksums,
)
from sink_jax.train.multihost import broadcast_from_process0, is_first, process_allgather
from sink_jax.train.record import write_record
from sink_jax.train.step import Params, TrainState

_log = logging.getLogger('sink_jax')


class CheckpointError(RuntimeError):
  """No checkpoint can be used or written, or one holds another tree than the one asked for."""


class Checkpoints:
  """The checkpoints of a workdir that is being trained in, by all processes of a job.

  On opening, saved steps are verified, newest first, until one is good. Damaged ones
  are reported in `damaged` and moved to `damaged/`, so that their step can be saved again.
  latest: the newest step that is saved, or being saved; None if there is none.
  """

  def __init__(self, workdir: str | AnyPath, kept: int = 2):
    """kept: how many of the newest steps stay."""
    self._workdir, self._kept = to_path(workdir), kept
    self._pending: int | None = None  # the step that Orbax is writing
    self._record: dict[str, Any] | None = None  # that goes with the pending step
    self._hashing: threading.Thread | None = None
    self.damaged: list[str]
    self.latest: int | None
    # One process looks at the files and moves them: others would see folders come and go.
    self.damaged, self.latest = broadcast_from_process0(
        lambda: _set_damaged_aside(self._workdir), OSError)
    self._manager = self._open_manager()

  def save(self, step: int, state: TrainState, record: dict[str, Any] | None = None) -> None:
    """Starts saving; the state may be donated as soon as this returns.

    record: digests of what the run has recorded so far, to be stored with the checksums.

    Raises:
      CheckpointError: this save or the one before could not be written.
    """
    self.poll(wait=True)  # one save at a time: a second would need the host's memory again
    if step == self.latest:
      return
    with self._explained(step):
      if is_first():
        # Those of a step of this number that was removed by hand: they would fit no new file.
        forget_checksums(self._workdir, step)
      # force: Orbax otherwise skips a step that is not beyond its newest, and the caller decides
      # that.
      self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)),
                         force=True)
    self._pending = self.latest = step
    self._record = record

  def poll(self, wait: bool = False) -> None:
    """Writes the checksums of a save once it is committed; cheap, to be called at every step.

    Args:
      wait: for the save and its checksums, instead of looking whether they are there.
    """
    if wait:
      with self._explained(self._pending):
        self._manager.wait_until_finished()
    if self._pending is not None and not self._manager.is_saving_in_progress():
      if is_first():
        # In a thread: hashing some gigabytes takes seconds, and leaves the interpreter free.
        self._hashing = threading.Thread(target=_hash,
                                         args=(self._workdir, self._pending, self._record))
        self._hashing.start()
      self._pending = None
    if wait and self._hashing is not None:
      self._hashing.join()

  def restore(self, target: TrainState) -> TrainState | None:
    """The newest state, laid out as `target` (shapes with shardings); None if there is none.

    A step that one process cannot read is set aside for all, and the one before it tried.

    Raises:
      CheckpointError: the checkpoint holds another tree, or other shapes.
    """
    while self.latest is not None:
      state, problem = self._restore_step(self.latest, target)
      if not any(process_allgather(problem is not None)):
        return state
      self._manager.close()
      # Orbax's manager knows the steps of the time when it was opened: it is closed before a step
      # is moved, and opened anew after that.
      remarks, self.latest = broadcast_from_process0(
          lambda: _set_damaged_aside(self._workdir, self.latest, problem or 'unreadable'),
          OSError)
      self.damaged += remarks
      self._manager = self._open_manager()
    return None

  def close(self) -> None:
    """Waits for what is being saved."""
    self.poll(wait=True)
    self._manager.close()

  def _open_manager(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        self._workdir / 'checkpoints', item_names=('state',),
        item_handlers={'state': ocp.StandardCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(max_to_keep=self._kept, cleanup_tmp_directories=True))

  def _restore_step(self, step: int,
                    target: TrainState) -> tuple[TrainState | None, str | None]:
    """(state, None) of a saved step; (None, problem) of one that cannot be read.

    A step that is as it was written can be read, so only one without checksums may have a
    problem: its job was killed, or its machine lost power, right after the commit.
    """
    try:
      _check_shapes(step_folder(self._workdir, step),
                    self._manager.item_metadata(step)['state'], target)
      return self._manager.restore(
          step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))['state'], None
    except (CheckpointError, jax.errors.JaxRuntimeError):  # the latter: no memory for it
      raise
    except Exception as error:  # Orbax raises bare Exceptions, and those of other libraries
      if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        raise  # the disk or the network, not the checkpoint
      reason = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
      if has_checksums(self._workdir, step):
        raise CheckpointError(f'Checkpoint {step} of {self._workdir} is as it was written, '
                              f'and still cannot be read: {reason}') from error
      return None, f'it has no checksums and cannot be read: {reason}'

  @contextlib.contextmanager
  def _explained(self, step: int | None) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # Orbax raises bare Exceptions, and those of other libraries
      self._pending = None
      self.latest = max((s for s in saved_steps(self._workdir) if s != step), default=None)
      raise CheckpointError(
          f'Checkpoint {step} could not be written below {self._workdir}: '
          f'{" ".join(str(error).split())[:300]}. Is the disk full, or does ulimit -f allow no '
          f'file of this size? The newest good checkpoint '
          f'is {self.latest}; once there is room, the same command resumes from it.') from error


def restore_params(workdir: str | AnyPath, target: Params) -> tuple[int, Params]:
  """(step, parameters) of the newest good checkpoint of a workdir; writes nothing.

  Args:
    target: parameter shapes, with shardings where they matter.

  Raises:
    CheckpointError: there is no usable checkpoint, or it holds another model.
  """
  workdir = to_path(workdir)
  for step in saved_steps(workdir):
    problem = verify(workdir, step)
    if problem is None:
      try:
        return step, params_of_step(workdir, step, target)
      except (CheckpointError, jax.errors.JaxRuntimeError):
        raise
      except Exception as error:  # as in Checkpoints
        problem = f'cannot be read: {" ".join(str(error).split())[:300]}'
    _log.warning('checkpoint %d is damaged (%s); trying an older one', step, problem)
  raise CheckpointError(f'No usable checkpoint in {workdir}: is it the workdir of a run '
                        'that has saved one?')


def params_of_step(workdir: str | AnyPath, step: int, target: Params) -> Params:
  """The parameters of a saved step, laid out as `target`; writes nothing and verifies nothing.

  Raises:
    CheckpointError: it holds another model. Orbax raises errors of any kind for a damaged one.
  """
  saved: Any = step_folder(workdir, step) / 'state'
  # The handler itself: a Checkpointer around it would report files that only it writes.
  handler = ocp.PyTreeCheckpointHandler()
  _check_shapes(saved, handler.metadata(saved)['params'], target)
  tree = {'params': target}
  restored = handler.restore(saved, args=ocp.args.PyTreeRestore(
      tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True))
  handler.close()
  return restored['params']


def _hash(workdir: AnyPath, step: int, record: dict[str, Any] | None) -> None:
  try:
    if record:
      write_record(workdir, step, record)
    write_checksums(workdir, step)
  except OSError as error:
    _log.warning('checkpoint %d has no checksums (%s): it is used, but not verified', step, error)


def _set_damaged_aside(workdir: AnyPath, unreadable: int | None = None,
                       why: str = '') -> tuple[list[str], int | None]:
  """Moves damaged steps away, newest first, until one is good.

  Returns (a remark on each damaged step, the good step or None).

  Args:
    unreadable: a step that turned out not to be readable, whatever its checksums say.
  """
  damaged, used = [], None
  for step in saved_steps(workdir):
    problem = why if step == unreadable else verify(workdir, step)
    if problem is None:
      used = step
      break
    damaged.append(_move_aside(workdir, step, problem))
  instead = 'starting from step 0' if used is None else f'using checkpoint {used} instead'
  return [f'{line}; {instead}' for line in damaged], used


def _move_aside(workdir: AnyPath, step: int, problem: str) -> str:
  aside = free_name(workdir / 'damaged' / str(step))
  move_folder(step_folder(workdir, step), aside)
  forget_checksums(workdir, step)
  return f'checkpoint {step} is damaged ({problem}), moved to damaged/{aside.name}'


def _check_shapes(folder: AnyPath, saved: Any, target: Any) -> None:
  saved, target = _shapes(saved), _shapes(target)
  for name in sorted(set(saved) | set(target)):
    if saved.get(name) != target.get(name):
      raise CheckpointError(
          f'{folder} does not fit this config: {name} is {saved.get(name, "absent")} there and '
          f'{target.get(name, "absent")} here. Use the config it was saved with, or another '
          'workdir.')


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """{'params.embed': (258, 64), ...}; tuples and dicts with digits as keys look the same.

  Orbax returns the optimizer's tuples as such dicts. So the place of a transformation in optax's
  chain is a part of what a checkpoint fits.
  """
  name = lambda k: str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k))))
  return {'.'.join(map(name, path)): tuple(x.shape)
          for path, x in jax.tree_util.tree_leaves_with_path(tree)}
