"""Checkpoints of a run, by Orbax, with a SHA-256 of every file on a disk.

Orbax writes checkpoints/STEP. checksums/STEP.PROCESS.json holds the digests of the files that a
process wrote, by their paths below STEP. Object stores verify what they receive, and get no
digests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from sink_jax.io.files import SMALL, read_text_limited, sha256_of_files, write_atomically
from sink_jax.io.paths import AnyPath, files_below, inside, is_local, move_folder, to_path
from sink_jax.train.failures import passes
from sink_jax.train.multihost import broadcast_from_process0, gather, is_first
from sink_jax.train.step import Params, TrainState

# The longest wait, after this process has written, until process 0 names the step.
_COMMIT_SECONDS = 120
_log = logging.getLogger('sink_jax')


class CheckpointError(RuntimeError):
  """No checkpoint can be used or written, or one holds another tree than expected."""


class Checkpoints:
  """The checkpoints of a workdir that is being trained in, by all processes of a job."""

  def __init__(self, workdir: str | AnyPath, kept: int = 2, minutes: float = 0):
    """kept: how many of the newest steps stay. minutes: after which a save is due; 0: never."""
    self._workdir, self._kept = to_path(workdir), kept
    self._seconds, self._since = 60 * minutes, time.monotonic()
    # It knows the steps that existed when it was opened.
    self._manager: ocp.CheckpointManager | None = None
    self._pending: int | None = None  # the step that Orbax is writing
    self._hashing: threading.Thread | None = None

  @property
  def latest(self) -> int | None:
    """The newest step that is saved; None if there is none."""
    return next(iter(saved_steps(self._workdir)), None)

  def due(self) -> bool:
    """True, once, if the last save is longer ago than `minutes`."""
    now = time.monotonic()
    due = 0 < self._seconds <= now - self._since
    if due:
      self._since = now
    return due

  def restore(self, target: TrainState) -> TrainState | None:
    """The newest good state, laid out as `target` (shapes with shardings); None if there is none.

    If a process cannot read its part of a step, the step is moved to damaged/, so that its number
    can be saved again, and the step before it is tried. Call it before any `save`.

    Raises:
      CheckpointError: the checkpoint holds another tree, or other shapes.
    """
    for step in broadcast_from_process0(lambda: saved_steps(self._workdir)):
      problem = verify(self._workdir, step, jax.process_index(), jax.process_count())
      if not any(gather(problem is not None)):
        state, problem = _read(self._workdir, step, target._asdict())
        if not any(gather(problem is not None)):
          return TrainState(**state)
      if problem:
        _log.warning(
          'checkpoint %d is damaged (%s), moved to damaged/%d; trying an older one',
          step,
          problem,
          step,
        )
      broadcast_from_process0(
        lambda: move_folder(step_folder(self._workdir, step), self._workdir / 'damaged' / str(step))
      )
    return None

  def save(self, step: int, state: TrainState) -> None:
    """Starts saving; the state may be donated as soon as this returns.

    Raises:
      CheckpointError: this save or the one before could not be written.
    """
    self.poll(wait=True)  # one save at a time: a second would need the host's memory again
    self._since = time.monotonic()
    with self._explained(step):
      if is_first():
        alive = {str(s) for s in saved_steps(self._workdir)}
        for path in (self._workdir / 'checksums').glob('*.json'):
          if path.name.split('.')[0] not in alive:
            path.unlink(missing_ok=True)
      self.open()
      assert self._manager is not None
      # force: Orbax otherwise skips steps that are not beyond its newest; the caller decides that.
      self._manager.save(
        step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)), force=True
      )
    self._pending = step

  def open(self) -> None:
    """Makes the writer of checkpoints: in an object store it fails where a permission is missing.

    Raises:
      ValueError: the store does not let this process write, read and delete.
    """
    if self._manager is not None:
      return
    try:
      if not is_local(self._workdir):
        broadcast_from_process0(lambda: _try_out(self._workdir))
      self._manager = ocp.CheckpointManager(
        self._workdir / 'checkpoints',
        item_names=('state',),
        item_handlers={'state': ocp.StandardCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(max_to_keep=self._kept, cleanup_tmp_directories=True),
      )
    except Exception as error:  # of the libraries of a store
      if is_local(self._workdir):
        raise
      raise ValueError(
        f'{self._workdir}: checkpoints cannot be written there: {_short(error)}. The account of '
        'the hosts needs roles/storage.objectAdmin on the bucket, and '
        'roles/storage.legacyBucketReader for storage.buckets.get.'
      ) from error

  def poll(self, wait: bool = False) -> None:
    """Hashes a save once it is committed; cheap enough to call at every step.

    Args:
      wait: waits for the save and its checksums, instead of only checking for them.

    Raises:
      CheckpointError: the save could not be written.
    """
    if self._manager is None:
      return
    if wait or self._pending is not None and not self._manager.is_saving_in_progress():
      with self._explained(self._pending):
        self._manager.wait_until_finished()  # raises the error of a save that has ended
      if self._pending is not None and is_local(self._workdir):
        # In a thread: hashing some gigabytes takes seconds, and leaves the interpreter free.
        self._hashing = threading.Thread(target=_hash, args=(self._workdir, self._pending))
        self._hashing.start()
      self._pending = None
    if wait and self._hashing is not None:
      self._hashing.join()

  def close(self) -> None:
    """Waits for what is being saved."""
    self.poll(wait=True)
    if self._manager is not None:
      self._manager.close()

  @contextlib.contextmanager
  def _explained(self, step: int | None) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # Orbax raises bare Exceptions, and those of other libraries
      self._pending = None
      raise CheckpointError(
        f'Checkpoint {step} could not be written below {self._workdir}: {_short(error)}. Is the '
        'disk full, or the file larger than ulimit -f allows? Once there is room, the same '
        f'command resumes from step {self.latest or 0}.'
      ) from error


def restore_params(workdir: str | AnyPath, target: Params) -> tuple[int, Params]:
  """(step, parameters) of the newest good checkpoint of a workdir; writes nothing.

  Args:
    target: parameter shapes, with shardings if they matter.

  Raises:
    CheckpointError: there is no usable checkpoint, or it holds another model.
  """
  for step in saved_steps(workdir):
    restored, problem = None, verify(workdir, step)
    if problem is None:
      restored, problem = _read(workdir, step, {'params': target})
    if restored is not None:
      return step, restored['params']
    _log.warning('checkpoint %d is damaged (%s); trying an older one', step, problem)
  raise CheckpointError(
    f'No usable checkpoint in {workdir}: is it the workdir of a run that has saved one?'
  )


def _read(workdir: str | AnyPath, step: int, target: dict[str, Any]) -> tuple[Any, str | None]:
  """(fields of a saved TrainState, None), laid out as `target`; (None, problem) where damaged."""
  saved: Any = step_folder(workdir, step) / 'state'
  try:
    # In a database, names of arrays are not paths, which could lead out of the folder.
    stored = json.loads(read_text_limited(saved / '_METADATA', SMALL))
    if not (stored.get('use_ocdbt', True) and (saved / 'manifest.ocdbt').is_file()):
      return None, 'its arrays are not in one database'
    # The handler itself: a Checkpointer around it would report files that only it writes.
    handler = ocp.PyTreeCheckpointHandler()
    metadata = handler.metadata(saved)
    there, here = _shapes({name: metadata[name] for name in target}), _shapes(target)
    for name in sorted(here | there):
      if here.get(name) != there.get(name):
        raise CheckpointError(
          f'{saved} does not fit this config: {name} is {there.get(name, "absent")} there and '
          f'{here.get(name, "absent")} here. Use the config it was saved with, or another '
          'workdir.'
        )
    return handler.restore(
      saved,
      args=ocp.args.PyTreeRestore(
        target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
      ),
    ), None
  # The last two: no memory for it.
  except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:  # Orbax raises bare Exceptions, and those of other libraries
    if passes(error) or isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
      raise  # the disk or the network, not the checkpoint
    return None, f'{type(error).__name__}: {_short(error)}'


def _try_out(folder: AnyPath) -> None:
  """Writes, reads and deletes a small object."""
  file = folder / f'trial-{uuid.uuid4().hex[:8]}'
  file.write_bytes(b'sink')
  if file.read_bytes() != b'sink':
    raise OSError(f'{file} was not read back as it was written')
  file.unlink()


def _short(error: Exception) -> str:
  return ' '.join(str(error).split())[:300]


def saved_steps(workdir: str | AnyPath) -> list[int]:
  """Committed steps of a workdir, newest first.

  On a disk a step gets its name once it is complete; in an object store it gets a mark.
  """
  checkpoints = step_folder(workdir, 0).parent
  # A step that is still being written has a name with a suffix.
  return sorted(
    (
      int(path.name)
      for path in (checkpoints.iterdir() if checkpoints.exists() else ())
      if re.fullmatch('0|[1-9][0-9]*', path.name)
      and (is_local(path) or (path / 'commit_success.txt').exists())
    ),
    reverse=True,
  )


def step_folder(workdir: str | AnyPath, step: int) -> AnyPath:
  """The folder that Orbax saves a step in."""
  return to_path(workdir) / 'checkpoints' / str(step)


def verify(workdir: str | AnyPath, step: int, process: int = 0, processes: int = 1) -> str | None:
  """The defect in the part of a saved step that a process verifies; None if it is sound.

  The files that process i wrote are verified by process i modulo `processes`, so that the hosts
  share the work. A step without checksums, of a run that was killed right after the commit,
  is accepted: the commit is atomic.
  """
  saved = step_folder(workdir, step)
  for path in sorted((to_path(workdir) / 'checksums').glob(f'{step}.*.json')):
    if int(path.name.split('.')[1]) % processes != process:
      continue
    try:
      sums = dict(json.loads(read_text_limited(path, SMALL)))
    except (OSError, ValueError, TypeError, RecursionError):
      _log.warning('%s is unreadable: checkpoint %d cannot be verified', path, step)
      continue
    try:
      files = [inside(saved, name) for name in sums]
    except ValueError as error:
      return str(error)
    for name, file in zip(sums, files):
      if not file.is_file():
        return f'{name} is missing'
    for name, digest in zip(sums, sha256_of_files(files)):
      if digest != sums[name]:
        return f'{name} differs from its checksum'
  return None


def _hash(workdir: AnyPath, step: int) -> None:
  """Records the digests of the files of a step that this process wrote."""
  saved, until = step_folder(workdir, step), time.monotonic() + _COMMIT_SECONDS
  me, sums = jax.process_index(), workdir / 'checksums'
  try:
    while not saved.exists() and time.monotonic() < until:
      time.sleep(0.05)
    files = {str(file.relative_to(saved)): file for file in files_below(saved)}
    # Orbax writes a folder of arrays for each process; the rest is written by process 0.
    mine = [
      name for name in files if me == int((re.findall(r'ocdbt\.process_(\d+)', name) or [0])[0])
    ]
    digests = sha256_of_files(files[name] for name in mine)
    sums.mkdir(exist_ok=True)
    write_atomically(sums / f'{step}.{me}.json', json.dumps(dict(zip(mine, digests)), indent=1))
  except FileNotFoundError:  # removed in the meantime, as the oldest checkpoint
    pass
  except OSError as error:
    _log.warning('checkpoint %d has no checksums (%s): it is used, but not verified', step, error)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """{'params.embed': (258, 64), ...}; Orbax returns tuples as dicts with digits as keys."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): tuple(x.shape)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }
