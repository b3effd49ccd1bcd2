"""Folders that several processes want and one of them makes: locked, continued, published.

A folder is made under another name, NAME.partial, and appears as NAME by one rename, complete. The
lock is a file inside it: the kernel releases it when its process ends in whatever way, and with the
folder it is renamed or removed, so that no lock is ever left to be tidied up.
"""

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
from typing import TextIO

from sink_jax.io.files import named_in_errors, remove_temporaries

_STALE_SECONDS = 7 * 24 * 3600
_log = logging.getLogger('sink_jax')


class DiskFull(OSError):
  """There is no space left; the same command continues once there is."""


def build_once(final: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
  """Makes a folder, unless it is complete: that is, has a manifest.json.

  `make` works in `<final>.partial`, which is renamed when it returns. The process that holds the
  lock there makes it, and others wait. `make` has to continue what a killed process leaves there.
  A ValueError of `make` means that the input is wrong, so the folder is removed.

  Raises:
    DiskFull: there is no space left; `make` may name how much is needed.
  """
  final.parent.mkdir(parents=True, exist_ok=True)
  _remove_stale(final.parent)
  while not (final / 'manifest.json').exists():
    partial = final.with_name(f'{final.name}.partial')
    with disk_full_named(partial), _claimed(partial) as folder:
      # Another process has finished or removed the folder meanwhile, so that the loop asks anew.
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

  Other errors of writing name the folder where they do not name a file.
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
                   'command again: it continues from there.') from None


@contextlib.contextmanager
def _claimed(partial: pathlib.Path) -> Iterator[pathlib.Path | None]:
  """Yields the folder once this process alone has it, or None where another has finished it."""
  partial.mkdir(exist_ok=True)
  try:
    lock = open(partial / 'lock', 'a')
  except FileNotFoundError:  # renamed in between
    yield None
    return
  with lock:
    try:
      _lock(lock, partial)
    except OSError:  # a file system without locks: every process works alone, the first one wins
      private = partial.with_name(
          f'{partial.name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}')
      private.mkdir()
      try:
        yield private
      finally:
        shutil.rmtree(private, ignore_errors=True)
      return
    # While this process waited for the lock, the folder may have been renamed or removed with it.
    yield partial if _is_at(lock, partial / 'lock') else None


def _lock(lock: TextIO, partial: pathlib.Path) -> None:
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    _log.warning('another process is making %s: waiting for it', partial)
    fcntl.flock(lock, fcntl.LOCK_EX)


def _is_at(file: TextIO, path: pathlib.Path) -> bool:
  """Whether the file that was opened is still the one at this path."""
  try:
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
  except FileNotFoundError:
    return False


def _publish(folder: pathlib.Path, final: pathlib.Path) -> None:
  if final.exists() and not (final / 'manifest.json').exists():
    _remove(final)  # a copy that somebody began to make by hand
  try:
    os.rename(folder, final)
  except OSError:
    if not (final / 'manifest.json').exists():  # else another process was faster
      raise
  (final / 'lock').unlink(missing_ok=True)


def _remove(folder: pathlib.Path) -> None:
  """Removes a folder; renamed first, so that no process begins to work in it meanwhile."""
  doomed = folder.with_name(f'{folder.name}.partial-{uuid.uuid4().hex[:8]}')
  try:
    os.rename(folder, doomed)
  except FileNotFoundError:
    return
  shutil.rmtree(doomed, ignore_errors=True)


def _remove_stale(root: pathlib.Path) -> None:
  """Removes unfinished folders that no process of any host has written to for a week."""
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
