"""SHA-256 of files, of many together, and of streams."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from sink_jax.io.paths import AnyPath

_BLOCK_BYTES = 1 << 22


def sha256(path: AnyPath, on_read: Callable[[int], object] = lambda size: None) -> str:
  """The hexadecimal digest of a file of a disk or of an object store.

  Args:
    on_read: is called with the size of every block that was read, in bytes.
  """
  with path.open('rb') as file:
    return sha256_of_stream(file, lambda block: on_read(len(block)))


def sha256_of_stream(stream: IO[bytes], on_block: Callable[[bytes], object]) -> str:
  """The hexadecimal digest of a stream, read to its end; `on_block` is called with every block."""
  digest = hashlib.sha256()
  while block := stream.read(_BLOCK_BYTES):
    digest.update(block)
    on_block(block)
  return digest.hexdigest()


def sha256_of_files(files: Iterable[AnyPath]) -> list[str]:
  """Digests of files in order, several at a time: hashing leaves the interpreter free."""
  with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    return list(pool.map(sha256, files))


def sha256_of_digests(digests: Mapping[str, str]) -> str:
  """The hexadecimal digest of {name: digest}, in whichever order the names stand."""
  return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
