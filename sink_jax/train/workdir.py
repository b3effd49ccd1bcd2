"""A run's folder: its config and its status, and who may write there.

Two jobs that train in one workdir would overwrite each other's checkpoints. A lock on the file
`lock` holds between the processes of one machine. Object stores and some network file systems have
no locks, so each job also writes its name into `owner` when it begins, and reads it again before
every save: the newest job wins, and an older one ends without writing.
"""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import tokenize
import uuid
from collections.abc import Mapping
from typing import Any

import filelock
import numpy as np

from sink_jax.component import UnknownComponent
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.files import SMALL, read_text_limited, remove_temporaries, write_atomically
from sink_jax.io.paths import AnyPath, check_links, inside, is_local, is_workdir, to_path
from sink_jax.train.checkpoint import saved_steps
from sink_jax.train.config import Experiment, as_dict, differences, from_dict
from sink_jax.train.failures import count_start
from sink_jax.train.multihost import broadcast_from_process0, is_first
from sink_jax.train.plugins import import_plugins, import_recorded, record_plugins
from sink_jax.train.provenance import provenance

FINAL_STATUSES = ('done', 'diverged', 'not expressible')  # nothing is left to do for such a run
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a file system without locks
_PATIENCE = 15  # seconds to wait for a lock: the processes of a killed sweep need some to notice it


class WorkdirLocked(ValueError):
  """Another job is training in the workdir, or has begun to since this one did."""


def check_workdir(workdir: str | AnyPath, experiment: Experiment) -> str:
  """Returns the config.json of the run in a folder, '' if there is none.

  Raises:
    ValueError: the folder holds a run of another config, or cannot be written.
  """
  path = to_path(workdir)
  stored = _stored(path)  # before it is compared: what is written later is compared again
  if (path / 'config.json').exists():
    if changed := changes(path, experiment):
      raise ValueError(
        f'{workdir} holds a run of another config:\n  '
        + '\n  '.join(changed)
        + '\nUse another --workdir, or the old values to resume it.'
      )
  elif is_workdir(path):
    raise ValueError(
      f'{workdir} holds a run, and its config.json is missing. Put the file back, '
      'or use another --workdir.'
    )
  elif is_local(path):  # an object store has neither folders nor permissions to check
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
      raise ValueError(
        f'Cannot use {workdir} as a workdir: {existing} is not a folder that you '
        'may write to. Choose another --workdir.'
      )
  return stored


def changes(workdir: str | AnyPath, experiment: Experiment) -> list[str]:
  """Lines 'key: old -> new' for what differs between the run in a folder and an experiment."""
  config = read_config(workdir)
  try:
    return differences(from_dict(config), experiment)
  except UnknownComponent as error:  # so that it is not a component of the experiment
    return [f'{error.key}: {error}']


def _stored(path: AnyPath) -> str:
  """The text of config.json, '' if it cannot be read."""
  try:
    return read_text_limited(path / 'config.json', SMALL)
  except (OSError, ValueError):
    return ''


class Workdir:
  """A folder that one job may write to: a context that makes and locks it for one run.

  All processes of a job enter it; the first one acts.

  Raises:
    ValueError: it holds a run of another config (what differs is listed) or of other data, or
      cannot be written. WorkdirLocked: another process is training in it.

  begun: whether a status of this job has been written.
  """

  def __init__(
    self, path: str | AnyPath, experiment: Experiment, data: Mapping[str, Any], checked: str = ''
  ):
    """data: `Dataset.summary()`; its digests of the data must not change.

    checked: what `check_workdir` returned for the experiment.
    """
    self.path, self._experiment, self._data = to_path(path), experiment, data
    self._checked, self.begun = checked, False
    self._name = f'{socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}'
    # A file as a lock would outlive a killed process, and no other host could resume its run.
    self._lock = filelock.FileLock(self.path / 'lock', timeout=_PATIENCE, fallback_to_soft=False)

  def __enter__(self) -> Workdir:
    try:
      broadcast_from_process0(self._begin)
    except OSError as error:
      self._lock.release()
      raise ValueError(
        f'Cannot use {self.path} as a workdir: {error}. Choose another --workdir, '
        'or make room and give yourself the right to write.'
      ) from error  # which may pass
    except ValueError:
      self._lock.release()
      raise
    return self

  def __exit__(self, *error: object) -> None:
    self._lock.release()

  def write_inputs(self, probe_tokens: np.ndarray, tokenizer: TextTokenizer | None) -> None:
    """Writes what measures a run without its data: the probe tokens, and a tokenizer."""
    tokens = io.BytesIO()
    np.save(tokens, probe_tokens, allow_pickle=False)
    broadcast_from_process0(
      lambda: write_atomically(self.path / 'probe_tokens.npy', tokens.getvalue())
    )
    if is_first() and tokenizer is not None:
      tokenizer.save(self.path / 'tokenizer', digest=tokenizer.digest)

  def check_owner(self) -> None:
    """Raises WorkdirLocked in all processes if another job has begun to train here."""
    if other := broadcast_from_process0(lambda: self._owner() != self._name and self._owner()):
      raise WorkdirLocked(
        f'Another job ({other}) has begun to train in {self.path}: this one '
        'ends, and leaves what it has saved to the other.'
      )

  def write_status(self, status: str, **details: Any) -> None:
    """Records 'running', 'done', 'interrupted', 'diverged' or 'failed', where and when."""
    self.begun = True
    if is_first():
      write_status(self.path, status, **details, **provenance())

  def _begin(self) -> None:
    self.path.mkdir(parents=True, exist_ok=True)
    if is_local(self.path):
      try:
        self._lock.acquire()
      except filelock.Timeout:
        raise WorkdirLocked(
          f'Another process ({self._owner()}) is training in {self.path}: wait '
          'for it, or use another --workdir.'
        ) from None
      except OSError as error:
        if error.errno not in _NO_LOCKS:  # without locks `owner` must suffice
          raise
    # Under the lock, which keeps other processes from writing what is compared.
    if not self._checked or _stored(self.path) != self._checked:
      check_workdir(self.path, self._experiment)
    before = read_object(self.path / 'data.json')
    digests = 'content', 'valid_content'
    if any(before.get(key, self._data.get(key)) != self._data.get(key) for key in digests):
      raise ValueError(
        f'{self.path}: the content of the data has changed since the run began: use '
        'another --workdir, or put the old data back.'
      )
    for name in ('', 'checksums', 'tokenizer'):
      remove_temporaries(self.path / name)
    # config.json first, so that no other file of a run exists without it.
    write_atomically(self.path / 'config.json', json.dumps(as_dict(self._experiment), indent=2))
    write_atomically(self.path / 'data.json', json.dumps(self._data, indent=2))
    write_atomically(self.path / 'owner', self._name)
    count_start(self.path, next(iter(saved_steps(self.path)), None))
    record_plugins(self._experiment.plugins)

  def _owner(self) -> str:
    try:
      return (self.path / 'owner').read_bytes().decode('utf-8', 'replace')
    except OSError:  # removed by hand: no other job claims the folder
      return self._name


