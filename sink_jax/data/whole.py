"""Whole files that must be small: what is not a file, or too large, is refused."""

from __future__ import annotations

import os
import pathlib

LARGEST = 1 << 27  # bytes; the tokenizers and indices of published models are below 40 MB


def whole(path: str | os.PathLike, largest: int = LARGEST) -> str:
  """The text of a UTF-8 file, given as a path of a disk or of an object store.

  Raises:
    ValueError: it is no regular file, too large, or no UTF-8. OSError: it cannot be read.
  """
  path = pathlib.Path(path) if isinstance(path, str) else path
  with path.open('rb') as file:
    if path.is_file():  # a device has no end
      data = file.read(largest + 1)
      if len(data) <= largest:
        return data.decode('utf-8')
  raise ValueError(f'{path} is not a file of at most {largest} bytes.')
