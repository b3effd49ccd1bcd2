"""Lines of plain, gzip and zstd text files, with errors that name the file."""

from __future__ import annotations

import gzip
import pathlib
import zlib
from collections.abc import Iterator

_BLOCK = 1 << 20


def lines(path: pathlib.Path) -> Iterator[bytes]:
  """Yields the lines of a file, decompressed by its suffix (.gz, .zst).

  Raises:
    ValueError: the compressed stream is damaged or ends early.
  """
  if path.suffix == '.gz':
    yield from _gzip_lines(path)
  elif path.suffix == '.zst':
    yield from _zstd_lines(path)
  else:
    with open(path, 'rb') as file:
      yield from file


def _gzip_lines(path):
  try:
    with gzip.open(path, 'rb') as file:
      yield from file
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise _damaged(path, 'gzip', error) from error


def _zstd_lines(path):
  import zstandard
  tail = b''
  try:
    for block in _zstd_blocks(path, zstandard.ZstdDecompressor()):
      *whole, tail = (tail + block).split(b'\n')
      yield from whole
  except zstandard.ZstdError as error:
    raise _damaged(path, 'zstd', error) from error
  if tail:
    yield tail


def _zstd_blocks(path, decompressor):
  # The library's file readers take an early end for the end of the file, so the
  # frames are walked here and an unfinished one is an error.
  frame = None
  with open(path, 'rb') as file:
    while data := file.read(_BLOCK):
      while data:
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(data)
        data = frame.unused_data if frame.eof else b''
        frame = None if frame.eof else frame
  if frame is not None:
    raise _damaged(path, 'zstd', 'the stream ends inside a frame')


def _damaged(path, kind, why):
  return ValueError(f'{path}: damaged or truncated {kind} file ({why}); '
                    'copy or download it again, or remove it.')