def read_config(workdir: str | AnyPath) -> dict[str, Any]:
  """The config of a run.

  Raises:
    ValueError: there is none, or it is unreadable.
  """
  path = inside(to_path(workdir), 'config.json')
  if not path.exists():
    raise ValueError(f'{path} does not exist: {workdir} is not the workdir of a run.')
  config = read_object(path)
  if not {'model', 'data'} <= config.keys():
    raise ValueError(
      f'{path} is damaged, or not of a run: put the config of the run back, or use another workdir.'
    )
  return config


def read_experiment(workdir: str | AnyPath, plugins: str | os.PathLike = '') -> Experiment:
  """The experiment of a run in a folder that somebody else may have made.

  Args:
    plugins: Python files with components of the run, with commas between them, which are imported.
      Those that config.json names are, too, if a training of this person here has recorded them.

  Raises:
    ValueError: a link leads out of the folder, its config is missing or unreadable, or it names a
      component that is not imported.
  """
  folder = to_path(workdir)
  check_links(folder)
  import_plugins(plugins)
  config = read_config(folder)
  import_recorded(config)
  try:
    return from_dict(config)
  except UnknownComponent as error:
    file = config.get('plugins') or 'the file that defines it'
    raise ValueError(
      f'{folder}: {error.key} needs {file}, and a stored run imports nothing ({error}). If you '
      'trust the file, name it: --plugins=FILE.py, load_run(..., plugins=), or '
      '--config.plugins=FILE.py of a training that begins with the run.'
    ) from None
  except ValueError as error:
    raise ValueError(f'{folder}: config.json cannot be read ({error}).') from None


def read_probe_tokens(workdir: str | AnyPath) -> np.ndarray | None:
  """The probe inputs (S, T) of a run; None if it has not begun.

  Raises:
    ValueError: the file is damaged.
  """
  path = to_path(workdir) / 'probe_tokens.npy'
  try:
    with path.open('rb') as file:
      return np.lib.format.read_array(file, allow_pickle=False)
  except FileNotFoundError:
    return None
  except (OSError, ValueError, EOFError, tokenize.TokenError) as error:
    raise ValueError(
      f'{path} is damaged ({error}): training again with the same command makes it '
      'anew from the data.'
    ) from None


def read_status(workdir: str | AnyPath) -> dict[str, Any]:
  """The content of status.json; {'status': 'not run'} if there is none.

  Raises a ValueError if the file is a link that leads out of the folder.
  """
  status = read_object(inside(to_path(workdir), 'status.json'))
  return status if isinstance(status.get('status'), str) else {'status': 'not run'}


def write_status(workdir: str | AnyPath, status: str, **details: Any) -> None:
  """Writes status.json, also of a trial that could not begin; makes the folder."""
  to_path(workdir).mkdir(parents=True, exist_ok=True)
  write_atomically(
    to_path(workdir) / 'status.json', json.dumps({'status': status, **details}, indent=2)
  )


def read_object(path: AnyPath) -> dict[str, Any]:
  """A JSON object; {} if the file is missing or holds anything else."""
  try:
    value = json.loads(read_text_limited(path, SMALL))
  except (OSError, ValueError, RecursionError):
    return {}
  return value if isinstance(value, dict) else {}
