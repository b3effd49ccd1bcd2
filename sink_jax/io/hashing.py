"""SHA-256 of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

_BLOCK = 1 << 22


def sha256(path: os.PathLike, seen: Callable[[int], None] = lambda size: None) -> str:
  """The digest of a file; `seen` is told the bytes of every block that was read."""
  digest = hashlib.sha256()
  with path.open('rb') as file:
    while block := file.read(_BLOCK):
      digest.update(block)
      seen(len(block))
  return digest.hexdigest()
