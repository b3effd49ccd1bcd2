"""A run's folder: its config and its status, and who may write there.

Two jobs that train in one workdir would overwrite each other's checkpoints. Two means keep them
apart. An flock on the file `lock` holds between the processes of one machine, and ends with its
process, however that ends. Object stores and some network file systems have no such locks, so each
job also writes a name of its own into `owner` when it begins, and reads it again before every save:
the newest job wins, and an older one ends without writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import IO, Any

from sink_jax.io.files import SMALL, read_text_limited, remove_temporaries, write_atomically
from sink_jax.io.paths import AnyPath, is_local, to_path
from sink_jax.train.checksums import saved_steps
from sink_jax.train.defaults import CHOSEN_KEYS, filled_from
from sink_jax.train.experiment import differences
from sink_jax.train.multihost import broadcast_from_process0, is_first
from sink_jax.train.old_keys import with_current_keys
from sink_jax.train.provenance import provenance
from sink_jax.train.record import metrics_problem, settle_metrics, stored_digests

PATIENCE = 15  # seconds to wait for a lock: processes of a killed sweep need some to notice it
_MOMENT = 1  # seconds to wait for processes that only ask whether a lock is held
_CONTENT = ('content', 'valid_content')  # of Dataset.summary(): hashes that must not change
# What a run writes after its config.json.
_WRITTEN_LATER = ('checkpoints', 'data.json', 'metrics.jsonl', 'probe_tokens.npy')
_log = logging.getLogger('sink_jax')


class WorkdirLocked(ValueError):
  """Another job is training in the workdir."""


class LockLost(WorkdirLocked):
  """Another job has begun to train in the workdir since this one did."""


class RunLock:
  """The right of one job to write in a workdir; see the head of this file.

  digests: of what is there before the first step; they go with every checkpoint, see `record`.
  """

  def __init__(self, workdir: AnyPath, data: Mapping[str, Any]):
    """data: `Dataset.summary()`."""
    self.workdir = workdir
    self.digests: dict[str, dict[str, Any]] = {
        'data': {key: data[key] for key in _CONTENT if key in data}}
    self._name = f'{socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}'

  def begin(self) -> None:
    """Writes this job's name: from now on an older job finds that it has lost the workdir."""
    write_atomically(self.workdir / 'owner', self._name)

  def check(self) -> None:
    """Raises LockLost in all processes if another job has begun to train in the workdir."""
    broadcast_from_process0(self._check, LockLost)

  def _check(self) -> None:
    try:
      owner = (self.workdir / 'owner').read_bytes().decode('utf-8', 'replace')
    except OSError:  # somebody removed the file: nothing says that the lock is lost
      return
    if owner != self._name:
      raise LockLost(f'Another job ({owner}) has begun to train in {self.workdir} meanwhile: this '
                 'one ends, and leaves what it has saved to the other.')


def check_unlocked(workdir: str | AnyPath, config: Mapping[str, Any]) -> None:
  """Raises what `lock_workdir` would, as far as it is known before the data are opened.

  Raises:
    ValueError: the workdir holds a run of another config, or cannot be written.
  """
  path = to_path(workdir)
  _check_config_is_there(path)
  if (path / 'config.json').exists():
    saved = read_config(path)
    _refuse(path, differences(saved, filled_from(config, saved)))
  elif is_local(path):  # an object store has no folders to be there, or to lack a right
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
      raise ValueError(f'Cannot use {workdir} as a workdir: {existing} is not a folder that you '
                       'may write to. Choose another --workdir.')


@contextlib.contextmanager
def lock_workdir(workdir: str | AnyPath, config: Mapping[str, Any],
                 data: Mapping[str, Any]) -> Iterator[RunLock]:
  """A context that makes and locks a workdir for one run, or checks that it holds this very run.

  All processes of a job call it, the first one acts. Yields the RunLock.

  Args:
    data: `Dataset.summary()`; what it says of the content of the data must not change.

  Raises:
    ValueError: it holds a run of another config or other data (what differs is listed), or
      it cannot be written. WorkdirLocked: another process is training in it.
  """
  lock = RunLock(to_path(workdir), data)
  with contextlib.ExitStack() as resources:

    def begin() -> None:
      resources.enter_context(_file_lock(lock.workdir))
      # Under the lock: only now does no other process write what is compared.
      _check_same(lock.workdir, config, data)
      for name in ('', 'checksums', 'tokenizer', 'damaged'):
        remove_temporaries(lock.workdir / name)
      # config.json first: whoever finds anything else of a run finds what it is a run of.
      write_atomically(lock.workdir / 'config.json', json.dumps(config, indent=2))
      write_atomically(lock.workdir / 'data.json', json.dumps(data, indent=2))
      lock.begin()

    try:
      broadcast_from_process0(begin, WorkdirLocked, ValueError, OSError)
    except OSError as error:
      raise ValueError(f'Cannot use {workdir} as a workdir: {error}. Choose another --workdir, or '
                       'make room and give yourself the right to write.') from None
    yield lock


