"""Which keys a query sees (Section 6)."""

from __future__ import annotations

import dataclasses

from sink_jax.slot import Slot


@dataclasses.dataclass(frozen=True)
class Mask(Slot):
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
    if self.size < 1:
      raise ValueError(f'{self}: size must be at least 1, the token itself.')

  def keep(self, i, j):
    return (j <= i) & (j > i - self.size)

  def key_range(self, first, last, keys):
    return max(0, first - self.size + 1), min(last + 1, keys)


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
  """Causal, or j < length: every query sees the whole prefix (Figure 5)."""

  length: int = 5

  def __post_init__(self):
    if self.length < 1:
      raise ValueError(f'{self}: length must be at least 1; 1 is plain causal.')

  def keep(self, i, j):
    return (j <= i) | (j < self.length)

  def key_range(self, first, last, keys):
    return 0, min(max(last + 1, self.length), keys)
