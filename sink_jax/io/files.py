"""Files that are written completely or not at all, texts that are read, and digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
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
_BYTE_ORDER_MARK = '\ufeff'
_LFS_POINTER = b'version https://git-lfs.github.com/spec/'


class WrongContent(ValueError):
  """A file holds something else than its name says; the message names file and remedy."""


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
  """Turns any error of a foreign file into a ValueError that begins with `what`.

  A WrongContent passes, since its message has another remedy.
  """
  try:
    yield
  except (KeyboardInterrupt, SystemExit, MemoryError, WrongContent):
    raise
  except BaseException as error:  # the Rust code of tokenizers panics with a BaseException
    raise ValueError(f'{what} ({" ".join(str(error).split())[:200]})') from None


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
  """Yields a file to write, which replaces `path` when the block ends without error, not before.

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
  """Reads a text as `decoded` does; a ValueError for a device, or for more than `largest` bytes."""
  path = Path(path) if isinstance(path, str) else path
  with path.open('rb') as file:
    data = file.read(largest + 1) if path.is_file() else None  # a device has no end
  if data is None or len(data) > largest:
    raise ValueError(f'{path} is not a file of at most {largest} bytes.')
  return decoded(data, path)


def decoded(data: bytes, name: object) -> str:
  """The text of a file in UTF-8, without a byte order mark at its start.

  Args:
    name: of the file, for messages.

  Raises:
    WrongContent: the text is in UTF-16 or UTF-32, or the file is a pointer of Git LFS.
    ValueError: a byte is not UTF-8; says which.
  """
  check_start(data, name)
  try:
    return data.decode('utf-8').removeprefix(_BYTE_ORDER_MARK)
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{name}: not UTF-8 at byte {error.start}; convert it (iconv -t UTF-8), or leave it out.'
    ) from None


def check_start(data: bytes, name: object) -> None:
  """Raises the WrongContent of `decoded`, which the first bytes of a file suffice to see."""
  _check_not_pointer(data, name)
  # The function of the standard library for JSON: it sees byte order marks, and without one the
  # zeros that another encoding puts between ASCII letters.
  encoding = json.detect_encoding(data[:4]).upper()
  if not encoding.startswith('UTF-8'):
    iconv = encoding.replace('-LE', 'LE').replace('-BE', 'BE')
    raise WrongContent(f'{name} is {iconv}, not UTF-8: convert it (iconv -f {iconv} -t UTF-8).')


def check_downloaded(path: AnyPath) -> None:
  """Raises a WrongContent if a file is a pointer of Git LFS instead of its content."""
  with path.open('rb') as file:
    _check_not_pointer(file.read(len(_LFS_POINTER)), path)


def _check_not_pointer(data: bytes, name: object) -> None:
  if data.startswith(_LFS_POINTER):
    raise WrongContent(
      f'{name} is a pointer of Git LFS, not the file: run "git lfs pull" in the '
      'clone, or download the file itself.'
    )


def sha256_of_files(files: Iterable[AnyPath]) -> list[str]:
  """The hexadecimal digests of files, in order, several at a time: hashing releases the GIL."""

  def digest(path: AnyPath) -> str:
    with path.open('rb') as file:
      digest = hashlib.file_digest(file, 'sha256')  # pyright: ignore[reportArgumentType]
      return digest.hexdigest()

  with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    return list(pool.map(digest, files))
