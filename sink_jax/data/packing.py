"""Packing (Figure 1, right): join tokenized documents, cut the stream into chunks."""

from __future__ import annotations

import os

import numpy as np


def delimited(tokens: np.ndarray, bos_id: int | None, eos_id: int | None) -> np.ndarray:
  """One document as it enters the stream: BOS before and EOS after it, where not None."""
  parts = ([] if bos_id is None else [[bos_id]]) + [tokens]
  parts += [] if eos_id is None else [[eos_id]]
  return np.concatenate(parts).astype(np.int32)


class Packer:
  """Cuts one endless token stream into non-overlapping chunks of `length` tokens.

  A chunk may begin anywhere in a document and may span several. Only the
  unfinished tail is kept between calls, so memory is bounded by one document.
  The tail that is left at the end of the stream is dropped by never asking for it.
  """

  def __init__(self, length: int):
    self._length = length
    self._tail = np.zeros(0, np.int32)
    self.tokens = 0  # all tokens ever added, the tail included

  def add(self, tokens: np.ndarray) -> np.ndarray:
    """Appends tokens to the stream; returns the (n, length) chunks it completes."""
    self.tokens += len(tokens)
    stream = np.concatenate([self._tail, tokens]) if len(self._tail) else tokens
    whole = len(stream) // self._length * self._length
    self._tail = np.array(stream[whole:], np.int32)
    return np.asarray(stream[:whole], np.int32).reshape(-1, self._length)


class ChunkWriter:
  """Streams (n, length) chunks into one `.npy` file whose row count is not known yet."""

  def __init__(self, path: str | os.PathLike, length: int, dtype: np.dtype):
    self.rows = 0
    self._length = length
    self._dtype = np.dtype(dtype)
    self._file = open(path, 'wb')
    self._write_header()
    self._start = self._file.tell()

  def write(self, chunks: np.ndarray) -> None:
    self._file.write(np.ascontiguousarray(chunks, self._dtype).tobytes())
    self.rows += len(chunks)

  def close(self) -> None:
    # NumPy pads the header so that the first axis can grow in place.
    self._file.seek(0)
    self._write_header()
    assert self._file.tell() == self._start, 'the .npy header changed its size'
    self._file.close()

  def _write_header(self):
    np.lib.format.write_array_header_1_0(self._file, {
        'descr': np.lib.format.dtype_to_descr(self._dtype),
        'fortran_order': False, 'shape': (self.rows, self._length)})
