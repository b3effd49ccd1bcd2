"""SHA-256 digests of the files of a chunk cache: written once, checked on request."""

from __future__ import annotations

import hashlib
import os
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

from sink_jax.places import writing

_BLOCK = 1 << 22


def sha256(path: os.PathLike, seen: Callable[[int], None] = lambda size: None) -> str:
  """The digest of a file; `seen` is told the bytes of every block that was read."""
  digest = hashlib.sha256()
  with path.open('rb') as file:
    while block := file.read(_BLOCK):
      digest.update(block)
      seen(len(block))
  return digest.hexdigest()


def described(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """{name: {'bytes', 'sha256'}} of the files that a finished cache has beside its manifest."""
  paths = [*folder.glob('*.np[yz]'), *folder.glob('tokenizer.json')]
  return {path.name: {'bytes': path.stat().st_size, 'sha256': sha256(path)}
          for path in sorted(paths)}


def content(files: dict[str, dict[str, Any]]) -> str:
  """Identifies the chunks by what they hold, from what `described` returns."""
  digest = hashlib.sha256()
  for name in sorted(files):
    if name.endswith('.npy'):
      digest.update(bytes.fromhex(files[name]['sha256']))
  return digest.hexdigest()[:32]


def write_text(path: pathlib.Path, text: str, contended: bool = False) -> None:
  """Writes a whole file or nothing, also through a power cut.

  contended: other processes may write it at the same time.
  """
  partial = path.with_suffix(f'.{uuid.uuid4().hex[:8]}' if contended else '.new')
  with writing(path), open(partial, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)
