"""Paths that people write: on a disk, or in an object store such as gs://bucket/runs.

A path is made once, by `to_path`. On a disk it is a `pathlib.Path`; in an object store an
`epath.Path`, which has the same methods but no locks, no appending and no atomic renames.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

import fsspec
from etils import epath
from fsspec.config import conf

AnyPath = Path | epath.Path


def expanded(path: str | os.PathLike) -> Path:
  """The path with its ~ replaced; a ValueError where there is no such home directory."""
  try:
    return Path(path).expanduser()
  except RuntimeError:
    raise ValueError(
      f'{path}: there is no such home directory: write the path in full; for '
      'caches, set SINK_JAX_CACHE=/PATH.'
    ) from None


def cache_root() -> Path:
  """The folder of all caches."""
  return expanded(os.environ.get('SINK_JAX_CACHE') or '~/.cache/sink_jax')


def to_path(path: str | os.PathLike) -> AnyPath:
  """Returns a path object for a user's path, absolute on a disk.

  Raises:
    ValueError: a gs:// path cannot be reached, or it is any other URL.
  """
  if os.fspath(path).startswith('gs:/') and isinstance(path, Path):
    raise ValueError(f'{path} has lost a slash in pathlib.Path: give gs:// paths as text.')
  if '://' not in os.fspath(path):
    return expanded(path).absolute()
  if isinstance(path, epath.Path):  # it was reached before
    return path
  # gcsfs remembers listings, and so would miss what another process has written since.
  conf['gcs'] = {**conf.get('gcs', {}), 'use_listings_cache': False}
  # It would ask for the kind of the bucket, and wait a minute where that interface is unreachable.
  os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
  try:
    remote = epath.Path(path)
    remote.exists()  # fails here, with a remedy, and not in the middle of a run
  except KeyError:  # file://, https://
    raise ValueError(f'{path}: name a folder of a disk, or gs://bucket/folder.') from None
  except ImportError:
    raise ValueError(f'{path}: gs:// paths need gcsfs: pip install "etils[epath-gcs]".') from None
  except Exception as error:  # credentials, buckets, the network: from many libraries
    raise ValueError(f'{path} cannot be reached: {" ".join(str(error).split())[:300]}.') from error
  return remote


def is_local(path: object) -> TypeGuard[Path]:
  """True if a path is on a disk, with locks, appending and renaming."""
  return isinstance(path, Path)


def check_name(name: str) -> str:
  """Returns the name of a file in a folder; a ValueError if it is absolute or has `..`."""
  if name.startswith('/') or '..' in name.split('/'):
    raise ValueError(f'{name!r} is not the name of a file in the folder.')
  return name


def inside(folder: AnyPath, name: str) -> AnyPath:
  """The path of a name in a folder that somebody else may have made.

  Raises:
    ValueError: it leads out of the folder: the name is absolute or has `..`, or a link does.
  """
  path = folder / check_name(name)
  if is_local(path):
    real, root = os.path.realpath(path), os.path.realpath(folder)
    if not Path(real).is_relative_to(root):
      raise ValueError(
        f'{path} is a link that leads out of {folder}, and nothing else is read: '
        'put the file itself there.'
      )
  return path


def check_links(folder: AnyPath) -> None:
  """Raises a ValueError if a link in a folder, or in one below it, leads out of the folder."""
  if not is_local(folder):  # an object store has no links
    return
  for root, folders, files in os.walk(folder):  # which follows none
    for path in (os.path.join(root, name) for name in (*folders, *files)):
      if os.path.islink(path):
        inside(folder, os.path.relpath(path, folder))


def is_workdir(path: str | AnyPath) -> bool:
  """True if a run began in the folder; the folder of a published model has a config.json too."""
  return (to_path(path) / 'data.json').exists()


def files_below(path: AnyPath) -> list[AnyPath]:
  """All files of a folder and of its folders, sorted.

  Raises:
    FileNotFoundError: there is no such folder.
  """
  if is_local(path):
    files = []
    for entry in path.iterdir():
      files += files_below(entry) if entry.is_dir() and not entry.is_symlink() else [entry]
    return sorted(files)
  # One listing: a request for each folder would take a minute for a checkpoint.
  store, root = fsspec.url_to_fs(os.fspath(path))
  files = [path / file.removeprefix(root).lstrip('/') for file in store.find(root)]
  if not files:  # an object store has no empty folders
    raise FileNotFoundError(f'{path} does not exist.')
  return sorted(files)


def move_folder(source: AnyPath, target: AnyPath) -> None:
  """Moves a folder to a path, or to NAME.again, NAME.again.again, ... where that is taken."""
  target.parent.mkdir(parents=True, exist_ok=True)
  while target.exists():
    target = target.with_name(target.name + '.again')
  if is_local(source):
    source.rename(target)
    return
  for file in files_below(source):  # an object store has no renames
    epath.Path(file).copy(target / file.relative_to(source))
  epath.Path(source).rmtree()


def import_file(path: str | Path) -> ModuleType:
  """Imports a Python file once; it can import other files of its folder as configs.NAME."""
  file = Path(path).expanduser().resolve()
  if not file.is_file() and not os.path.isabs(path):  # the configs of this project, from anywhere
    file = Path(__file__).parents[2] / path
  for module in list(sys.modules.values()):
    if getattr(module, '__file__', None) == str(file):
      return module
  spec = importlib.util.spec_from_file_location(f'configs.{file.stem}', file)
  if spec is None or spec.loader is None or not file.is_file():
    raise ValueError(f'there is no file {path}, or it does not end in .py.')
  module = importlib.util.module_from_spec(spec)
  sys.path[:0] = [str(file.parent.parent), str(file.parent)]
  try:
    spec.loader.exec_module(module)
  except (Exception, SystemExit) as error:  # a config file is a program: anything can be wrong
    raise ValueError(f'{path}: {type(error).__name__}: {error}') from error
  finally:
    del sys.path[:2]
  sys.modules[spec.name] = module
  return module
