"""Whole files: written completely or not at all, and read only where they are small."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sink_jax.io.paths import AnyPath, is_local

SMALL = 1 << 23  # bytes of a JSON file of a run, which may take thirty times as much memory
LARGEST = 1 << 27  # bytes; the tokenizers and indices of published models are below 40 MB

_TEMPORARY = re.compile(r'\..+\.[0-9a-f]{12}')


@contextlib.contextmanager
def named_in_errors(path: str | os.PathLike) -> Iterator[None]:
  """Names the file in errors of the system that do not: a full disk, a limit of sizes."""
  try:
    yield
  except OSError as error:
    if error.errno is None or error.filename is not None:
      raise
    limit = ' (ulimit -f is the largest size it may have)' if error.errno == errno.EFBIG else ''
    raise OSError(error.errno, f'{error.strerror}{limit}', os.fspath(path)) from None


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
  """Errors of a file from elsewhere as a ValueError that begins with `what`."""
  try:
    yield
  except (KeyboardInterrupt, SystemExit, MemoryError):
    raise
  except BaseException as error:  # the Rust code of tokenizers panics with a BaseException
    raise ValueError(f'{what} ({" ".join(str(error).split())[:200]})') from None


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
  """Yields a file to write, which takes the place of `path` when the block ends without error.

  Until then `path` is what it was, and after a power cut it is one or the other as a whole. An
  error removes what was written. What a killed process leaves is hidden, and removed where the
  owner of the folder calls `remove_temporaries`.
  """
  # Beside `path`, since only within one file system is a rename atomic.
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex[:12]}')  # as _TEMPORARY has it
  try:
    with named_in_errors(path), open(temporary, 'wb') as file:
      yield file
      # The name may reach the disk before the bytes do, and a power cut then leaves a hole.
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except Exception:
    temporary.unlink(missing_ok=True)
    raise


def write_atomically(path: AnyPath, content: str | bytes) -> None:
  """Writes a whole file or nothing, also through a power cut; on a disk or in an object store."""
  data = content.encode() if isinstance(content, str) else content
  if is_local(path):
    with replace_atomically(path) as file:
      file.write(data)
  else:
    path.write_bytes(data)  # an object appears when it is complete


def remove_temporaries(folder: AnyPath) -> None:
  """Removes what killed processes have left of `replace_atomically` in a folder."""
  if is_local(folder) and folder.is_dir():
    for path in folder.iterdir():
      if _TEMPORARY.fullmatch(path.name):
        path.unlink(missing_ok=True)


def read_text_limited(path: str | AnyPath, largest: int = LARGEST) -> str:
  """Reads a text in UTF-8 from a disk or an object store, `largest` bytes at most.

  Files that a user names may be anything: a device without an end, or more than the memory.

  Raises:
    ValueError: it is no regular file, too large, or no UTF-8. OSError: it cannot be read.
  """
  path = Path(path) if isinstance(path, str) else path
  with path.open('rb') as file:
    if path.is_file():  # a device has no end
      data = file.read(largest + 1)
      if len(data) <= largest:
        return data.decode('utf-8')
  raise ValueError(f'{path} is not a file of at most {largest} bytes.')
