"""MXFP4: 4-bit floating-point numbers in groups of 32 that share a power of two.

A number has a sign, two bits of exponent and one of fraction, so it is one of 16 values; a group
of 32 has one byte for the exponent of its factor (OCP Microscaling Formats, version 1.0). That is
4.25 bits a number. Two numbers share a byte, so a row of a matrix is columns / 32 blocks of 16
bytes. Checkpoints of this format need no calibration and no code of their own to be read exactly:
a value times a power of two is a bfloat16 number.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

# The value of each of the 16 patterns of bits: the sign is the highest one.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """The numbers as bfloat16, which holds them exactly, (X, rows, columns).

  Args:
    blocks: uint8 (X, rows, columns / 32, 16), two numbers a byte, the one of its lower half
      first.
    scales: uint8 (X, rows, columns / 32); the factor of a group is 2^(scale - 127).

  Raises:
    ValueError: the shapes do not fit together.
  """
  if blocks.ndim != 4 or blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
    raise ValueError(f'MXFP4 blocks {blocks.shape} and scales {scales.shape} do not fit together: '
                     'blocks must have the shape of the scales and a last axis of 16.')
  count, rows, groups, _ = blocks.shape
  # Both numbers of a byte are looked up at once, with the scale, in a table of 256 x 256 pairs:
  # a byte becomes one uint32, which is two bfloat16 numbers, the lower half first.
  out = np.empty((count, rows, groups, 16), np.uint32)
  for e in range(count):  # one expert at a time, since its indices take as much memory
    np.take(_pairs(), scales[e].astype(np.uint16)[..., None] << 8 | blocks[e], out=out[e])
  return out.view(ml_dtypes.bfloat16).reshape(count, rows, groups * 32)


@functools.cache
def _pairs() -> np.ndarray:
  """Both bfloat16 numbers of a byte as one uint32 (65536,), by 256 scale + byte."""
  halves = np.array([(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)], np.float32)
  with np.errstate(over='ignore'):  # 6 * 2^128 is infinite in either format
    numbers = np.ldexp(halves, np.arange(256)[:, None, None] - 127)
  return numbers.astype(ml_dtypes.bfloat16).view(np.uint32).ravel()
