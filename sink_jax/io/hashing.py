"""SHA-256 of files and of streams."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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
