"""Packing (Figure 1, right): join tokenized documents, cut the stream into chunks.

No token is padding and none is thrown away, but for the last, incomplete chunk of a stream.
"""

from __future__ import annotations

import io
import os
import pathlib

import numpy as np

from sink_jax.io.files import named_in_errors, replace_atomically

_BUFFER = 1 << 18  # bytes kept before they are written


def delimited(tokens: np.ndarray, bos_id: int | None, eos_id: int | None) -> np.ndarray:
  """One document as it enters the stream, int32: BOS before and EOS after it, where not None."""
  parts = ([] if bos_id is None else [[bos_id]]) + [tokens]
  parts += [] if eos_id is None else [[eos_id]]
  return np.concatenate(parts).astype(np.int32)


class AppendLog:
  """A file that only grows: cut back to the size of a commit, it is as it was then.

  It is open only while a buffer is written, since a process may have few files open, and a corpus
  of many domains grows two for each.

  Attributes:
    size: bytes that were appended, in the file or in the buffer.

  Args:
    size: bytes of the last commit; whatever follows them is cut off.

  Raises:
    ValueError: the file is shorter than that.
  """

  def __init__(self, path: pathlib.Path, size: int = 0):
    self.path, self.size = path, size
    self._buffer: list[bytes] = []
    self._written = self._synced = size  # bytes in the file; bytes that a power cut leaves in it
    with open(path, 'ab') as file:
      if file.tell() < size:
        raise ValueError(f'{path} has {file.tell()} bytes, fewer than the {size} of its commit.')
      file.truncate(size)

  def append(self, content: bytes | np.ndarray) -> None:
    """Adds bytes to the end; they reach the file with a full buffer, or with `commit`."""
    self._buffer.append(bytes(content))
    self.size += len(self._buffer[-1])
    if self.size - self._written > _BUFFER:
      self._write()

  def commit(self) -> None:
    """Makes everything appended so far outlast a power cut."""
    if self.size > self._synced:
      self._write(sync=True)
      self._synced = self.size

  def _write(self, sync: bool = False) -> None:
    with named_in_errors(self.path), open(self.path, 'ab') as file:
      if file.tell() != self._written:  # removed, or written to by another process
        raise ValueError(f'{self.path} was changed while it was written; build again.')
      file.write(b''.join(self._buffer))
      if sync:
        file.flush()
        os.fsync(file.fileno())
    self._buffer, self._written = [], self.size


class TokenStream(AppendLog):
  """One endless token stream on its way into an `.npy` file of (n, length) chunks.

  A chunk may begin anywhere in a document and may span several. The tail that is left at the end of
  the stream is dropped when the file is sealed. Until then the header of the file says 0 chunks,
  since nobody knows how many there will be.

  Args:
    length: tokens of a chunk. tokens: those of the last commit.
  """

  def __init__(self, path: pathlib.Path, length: int, dtype: np.dtype, tokens: int = 0):
    self.tokens = tokens
    self._dtype = np.dtype(dtype)
    # Without a committed token the file begins anew, with its header.
    super().__init__(path, npy_size(tokens, length, dtype) if tokens else 0)
    if not tokens:
      self.append(_header(0, length, dtype))

  def add(self, tokens: np.ndarray) -> None:
    """Appends the tokens of a document, delimiters included."""
    self.tokens += len(tokens)
    self.append(np.asarray(tokens, self._dtype))


def npy_size(tokens: int, length: int, dtype: np.dtype) -> int:
  """Bytes of an `.npy` file of chunks that holds this many tokens."""
  return len(_header(0, length, dtype)) + tokens * np.dtype(dtype).itemsize


def seal(path: pathlib.Path, rows: int, length: int, dtype: np.dtype) -> None:
  """Makes the first rows of a stream an ordinary `.npy` file, in place.

  A kill in between leaves a file that can be sealed again, for the header has one size.
  """
  with open(path, 'r+b') as file:
    file.truncate(npy_size(rows * length, length, dtype))
    # At the start of the file, in place of the header of 0 chunks.
    file.write(_header(rows, length, dtype))
    file.flush()
    os.fsync(file.fileno())


def write_npy(path: pathlib.Path, chunks: np.ndarray) -> None:
  """Writes chunks in place of what the path held, from which they may be mapped."""
  with replace_atomically(path) as file:
    file.write(_header(len(chunks), chunks.shape[1], chunks.dtype))
    for first in range(0, len(chunks), 4096):  # a part at a time in memory
      file.write(np.ascontiguousarray(chunks[first:first + 4096]).data)


def _header(rows: int, length: int, dtype: np.dtype) -> bytes:
  # NumPy leaves room for a larger number of rows, so that all headers of a stream have one size.
  header = io.BytesIO()
  np.lib.format.write_array_header_1_0(header, {
      'descr': np.lib.format.dtype_to_descr(np.dtype(dtype)),
      'fortran_order': False, 'shape': (rows, length)})
  return header.getvalue()
