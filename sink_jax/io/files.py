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

from sink_jax.io.paths import is_local

SMALL = 1 << 23  # bytes of a file of ours in JSON, which may take thirty times as much memory
LARGEST = 1 << 27  # bytes; the tokenizers and indices of published models are below 40 MB

_TEMPORARY = re.compile(r'\..+\.[0-9a-f]{12}')


@contextlib.contextmanager
def named_in_errors(path) -> Iterator[None]:
  """Names the file in errors of the system that do not: a full disk, a limit of sizes."""
  try:
    yield
  except OSError as error:
    if error.errno is None or error.filename is not None:
      raise
    limit = ' (ulimit -f is the largest size it may have)' if error.errno == errno.EFBIG else ''
    raise OSError(error.errno, f'{error.strerror}{limit}', os.fspath(path)) from None


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
  """Yields a file to write, which takes the place of `path` when the block ends without error.

  Until then `path` is what it was, and after a power cut it is one or the other as a whole. An
  error removes what was written; what a killed process leaves, `remove_temporaries` removes.
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


def write_atomically(path, content: str | bytes) -> None:
  """Writes a whole file or nothing, also through a power cut; on a disk or in an object store."""
  data = content.encode() if isinstance(content, str) else content
  if not is_local(path):  # an object appears when it is complete
    path.write_bytes(data)
    return
  with replace_atomically(path) as file:
    file.write(data)


def remove_temporaries(place) -> None:
  """Removes what killed processes have left of `replace_atomically` in a folder."""
  if is_local(place) and place.is_dir():
    for path in place.iterdir():
      if _TEMPORARY.fullmatch(path.name):
        path.unlink(missing_ok=True)


def read_text_limited(path: str | os.PathLike, largest: int = LARGEST) -> str:
  """The text of a UTF-8 file, given as a path of a disk or of an object store.

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
