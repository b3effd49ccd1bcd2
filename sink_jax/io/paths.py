"""Paths that people write: on a disk, or in an object store such as gs://bucket/runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import fsspec
from etils import epath

AnyPath = Path | epath.Path  # on a disk, or its like in an object store; see `to_path`

_REMEDY = ('write the path in full; for caches, set SINK_JAX_CACHE=/PATH, which stands in the place '
           'of ~/.cache/sink_jax')


def expanded(path: str | os.PathLike) -> Path:
  """The path with its ~ replaced.

  Raises:
    ValueError: this user, or the one that ~NAME names, has no home directory.
  """
  try:
    return Path(path).expanduser()
  except RuntimeError:
    raise ValueError(f'{path}: there is no such home directory here: {_REMEDY}.') from None


def cache_root(option: str = '') -> Path:
  """The folder of all caches: the option, else $SINK_JAX_CACHE, else ~/.cache/sink_jax.

  An option such as gs://bucket/folder is not of this machine, so it has the default.

  Raises:
    ValueError: the default is below the home directory, and this user has none.
  """
  local = '' if '://' in option else option
  folder = local or os.environ.get('SINK_JAX_CACHE') or '~/.cache/sink_jax'
  return expanded(folder)


def to_path(path):
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


def to_local_path(path, option: str, remedy: str) -> Path:
  """`folder` for what can only be on a disk.

  Raises:
    ValueError: it is in an object store; names the option and the remedy.
  """
  if '://' in os.fspath(path):
    raise ValueError(f'{option}={path} must be a folder on a disk: {remedy}.')
  return to_path(path)


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


def move_folder(source, target) -> None:
  """Moves a folder; in an object store, file by file."""
  if is_local(source):
    source.rename(target)
    return
  for file in files_below(source):
    file.copy(target / file.relative_to(source))
  source.rmtree()


@contextlib.contextmanager
def importable_configs(path: str | Path) -> Iterator[None]:
  """While it lasts, a config file can import others of its folder, as configs.NAME."""
  root = str(Path(path).resolve().parent.parent)
  sys.path.insert(0, root)
  try:
    yield
  finally:
    sys.path.remove(root)
