"""GGUF, the file format of llama.cpp: metadata, and tensors that are quantised block by block.

The layout is little-endian: 'GGUF', version, number of tensors, number of metadata pairs, the
pairs, a header for each tensor, and from the next multiple of the alignment on the numbers. The
reader of the package `gguf` makes a Python object for every element of an array, which takes ten
seconds for a vocabulary of 262,144 tokens; only its dequantisation is used.

The file comes from elsewhere: what is wrong with it is a ValueError that names the file and the
key or tensor. Nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from sink_jax.io.paths import expanded

# Those that llama.cpp writes for most models; `gguf.quants` has the layouts of their blocks.
TYPES = ('F32', 'F16', 'BF16', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0', 'Q4_K', 'Q5_K', 'Q6_K')
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(('u1', 'i1', '<u2', '<i2', '<u4', '<i4', '<f4', '?'))) | {
    10: '<u8', 11: '<i8', 12: '<f8'}
_REMEDY = 'download the file again'


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
    ValueError: not a GGUF file of version 2 or 3, a truncated one, or a tensor of another type
      than `TYPES`.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = expanded(path)
    try:
      with open(self.path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
        self.metadata, self.tensors = _Header(self.path, m).read()
    except (OSError, ValueError) as error:
      if str(self.path) in str(error):
        raise ValueError(str(error)) from None
      raise ValueError(f'{self.path} cannot be read as a GGUF file ({error}): {_REMEDY}.') from None

  def read(self, name: str) -> np.ndarray:
    """The numbers of a tensor, float32, dequantised."""
    tensor = self.tensors[name]
    with open(self.path, 'rb') as file:
      file.seek(tensor.start)
      data = np.fromfile(file, np.uint8, tensor.size)
    if data.size < tensor.size:
      raise ValueError(f'{self.path} ends inside the tensor {name}: {_REMEDY}.')
    rows = data.reshape(*tensor.shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type])


class _Header:
  """Reads the bytes before the numbers, from a position that moves."""

  def __init__(self, path: Path, data: mmap.mmap):
    self.path, self.data, self.at = path, data, 0

  def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if self._bytes(4) != b'GGUF':
      raise ValueError(f'{self.path} is not a GGUF file: its first four bytes are not "GGUF".')
    if (version := self._number('<u4')) not in (2, 3):
      raise ValueError(f'{self.path} has the GGUF version {version}; versions 2 and 3 can be read.')
    tensors, pairs = self._number('<u8'), self._number('<u8')
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
      key = self._string()
      if key in metadata:
        raise ValueError(f'{self.path} has the key {key} twice: {_REMEDY}.')
      metadata[key] = self._value(key, self._number('<u4'))
    headers = [self._tensor() for _ in range(tensors)]
    alignment = metadata.get('general.alignment', 32)
    if type(alignment) is not int or alignment < 1:
      raise ValueError(f'{self.path}: general.alignment = {alignment!r} must be a positive integer.')
    first = -(-self.at // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for name, header in headers:
      if name in found:
        raise ValueError(f'{self.path} has the tensor {name} twice: {_REMEDY}.')
      found[name] = dataclasses.replace(header, start=first + header.start)
      if first + header.start + header.size > len(self.data):
        raise ValueError(f'{self.path} ends inside the tensor {name}, at {len(self.data)} bytes: '
                         f'{_REMEDY}.')
    return metadata, found

  def _tensor(self) -> tuple[str, GgufTensor]:
    """A name and its header, whose start counts from the first of all numbers."""
    name, axes = self._string(), self._number('<u4')
    if axes > 4:
      raise ValueError(f'{self.path}: the tensor {name} has {axes} axes: {_REMEDY}.')
    # The axis whose numbers lie side by side is the first one in the file.
    shape = tuple(self._number('<u8') for _ in range(axes))[::-1]
    type_ = self._number('<u4')
    try:
      kind = gguf.GGMLQuantizationType(type_)
    except ValueError:
      raise ValueError(f'{self.path}: the tensor {name} has the unknown type {type_}.') from None
    if kind.name not in TYPES:
      raise ValueError(f'{self.path}: the tensor {name} is stored as {kind.name}, which is not '
                       f'supported. Supported: {", ".join(TYPES)}.')
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = math.prod(shape)
    if not shape or not count or shape[-1] % block:
      raise ValueError(f'{self.path}: the tensor {name} has the shape {shape}, which is not made of '
                       f'the blocks of {block} numbers of {kind.name}: {_REMEDY}.')
    return name, GgufTensor(shape, kind.name, self._number('<u8'), count // block * size)

  def _value(self, key: str, kind: int) -> Any:
    if kind in _NUMBERS:
      return self._number(_NUMBERS[kind])
    if kind == _STRING:
      return self._string()
    if kind == _ARRAY:
      inner, count = self._number('<u4'), self._number('<u8')
      if inner == _STRING:
        return [self._string() for _ in range(count)]
      if inner in _NUMBERS:
        dtype = np.dtype(_NUMBERS[inner])
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)
    raise ValueError(f'{self.path}: the key {key} has a value of the unknown type {kind}: '
                     f'{_REMEDY}.')

  def _number(self, dtype: str) -> Any:
    return np.frombuffer(self._bytes(np.dtype(dtype).itemsize), dtype)[0].item()

  def _string(self) -> str:
    # `struct`, since a vocabulary has hundreds of thousands of strings.
    count, = struct.unpack('<Q', self._bytes(8))
    return self._bytes(count).decode('utf-8')

  def _bytes(self, count: int) -> bytes:
    data = self.data[self.at:self.at + count]
    if len(data) < count:
      raise ValueError(f'{self.path} ends inside its header, at {len(self.data)} bytes: {_REMEDY}.')
    self.at += count
    return data
