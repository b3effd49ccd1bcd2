"""GGUF, the file format of llama.cpp: metadata, and tensors that are quantised block by block.

The layout is little-endian: 'GGUF', version, number of tensors, number of metadata pairs, the
pairs, a header for each tensor, and the numbers, which begin at the next multiple of the alignment.
The reader of the package `gguf` makes a Python object for every element of an array, which takes
ten seconds for a vocabulary of 262,144 tokens; only its dequantisation is used.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from typing import Any

import gguf
import numpy as np

from sink_jax.io.files import check_downloaded, refused
from sink_jax.io.paths import expanded

# The types that llama.cpp writes for most models; `gguf.quants` has the layouts of their blocks.
TYPES = ('F32', 'F16', 'BF16', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0', 'Q4_K', 'Q5_K', 'Q6_K')
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(('u1', 'i1', '<u2', '<i2', '<u4', '<i4', '<f4', '?'))) | {
  10: '<u8',
  11: '<i8',
  12: '<f8',
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
  """The header of a tensor: its shape, rows first as in NumPy, its type, and its bytes."""

  shape: tuple[int, ...]
  type: str
  start: int
  size: int


class GgufFile:
  """The metadata of a GGUF file and the headers of its tensors; `read` returns the numbers.

  metadata: {key: number, bool, str, list of str, or array of numbers}. tensors: in the order of
  their headers.

  Raises:
    ValueError: not a GGUF file of version 2 or 3, a pointer of git-lfs, a truncated one, or a
      tensor of another type than `TYPES`; with the remedy.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = expanded(path)
    with refused(f'{self.path} cannot be read as a GGUF file'):
      check_downloaded(self.path)
      with (
        open(self.path, 'rb') as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
      ):
        self.metadata, self.tensors = _Header(data).read()

  def read(self, name: str) -> np.ndarray:
    """The numbers of a tensor, float32, dequantised."""
    tensor = self.tensors[name]
    data = np.fromfile(self.path, np.uint8, tensor.size, offset=tensor.start)
    rows = data.reshape(*tensor.shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type])


class _Header:
  """Reads the bytes before the numbers, one field after another."""

  def __init__(self, data: mmap.mmap):
    self.data, self.at = data, 0

  def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    magic, version = self._bytes(4), self._number('<u4')
    if magic != b'GGUF' or version not in (2, 3):
      raise ValueError('it does not begin with "GGUF" and version 2 or 3')
    tensors, pairs = self._number('<u8'), self._number('<u8')
    metadata = {}
    for _ in range(pairs):
      key = self._string()
      metadata[key] = self._value(self._number('<u4'))
    headers = dict(self._tensor() for _ in range(tensors))
    alignment = metadata.get('general.alignment', 32)
    first = -(-self.at // alignment) * alignment
    placed = {
      name: dataclasses.replace(header, start=first + header.start)
      for name, header in headers.items()
    }
    if any(header.start + header.size > len(self.data) for header in placed.values()):
      raise ValueError(f'it ends at {len(self.data)} bytes, inside its tensors: download it again')
    return metadata, placed

  def _tensor(self) -> tuple[str, GgufTensor]:
    """A name and its header, whose start is relative to the first number of the file."""
    name, axes = self._string(), self._number('<u4')
    # The file lists the contiguous axis first.
    shape = tuple(self._number('<u8') for _ in range(axes))[::-1]
    quantization = gguf.GGMLQuantizationType(self._number('<u4'))
    if quantization.name not in TYPES:
      raise ValueError(
        f'the tensor {name} is stored as {quantization.name}, which is not '
        f'supported. Supported: {", ".join(TYPES)}'
      )
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    start, size = self._number('<u8'), math.prod(shape) // block * block_bytes
    return name, GgufTensor(shape, quantization.name, start, size)

  def _value(self, type_number: int) -> Any:
    if type_number == _STRING:
      return self._string()
    if type_number != _ARRAY:
      return self._number(_NUMBERS[type_number])
    element, count = self._number('<u4'), self._number('<u8')
    if element == _STRING:
      return [self._string() for _ in range(count)]
    dtype = np.dtype(_NUMBERS[element])
    return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

  def _number(self, dtype: str) -> Any:
    return np.frombuffer(self._bytes(np.dtype(dtype).itemsize), dtype)[0].item()

  def _string(self) -> str:
    # `struct`, since a vocabulary has hundreds of thousands of strings.
    (count,) = struct.unpack('<Q', self._bytes(8))
    return self._bytes(count).decode('utf-8')

  def _bytes(self, count: int) -> bytes:
    data = self.data[self.at : self.at + count]
    if len(data) < count:
      raise ValueError(f'it ends at {len(self.data)} bytes, inside its header: download it again')
    self.at += count
    return data
