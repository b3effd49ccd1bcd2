"""Values that are not finite: whether an array holds any, and where in a tree of parameters."""

from __future__ import annotations

import jax
import numpy as np

from sink_jax.models.arrays import ParamTree

_PART = 2**22  # numbers that are compared at a time, so that the intermediate array stays small


def all_finite(x: np.ndarray, dtype: str = '') -> bool:
  """Whether every number of a floating-point array is finite, and would be in `dtype`, if given.

  The bits of the numbers are compared, whose order is that of their absolute values: this is as
  fast as isfinite in float32, ten times as fast in 16 bits, and needs no array of booleans.
  """
  bits = x.reshape(-1).view(f'u{x.itemsize}')
  infinite = np.array(np.inf, x.dtype).view(bits.dtype)
  if x.dtype == np.float32 and dtype == 'bfloat16':
    infinite = np.uint32(0x7f7f8000)  # from here on rounding to bfloat16 gives infinity
  positive = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)  # all bits but the sign
  return all((bits[i:i + _PART] & positive).max() < infinite for i in range(0, bits.size, _PART))


def first_not_finite(params: ParamTree) -> str | None:
  """The first parameter with a value that is not finite, such as 'embed[5]'; None without one.

  The index is along the first axis, which in the blocks counts layers, from 0.
  """
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    x = np.asarray(x)
    if not all_finite(x):
      name = '/'.join(str(getattr(key, 'key', key)) for key in path)
      return name + (f'[{np.argwhere(~np.isfinite(x))[0][0]}]' if x.ndim else '')
  return None
