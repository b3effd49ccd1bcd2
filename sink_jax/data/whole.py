"""Whole files that must be small: what is not a file, or too large, is refused."""

from __future__ import annotations

import os

LARGEST = 1 << 27  # bytes; the tokenizers and indices of published models are below 40 MB


def whole(path: str | os.PathLike, largest: int = LARGEST) -> str:
  """The text of a UTF-8 file.

  Raises:
    ValueError: it is no regular file, too large, or no UTF-8. OSError: it cannot be read.
  """
  with open(path, 'rb') as file:
    if os.path.isfile(path):  # a device has no end
      data = file.read(largest + 1)
      if len(data) <= largest:
        return data.decode('utf-8')
  raise ValueError(f'{path} is not a file of at most {largest} bytes.')
