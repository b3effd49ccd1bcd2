"""A run's folder: its config, its status, its probe inputs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sink_jax.train.checksums import write_atomically
from sink_jax.train.experiment import differences
from sink_jax.train.provenance import here_and_now, now


class Busy(ValueError):
  """Another process is training in the workdir."""


@contextlib.contextmanager
def claimed(workdir, config: Mapping[str, Any], data: Mapping[str, Any]):
  """Holds a workdir for one run: makes it, or checks that it holds this very run.

  Args:
    data: `Data.summary()`; what it says of the content of the data must not change.

  Raises:
    ValueError: it holds a run of another config or other data (what differs is listed), or
      it cannot be written. Busy: another process is training in it.
  """
  workdir = Path(workdir)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = open(workdir / 'lock', 'a+')
  except OSError as error:
    raise ValueError(f'Cannot use {workdir} as a workdir: {error}. Choose another '
                     '--workdir.') from None
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      raise Busy(f'Another process ({lock.read().strip()}) is training in {workdir}: wait for '
                 'it, or use another --workdir.') from None
    except OSError:  # a file system without locks
      pass
    lock.truncate(0)
    lock.write(f'{socket.gethostname()}, process {os.getpid()}')
    lock.flush()
    _check_same(workdir, config, data)
    write_atomically(workdir / 'config.json', json.dumps(config, indent=2))
    write_atomically(workdir / 'data.json', json.dumps(data, indent=2))
    yield workdir


def _check_same(workdir, config, data):
  changed = []
  if (workdir / 'config.json').exists():
    changed = differences(read_config(workdir), config)
  content = read_data_summary(workdir).get('content', data['content'])
  if content != data['content']:
    changed.append('the content of the data, since the run began')
  if changed:
    raise ValueError(f'{workdir} holds a run of another config:\n  ' + '\n  '.join(changed)
                     + '\nUse another --workdir, or the old values to resume it.')


def is_workdir(folder) -> bool:
  """Whether a run was begun in the folder; that of a published model has a config.json too."""
  return (Path(folder) / 'data.json').exists()


def read_config(workdir) -> dict[str, Any]:
  """The config of a run.

  Raises:
    ValueError: there is none, or it is unreadable.
  """
  path = Path(workdir) / 'config.json'
  if not path.exists():
    raise ValueError(f'{path} does not exist: {workdir} is not the workdir of a run.')
  config = _read_object(path)
  if config is None:
    raise ValueError(f'{path} is damaged. The checkpoints beside it are untouched: put the config '
                     'of the run back, or use another workdir.')
  return config


def read_data_summary(workdir) -> dict[str, Any]:
  """`Data.summary()` of a run; {} where it has none."""
  return _read_object(Path(workdir) / 'data.json') or {}


def write_status(workdir, status: str, **details) -> None:
  """Records 'running', 'done', 'interrupted', 'diverged' or 'failed', where and when."""
  _write_status(workdir, {'status': status, **details, **here_and_now()})


def write_outcome(workdir, status: str, **details) -> None:
  """Records what became of a trial that did not train; asks no device, makes the folder."""
  Path(workdir).mkdir(parents=True, exist_ok=True)
  _write_status(workdir, {'status': status, **details, **now()})


def in_use(workdir) -> bool:
  """Is a process training in the workdir? Yes, too, where the file system has no locks."""
  try:
    with open(Path(workdir) / 'lock', 'rb') as lock:
      fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except FileNotFoundError:
    return False
  except OSError:
    return True
  return False


def read_status(workdir) -> dict[str, Any]:
  """{'status': 'not run'} where there is none."""
  status = _read_object(Path(workdir) / 'status.json') or {}
  return status if isinstance(status.get('status'), str) else {'status': 'not run'}


def has_ended(workdir, config: Mapping[str, Any]) -> bool:
  """Has this very config been trained here to its end, or until it diverged?"""
  if read_status(workdir)['status'] not in ('done', 'diverged'):
    return False
  saved = read_config(workdir)
  # Sizes that are empty in a config come from the data; the saved one has them filled in.
  model = {k: saved['model'].get(k) if v is None else v for k, v in config['model'].items()}
  return not differences(saved, dict(config, model=model))


def write_probe_tokens(workdir, tokens) -> None:
  """Stores the probe inputs of a run, once."""
  path = Path(workdir) / 'probe_tokens.npy'
  if not path.exists():
    temporary = path.with_suffix('.part.npy')
    np.save(temporary, tokens, allow_pickle=False)
    os.replace(temporary, path)


def read_probe_tokens(workdir):
  """The probe inputs of a run; None if it has none.

  Raises:
    ValueError: the file is damaged.
  """
  path = Path(workdir) / 'probe_tokens.npy'
  if not path.exists():
    return None
  try:
    return np.load(path, allow_pickle=False)
  except (OSError, EOFError, ValueError) as error:
    raise ValueError(f'{path} is damaged ({error}). Delete it: training again with the same '
                     'config writes it anew.') from None


def _write_status(workdir, record):
  write_atomically(Path(workdir) / 'status.json', json.dumps(record, indent=2))


def _read_object(path):
  """A JSON object; None where the file is missing or holds anything else."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return None
  return value if isinstance(value, dict) else None
