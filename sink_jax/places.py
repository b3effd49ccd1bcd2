"""Paths that people write, and errors that name the file they are about."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

_REMEDY = ('write the path in full; for caches, set SINK_JAX_CACHE=/PATH, which stands in the place '
           'of ~/.cache/sink_jax')


def expanded(path: str | os.PathLike) -> pathlib.Path:
  """The path with its ~ replaced.

  Raises:
    ValueError: this user, or the one that ~NAME names, has no home directory.
  """
  try:
    return pathlib.Path(path).expanduser()
  except RuntimeError:
    raise ValueError(f'{path}: there is no such home directory here: {_REMEDY}.') from None


def cache_root(option: str = '') -> pathlib.Path:
  """The folder of all caches: the option, else $SINK_JAX_CACHE, else ~/.cache/sink_jax.

  An option such as gs://bucket/folder is not of this machine, so it has the default.

  Raises:
    ValueError: the default is below the home directory, and this user has none.
  """
  local = '' if '://' in option else option
  folder = local or os.environ.get('SINK_JAX_CACHE') or '~/.cache/sink_jax'
  return expanded(folder)


@contextlib.contextmanager
def writing(path) -> Iterator[None]:
  """Names the file in errors of the system that do not: a full disk, a limit of sizes."""
  try:
    yield
  except OSError as error:
    if error.errno is None or error.filename is not None:
      raise
    limit = ' (ulimit -f is the largest size it may have)' if error.errno == errno.EFBIG else ''
    raise OSError(error.errno, f'{error.strerror}{limit}', os.fspath(path)) from None
