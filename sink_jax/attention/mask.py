"""Which keys a query sees (Section 6)."""

from __future__ import annotations

import dataclasses

from sink_jax.component import Component, check_integers

_LARGEST = 2**30  # tokens: positions are 32-bit numbers on a device


@dataclasses.dataclass(frozen=True)
class Mask(Component):
  """A predicate of two 0-based positions; the keys that one query sees are contiguous."""

  def keep(self, i, j):
    """True where query i sees key j; i and j are integer arrays."""
    raise NotImplementedError

  def key_range(self, first, last, keys):
    """Half-open range of keys that queries first..last can see, out of `keys`.

    Python integers in, Python integers out: chunks and tiles outside are skipped, and
    tiles that lie in the range of each of their queries are not masked at all. For
    first == last it must be exactly the keys for which `keep` is true.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
  """j <= i."""

  def keep(self, i, j):
    return j <= i

  def key_range(self, first, last, keys):
    return 0, min(last + 1, keys)


@dataclasses.dataclass(frozen=True)
class Window(Mask):
  """i - size < j <= i: `size` keys, the query's own included (Figure 6)."""

  size: int = 32

  def __post_init__(self):
    check_integers(self, 'size')
    if not 1 <= self.size <= _LARGEST:
      raise ValueError(f'Window(size={str(self.size)[:50]}): size must be at least 1, the token '
                       f'itself, and at most {_LARGEST}.')

  def keep(self, i, j):
    return (j <= i) & (j > i - self.size)

  def key_range(self, first, last, keys):
    return max(0, first - self.size + 1), min(last + 1, keys)


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
  """Causal, or j < length: every query sees the whole prefix (Figure 5)."""

  length: int = 5

  def __post_init__(self):
    check_integers(self, 'length')
    if not 1 <= self.length <= _LARGEST:
      raise ValueError(f'Prefix(length={str(self.length)[:50]}): length must be at least 1, which '
                       f'is plain causal, and at most {_LARGEST}.')

  def keep(self, i, j):
    return (j <= i) | (j < self.length)

  def key_range(self, first, last, keys):
    return 0, min(max(last + 1, self.length), keys)
