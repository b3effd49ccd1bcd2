"""Whether the files of a chunk cache are those that were built; checked while a run trains.

Reading a large cache takes minutes. So it is done once for each copy of a cache and each change of
its files, in a thread, and a run only waits for it before it saves its first checkpoint: what was
trained on damaged data must not outlast the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sink_jax.data.cache import Cache
from sink_jax.io.files import read_text_limited, write_atomically
from sink_jax.io.hashing import sha256
from sink_jax.io.paths import cache_root

_PATIENCE = 3  # seconds of waiting after which a line explains it
_log = logging.getLogger('sink_jax')


class DamagedCache(ValueError):
  """A file of a cache is not the one that was built."""


class CacheCheck:
  """Compares the files of a cache with the digests in its manifest, in a thread.

  Files that an earlier check found right, and that have not changed since, are not read again.
  """

  def __init__(self, cache: Cache):
    self._cache = cache
    self._error: Exception | None = None
    # A daemon, so that a process that ends with an error does not first read the rest of a corpus.
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> CacheCheck:
    """Begins, and returns the check itself."""
    self._thread.start()
    return self

  def wait(self) -> None:
    """Returns once all files are known to be right.

    Raises:
      DamagedCache: names those that differ, or that cannot be read.
    """
    self._thread.join(_PATIENCE)
    if self._thread.is_alive():
      _log.warning('waiting for the check of the files in %s: nothing is saved before it ends',
                   self._cache.folder)
      self._thread.join()
    if self._error is not None:
      raise self._error

  def _run(self) -> None:
    try:
      check(self._cache)
    except OSError as error:
      self._error = DamagedCache(f'{self._cache.folder} cannot be checked: {error}')
    except Exception as error:  # whatever it is, the files are not known to be right
      self._error = error


def check(cache: Cache, afresh: bool = False, on_read: Callable[[int], object] = lambda size: None
          ) -> None:
  """Compares the files of a cache with the digests in its manifest, if it holds some.

  The result goes into a stamp: size, time of change, inode and digest of every file that is right.
  Processes of a host that check one cache at the same time do it one after the other, so that the
  first reads the files, and the others its stamp.

  Args:
    afresh: whether all files are read, even those with a valid stamp.
    on_read: is called with the size of every block that was read, in bytes.

  Raises:
    DamagedCache: names the files that differ. OSError: one cannot be read.
  """
  files = cache.manifest.get('files', {})
  # First without the lock: as a rule the stamp knows all files, and nothing has to be waited for.
  if not afresh and not _unknown(cache.folder, files):
    return
  with _one_at_a_time(cache.folder):
    # Asked again, since another process may have checked the files while this one waited. Sizes and
    # times are taken before a file is read: one that changes meanwhile does not fit its stamp.
    names = list(files) if afresh else _unknown(cache.folder, files)
    right, wrong = {name: _identity(cache.folder, name, files) for name in files}, []
    for name in names:
      if sha256(cache.folder / name, on_read) != files[name].get('sha256'):
        wrong.append(name)
        del right[name]
    if names:
      _write(cache.folder, right)
  if wrong:
    raise DamagedCache(f'{cache.folder}: {", ".join(wrong)} changed since the build; delete the '
                       'folder; the next run builds or copies it again.')


def _unknown(folder: pathlib.Path, files: Mapping[str, Any]) -> list[str]:
  """Names of the files that no stamp holds as they are now."""
  stamps = [_read(path) for path in _stamp_paths(folder)]
  return [name for name in files
          if not any(s.get(name) == _identity(folder, name, files) for s in stamps)]


def _identity(folder: pathlib.Path, name: str, files: Mapping[str, Any]) -> dict[str, Any]:
  # The inode changes where a file is replaced by one of the same size and time.
  stat = os.stat(folder / name)
  return {'bytes': stat.st_size, 'mtime_ns': stat.st_mtime_ns, 'inode': stat.st_ino,
          'sha256': files[name].get('sha256')}


def _stamp_paths(folder: pathlib.Path) -> list[pathlib.Path]:
  """Where a stamp may be: with the cache, or in the user's folder where that is read-only."""
  paths = [folder / 'verified.json']
  with contextlib.suppress(RuntimeError, ValueError):  # a user without a home
    key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    paths.append(cache_root() / 'verified' / f'{key}.json')
  return paths


def _read(path: pathlib.Path) -> dict[str, Any]:
  try:
    stamp = json.loads(read_text_limited(path))
  except (OSError, ValueError, RecursionError):
    return {}
  return stamp if isinstance(stamp, dict) else {}


def _write(folder: pathlib.Path, right: Mapping[str, Any]) -> None:
  for path in _stamp_paths(folder):
    with contextlib.suppress(OSError):
      path.parent.mkdir(parents=True, exist_ok=True)
      write_atomically(path, json.dumps(right, indent=1) + '\n')
      return


@contextlib.contextmanager
def _one_at_a_time(folder: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a stamp; without locks every process reads the files for itself."""
  for path in _stamp_paths(folder):
    lock = path.with_suffix('.lock')
    try:
      lock.parent.mkdir(parents=True, exist_ok=True)
      file = open(lock, 'a')
    except OSError:
      continue
    with file:
      with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
      try:
        yield
      finally:
        with contextlib.suppress(OSError):
          # Nothing stays beside the cache. A process that waited for the removed file may then read
          # the files at the same time as a newer one, which costs time alone.
          lock.unlink()
    return
  yield
