"""Folders on disks and in object stores: gs://bucket/runs is as good a workdir as runs."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import fsspec
from etils import epath

SMALL = 1 << 23  # bytes of a file of ours in JSON, which may take thirty times as much memory


def folder(path):
  """A path object, absolute where it is on a disk: `pathlib.Path`, or its like for gs://.

  Raises:
    ValueError: a gs:// path without the package that reads them.
  """
  if '://' not in os.fspath(path):
    return Path(path).expanduser().absolute()
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


def files_below(path) -> list:
  """All files of a folder and of its folders, sorted; object stores have no `**`."""
  found = []
  for entry in path.iterdir():
    found += files_below(entry) if entry.is_dir() else [entry]
  return sorted(found)


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
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex[:12]}')
  with open(temporary, 'wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
