"""Folders that several processes want and one of them makes: claimed, continued, published."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator

from sink_jax.io.files import named_in_errors, remove_temporaries

_STALE_SECONDS = 7 * 24 * 3600
_log = logging.getLogger('sink_jax')


class DiskFull(OSError):
  """There is no space left; the same command goes on once there is."""


def build_once(final: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
  """Makes a folder, unless it is complete: that is, has a manifest.json.

  `make` works in `<final>.partial`, which is renamed when it returns. Whoever holds the lock
  there makes it, and others wait. What a killed process leaves there, `make` has to continue.
  A ValueError means that the input is wrong, so what there is of the folder is removed.

  Raises:
    DiskFull: says how much is free, and `make` how much is needed.
  """
  final.parent.mkdir(parents=True, exist_ok=True)
  _remove_stale(final.parent)
  while not (final / 'manifest.json').exists():
    partial = final.with_name(f'{final.name}.partial')
    with disk_full_named(partial), _claimed(partial) as folder:
      if folder is None or (final / 'manifest.json').exists():
        continue
      remove_temporaries(folder)  # of a process that was killed here; they would be published
      try:
        make(folder)
      except ValueError:
        _remove(folder)
        raise
      _publish(folder, final)


@contextlib.contextmanager
def disk_full_named(folder: pathlib.Path,
                    needed: Callable[[], float] = lambda: 0) -> Iterator[None]:
  """Turns 'no space left' into an error that names the folder, and the bytes needed if known.

  Other errors of writing name the folder where they name no file.
  """
  try:
    with named_in_errors(folder):
      yield
  except DiskFull:
    raise
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    amount = f' About {needed() / 1e9:.2f} GB more are needed.' if needed() else ''
    raise DiskFull(f'No space left on the disk of {folder}.{amount} Make room, then run the same '
                   'command again: it goes on where it was.') from None


@contextlib.contextmanager
def _claimed(partial):
  """Yields the folder once it is ours alone, or None where another process has finished it."""
  partial.mkdir(exist_ok=True)
  try:
    lock = open(partial / 'lock', 'a')
  except FileNotFoundError:  # renamed in between
    yield None
    return
  with lock:
    try:
      _lock(lock, partial)
    except OSError:  # a file system without locks: everybody works alone, the first wins
      private = partial.with_name(
          f'{partial.name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}')
      private.mkdir()
      try:
        yield private
      finally:
        shutil.rmtree(private, ignore_errors=True)
      return
    yield partial if _is_at(lock, partial / 'lock') else None


def _lock(lock, partial):
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    _log.warning('another process is making %s: waiting for it', partial)
    fcntl.flock(lock, fcntl.LOCK_EX)


def _is_at(file, path):
  """Whether the file that was opened is still the one at this path."""
  try:
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
  except FileNotFoundError:
    return False


def _publish(folder, final):
  if final.exists() and not (final / 'manifest.json').exists():
    _remove(final)  # a copy by hand that was broken off
  try:
    os.rename(folder, final)
  except OSError:
    if not (final / 'manifest.json').exists():  # else another process was faster
      raise
  (final / 'lock').unlink(missing_ok=True)


def _remove(folder):
  """Removes a folder in which nobody must begin to work meanwhile."""
  doomed = folder.with_name(f'{folder.name}.partial-{uuid.uuid4().hex[:8]}')
  try:
    os.rename(folder, doomed)
  except FileNotFoundError:
    return
  shutil.rmtree(doomed, ignore_errors=True)


def _remove_stale(root):
  """Removes what nobody has touched for a week, whichever host it was begun on."""
  for partial in root.glob('*.partial*'):
    try:
      newest = max(f.stat().st_mtime for f in [partial, *partial.rglob('*')])
      if newest > time.time() - _STALE_SECONDS:
        continue
      with open(partial / 'lock', 'a') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(partial)
    except BlockingIOError:
      continue
    except OSError:  # another process has just finished it; or there are no locks here
      continue
