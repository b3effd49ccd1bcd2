"""Folders on disks and in object stores: gs://bucket/runs is as good a workdir as runs."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection
from pathlib import Path

import fsspec
from etils import epath

from sink_jax.places import expanded, writing

SMALL = 1 << 23  # bytes of a file of ours in JSON, which may take thirty times as much memory

_TEMPORARY = re.compile(r'\..+\.[0-9a-f]{12}')


def folder(path):
  """A path object, absolute where it is on a disk: `pathlib.Path`, or its like for gs://.

  Everything that a user names as a workdir, a folder of runs or an output goes through it, so
  that a gs:// path never becomes one on a disk. What it has returned is returned as it is.

  Raises:
    ValueError: a gs:// path without the package that reads them, one that cannot be reached,
      a ~ without a home directory, or one that `pathlib.Path` has spoilt.
  """
  if os.fspath(path).startswith('gs:/') and isinstance(path, Path):
    raise ValueError(f'{path} has lost a slash in pathlib.Path: give gs:// paths as text.')
  if '://' not in os.fspath(path):
    return expanded(path).absolute()
  if not isinstance(path, str):  # reached before
    return path
  # What another process has written since is read anew, not from a memory of older sizes.
  fsspec.config.conf['gcs'] = {**fsspec.config.conf.get('gcs', {}), 'use_listings_cache': False}
  place = epath.Path(path)
  try:
    place.exists()
  except ImportError:
    raise ValueError(f'{path}: gs:// paths need gcsfs: pip install "etils[epath-gcs]".') from None
  except Exception as error:  # credentials, names of buckets, the network: other libraries' own
    raise ValueError(f'{path} cannot be reached: {" ".join(str(error).split())[:300]}.') from error
  return place


def is_local(path) -> bool:
  """Is it on a disk, with locks, appending and renaming?"""
  return isinstance(path, Path)


def local_folder(path, option: str, remedy: str) -> Path:
  """`folder` for what can only be on a disk.

  Raises:
    ValueError: it is in an object store; names the option and the remedy.
  """
  if '://' in os.fspath(path):
    raise ValueError(f'{option}={path} must be a folder on a disk: {remedy}.')
  return folder(path)


def files_below(path) -> list:
  """All files of a folder and of its folders, sorted; of an object store in one listing.

  Raises:
    FileNotFoundError: there is no such folder.
  """
  found = []
  if is_local(path):
    for entry in path.iterdir():
      found += files_below(entry) if entry.is_dir() else [entry]
  else:
    store, root = fsspec.url_to_fs(os.fspath(path))
    found = [path / file.removeprefix(root).lstrip('/') for file in store.find(root)]
    if not found:
      raise FileNotFoundError(f'{path} does not exist.')
  return sorted(found)


def files_named(path, names: Collection[str]) -> list:
  """Files of certain names in a folder or below it, sorted."""
  if is_local(path):
    return sorted(file for name in names for file in path.rglob(name))
  return [file for file in files_below(path) if file.name in names]


def free_name(path):
  """The path, or its like that is not taken: NAME.again; its folder is made."""
  path.parent.mkdir(parents=True, exist_ok=True)
  while path.exists():
    path = path.with_name(path.name + '.again')
  return path


def move(source, target) -> None:
  """Moves a folder; in an object store, file by file."""
  if is_local(source):
    source.rename(target)
    return
  for file in files_below(source):
    file.copy(target / file.relative_to(source))
  source.rmtree()


def write_atomically(path, content: str | bytes) -> None:
  """Writes a whole file or nothing, also through a power cut."""
  data = content.encode() if isinstance(content, str) else content
  if not is_local(path):  # an object appears when it is complete
    path.write_bytes(data)
    return
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex[:12]}')  # as _TEMPORARY has it
  with writing(path), open(temporary, 'wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def remove_temporaries(place) -> None:
  """Removes what a killed `write_atomically` has left in a folder."""
  if is_local(place) and place.is_dir():
    for path in place.iterdir():
      if _TEMPORARY.fullmatch(path.name):
        path.unlink(missing_ok=True)
