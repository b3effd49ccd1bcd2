"""Files that are written completely or not at all, files that are small enough to read, and digests."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from sink_jax.io.paths import AnyPath, is_local

SMALL = 1 << 23  # most bytes of a run's JSON file, which may take thirty times as much memory
_TEMPORARY = re.compile(r'\..+\.[0-9a-f]{12}')


@contextlib.contextmanager
def named_in_errors(path: str | os.PathLike) -> Iterator[None]:
  """Adds the file's name to system errors that lack it, such as that of a full disk."""
  try:
    yield
  except OSError as error:
    if error.errno is None or error.filename is not None:
      raise
    raise OSError(error.errno, error.strerror, os.fspath(path)) from None


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
  """Turns any error of a foreign file into a ValueError that begins with `what`."""
  try:
    yield
  except (KeyboardInterrupt, SystemExit, MemoryError):
    raise
  except BaseException as error:  # the Rust code of tokenizers panics with a BaseException
    raise ValueError(f'{what} ({" ".join(str(error).split())[:200]})') from None


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
  """Yields a file to write, which replaces `path` when the block ends without error, and not before.

  `remove_temporaries` deletes what a killed process leaves.
  """
  # Next to `path`, since a rename is atomic only within one file system.
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex[:12]}')  # matches _TEMPORARY
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
  """Writes the complete file or nothing, even in a power cut; on a disk or in an object store."""
  data = content.encode() if isinstance(content, str) else content
  if is_local(path):
    with replace_atomically(path) as file:
      file.write(data)
  else:
    path.write_bytes(data)  # an object appears when it is complete


def remove_temporaries(folder: AnyPath) -> None:
  """Removes the files that `replace_atomically` left in a folder when its process was killed."""
  if is_local(folder) and folder.is_dir():
    for path in folder.iterdir():
      if _TEMPORARY.fullmatch(path.name):
        path.unlink(missing_ok=True)


def read_text_limited(path: str | AnyPath, largest: int = 1 << 27) -> str:
  """Reads a UTF-8 text; raises a ValueError for a device, or for more than `largest` bytes."""
  path = Path(path) if isinstance(path, str) else path
  with path.open('rb') as file:
    data = file.read(largest + 1) if path.is_file() else None  # a device has no end
  if data is None or len(data) > largest:
    raise ValueError(f'{path} is not a file of at most {largest} bytes.')
  return data.decode('utf-8')


def sha256_of_files(files: Iterable[AnyPath]) -> list[str]:
  """The hexadecimal digests of files, in order, several at a time: hashing releases the GIL."""
  def digest(path: AnyPath) -> str:
    with path.open('rb') as file:
      found = hashlib.sha256()
      while block := file.read(1 << 22):
        found.update(block)
      return found.hexdigest()

  with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    return list(pool.map(digest, files))