@contextlib.contextmanager
def _file_lock(workdir: AnyPath) -> Iterator[None]:
  workdir.mkdir(parents=True, exist_ok=True)
  if not is_local(workdir):
    yield
    return
  # Never removed: a process that waits for a removed file's lock would hold nothing.
  with open(workdir / 'lock', 'a+') as lock:
    try:
      _take(lock)
    except BlockingIOError:
      lock.seek(0)
      raise WorkdirLocked(
          f'Another process ({lock.read().strip()}) is training in {workdir}: wait for it, or use '
          'another --workdir.') from None
    except OSError:  # a file system without locks: `owner` alone has to do
      pass
    lock.truncate(0)
    lock.write(f'{socket.gethostname()}, process {os.getpid()}')
    lock.flush()
    yield


def _take(lock: IO[str]) -> None:
  """Takes the lock that a run holds; raises an OSError where that cannot be."""
  until = time.monotonic() + _MOMENT
  while True:
    try:
      return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      # A lock that can be shared is no run's: a process holds it for a moment in `in_use`.
      fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
      fcntl.flock(lock, fcntl.LOCK_UN)
      if time.monotonic() > until:
        raise
      time.sleep(0.01)


def _check_same(workdir: AnyPath, config: Mapping[str, Any], data: Mapping[str, Any]) -> None:
  _check_config_is_there(workdir)
  changed = []
  if (workdir / 'config.json').exists():
    changed = differences(read_config(workdir), config)
  before = _known_data(workdir)
  if any(before.get(key, data.get(key)) != data.get(key) for key in _CONTENT):
    changed.append('the content of the data, since the run began')
  _refuse(workdir, changed)


def _check_config_is_there(workdir: AnyPath) -> None:
  begun = [name for name in _WRITTEN_LATER if (workdir / name).exists()]
  if begun and not (workdir / 'config.json').exists():
    raise ValueError(f'{workdir} holds a run ({", ".join(begun)}), and its config.json is missing: '
                     'nobody can say whether this config is the one it began with. Put the file '
                     'back, or use another --workdir.')


def _refuse(workdir: AnyPath, changed: list[str]) -> None:
  if changed:
    raise ValueError(f'{workdir} holds a run of another config:\n  ' + '\n  '.join(changed)
                     + '\nUse another --workdir, or the old values to resume it.')


def with_keys_as_begun(workdir: str | AnyPath, config: Mapping[str, Any]) -> dict[str, Any]:
  """The config with empty `defaults.CHOSEN_KEYS` as they were when the run of a workdir began.

  Where no run has begun, the config as it is.

  Raises:
    ValueError: the config of the run cannot be read.
  """
  if not (to_path(workdir) / 'config.json').exists():
    return dict(config)
  return filled_from(config, read_config(workdir), CHOSEN_KEYS)


def _known_data(workdir: AnyPath) -> dict[str, Any]:
  """The hashes of the data that a run began with, as far as they are known."""
  known = read_data_summary(workdir)
  if 'content' not in known and saved_steps(workdir):
    known = {key: value for key in _CONTENT for value in stored_digests(workdir, 'data', key)[:1]}
    _log.warning(f'data.json of {workdir} is missing or damaged: ' + (
        'the hash of the data that its newest checkpoint knows is taken in its place' if known else
        'whether the data have changed since the run began cannot be checked'))
  return known


def is_workdir(path: str | AnyPath) -> bool:
  """Whether a run was begun in the folder; that of a published model has a config.json too."""
  return (to_path(path) / 'data.json').exists()


