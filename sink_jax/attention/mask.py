"""Masks, which decide which keys a query sees (Section 6).

A mask has a predicate for the elements of a tile, `keep`, and a range of keys per query,
`key_range`, which tells kernels the tiles to skip. The two must agree; `kernels.block_mask` checks
it.
"""

from typing import ClassVar

import jax.numpy as jnp

from sink_jax.attention import AnyArray, require
from sink_jax.component import Component

Positions = int | AnyArray  # 0-based integers


class Mask(Component):
  """A predicate of two 0-based positions; the keys that one query sees are contiguous."""

  window: ClassVar[int | None] = None  # the largest number of keys that a query can see
  # number of leading tokens that every query sees, even an earlier one
  prefix: ClassVar[int | None] = None

  def keep(self, i: Positions, j: Positions) -> Positions:
    """True if query i sees key j, by elementwise operations only: it runs inside kernel tiles."""
    raise NotImplementedError

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    """Returns the half-open range of keys, out of `keys`, that queries first..last can see.

    For first == last it holds just the keys for which `keep` is true.
    """
    raise NotImplementedError

  def visible(self, i: Positions, keys: Positions) -> Positions:
    """Returns how many of `keys` keys query i sees, elementwise: the length of its `key_range`."""
    raise NotImplementedError(f'{self} needs a method visible(i, keys), as Causal() has.')


class Causal(Mask):
  """Query i sees key j if j <= i; subclasses limit that to a window or extend it to a prefix."""

  def keep(self, i: Positions, j: Positions) -> Positions:
    seen = j <= i if self.prefix is None else (j <= i) | (j < self.prefix)
    return seen if self.window is None else seen & (j > i - self.window)

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    start = 0 if self.window is None else max(0, first - self.window + 1)
    return start, min(max(last + 1, self.prefix or 0), keys)

  def visible(self, i: Positions, keys: Positions) -> Positions:
    count = i + 1 if self.prefix is None else jnp.minimum(jnp.maximum(i + 1, self.prefix), keys)
    return count if self.window is None else count - jnp.maximum(0, i - self.window + 1)


class Window(Causal):
  """Query i sees key j if i - size < j <= i: `size` keys, including key i (Figure 6)."""

  size: int = 32

  def __post_init__(self):
    require(
      self,
      type(self.size) is int and 1 <= self.size < 2**31,
      'size must be a whole number from 1, the token itself, to 2**31 - 1',
    )

  @property
  def window(self) -> int:
    return self.size


class Prefix(Causal):
  """Query i sees key j if j <= i or j < length: all queries see the prefix (Figure 5)."""

  length: int = 5

  def __post_init__(self):
    require(
      self,
      type(self.length) is int and 1 <= self.length < 2**31,
      'length must be a whole number from 1, which is plain causal, to 2**31 - 1',
    )

  @property
  def prefix(self) -> int:
    return self.length
