"""The files of components outside this package, which a config names in its key `plugins`.

A config that a person writes imports its files. The config of a stored run is data, perhaps
somebody else's: of its files only those are imported that the person names, or that a training of
this person on this machine has recorded, by path and content, below the folder of caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sink_jax.component import Component
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import cache_root, expanded, import_file


def import_plugins(files: str | os.PathLike) -> str:
  """Imports Python files, with commas between them; returns their absolute paths in this form.

  Raises:
    ValueError: one does not exist, or ends with an error.
  """
  try:
    modules = [import_file(name) for name in _names(os.fspath(files))]
  except ValueError as error:
    raise ValueError(f'plugins: {error}') from None
  return ','.join(str(module.__file__) for module in modules)


def plugins_of(experiment: Any) -> str:
  """The key `plugins` of a run: that of its config, or the files of its own components."""
  return experiment.plugins or ','.join(sorted(_files(experiment)))


def record_plugins(files: str) -> None:
  """Records files that this process has imported: it may then import them for a stored run, too."""
  loaded = {getattr(module, '__file__', None) for module in list(sys.modules.values())}
  # Without a record a file has to be named.
  with contextlib.suppress(OSError, ValueError):
    for name in _names(files):
      path = _resolved(name)
      if loaded & {name, str(path)}:
        record = _record(path)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, _content(path))


def import_recorded(config: Mapping[str, Any]) -> None:
  """Imports the files of a stored config that a training has recorded and that are unchanged."""
  for name in _names(str(config.get('plugins') or '')):
    if _is_recorded(name):
      import_plugins(name)


def _is_recorded(name: str) -> bool:
  """True if there is a record of the file; one without a record is not opened."""
  try:
    path = _resolved(name)
    record = _record(path)
    # A folder of caches may be shared: another person's records count only for them.
    own = record.stat().st_uid == os.getuid()
    return own and record.read_text() == _content(path)
  except (OSError, ValueError):
    return False


def _record(path: Path) -> Path:
  """Where the record of a file lies."""
  folder = cache_root() / f'plugins-{os.getuid()}'
  return folder / hashlib.sha256(os.fsencode(path)).hexdigest()


def _content(path: Path) -> str:
  """The record of a file, as `sha256sum` prints it."""
  return f'{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n'


def _names(files: str) -> list[str]:
  return [name.strip() for name in files.split(',') if name.strip()]


def _resolved(name: str) -> Path:
  return expanded(name).resolve()


def _files(part: Any) -> set[str]:
  """The files outside this package that define components of an experiment, or of a part of it."""
  if isinstance(part, tuple):
    return set().union(*map(_files, part))
  if not dataclasses.is_dataclass(part):
    return set()
  module = type(part).__module__
  file = getattr(sys.modules.get(module), '__file__', None)
  outside = isinstance(part, Component) and not module.startswith('sink_jax.')
  inner = (getattr(part, field.name) for field in dataclasses.fields(part))
  mine = {file} if outside and file else set[str]()
  return mine.union(*map(_files, inner))