def read_config(workdir: str | AnyPath) -> dict[str, Any]:
  """The config of a run, with the keys of today where an older version wrote it.

  Raises:
    ValueError: there is none, or it is unreadable.
  """
  path = to_path(workdir) / 'config.json'
  if not path.exists():
    raise ValueError(f'{path} does not exist: {workdir} is not the workdir of a run.')
  config = _read_object(path)
  if config is None:
    raise ValueError(f'{path} is damaged. The checkpoints beside it are untouched: put the config '
                     'of the run back, or use another workdir.')
  if not {'model', 'data'} <= config.keys():  # of every version
    raise ValueError(f'{path} is not the config of a run: use another workdir.')
  return with_current_keys(config)


def read_data_summary(workdir: str | AnyPath) -> dict[str, Any]:
  """`Dataset.summary()` of a run; {} where it has none."""
  return _read_object(to_path(workdir) / 'data.json') or {}


def write_status(workdir: str | AnyPath, status: str, **details: Any) -> None:
  """Records 'running', 'done', 'interrupted', 'diverged' or 'failed', where and when.

  All processes may call it; the first one writes.
  """
  record = {'status': status, **details, **provenance()}
  if is_first():
    _write_status(workdir, record)


def settle_finished(workdir: str | AnyPath, step: int) -> str:
  """Checks that the metrics of a finished run are those that it wrote, as `settle_metrics` does.

  Returns what was wrong, or ''. The status keeps when, where and by what the run was trained.
  """
  remark = settle_metrics(workdir, step).remark if metrics_problem(workdir) else ''
  whole_from = next(iter(stored_digests(workdir, 'metrics.jsonl', 'whole_from')), 0)
  status = read_status(workdir)
  if whole_from != status.get('record_whole_from', 0):  # also after a kill before this line
    _write_status(workdir, status | {'record_whole_from': whole_from})
  return remark


def write_outcome(workdir: str | AnyPath, status: str, **details: Any) -> None:
  """Records what became of a trial that did not train; asks no device, makes the folder."""
  to_path(workdir).mkdir(parents=True, exist_ok=True)
  _write_status(workdir, {'status': status, **details, **provenance(devices=False)})


def in_use(workdir: str | AnyPath) -> bool:
  """Whether a process trains in the workdir; True where the file system has no locks to ask."""
  workdir = to_path(workdir)
  if not is_local(workdir):
    return True
  try:
    with open(workdir / 'lock', 'rb') as lock:
      # Shared, so that two processes that only ask do not take each other for a run.
      fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except FileNotFoundError:
    return False
  except OSError:
    return True
  return False


def read_status(workdir: str | AnyPath) -> dict[str, Any]:
  """The content of status.json; {'status': 'not run'} where there is none."""
  status = _read_object(to_path(workdir) / 'status.json') or {}
  return status if isinstance(status.get('status'), str) else {'status': 'not run'}


def has_ended(workdir: str | AnyPath, config: Mapping[str, Any]) -> bool:
  """Whether this very config was trained here to its end, or until it diverged.

  A run whose last checkpoint was removed, but not an older one, is to be resumed from that.
  """
  status = read_status(workdir)
  if status['status'] not in ('done', 'diverged'):
    return False
  if status['status'] == 'done' and status.get('step') not in (saved_steps(workdir) or [
      status.get('step')]):
    return False
  saved = read_config(workdir)
  return not differences(saved, filled_from(config, saved))


def _write_status(workdir: str | AnyPath, record: dict[str, Any]) -> None:
  write_atomically(to_path(workdir) / 'status.json', json.dumps(record, indent=2))


def _read_object(path: AnyPath) -> dict[str, Any] | None:
  """A JSON object; None where the file is missing or holds anything else."""
  try:
    value = json.loads(read_text_limited(path, SMALL))
  except (OSError, ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def analyses_file(workdir: str | AnyPath) -> AnyPath:
  """The path of the results of a run's analyses, which a sweep writes once the run is done."""
  return to_path(workdir) / 'analyses.json'


def read_analyses(workdir: str | AnyPath) -> dict[str, dict[str, Any]]:
  """The results of a finished run's analyses, by name; without those that cannot be read."""
  try:
    results = json.loads(analyses_file(workdir).read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return {}
  return {name: of for name, of in results.items() if isinstance(of, dict)} if isinstance(
      results, dict) else {}
