"""Masks, which decide which keys a query sees (Section 6).

A mask has a predicate for the elements of a tile, `keep`, and a range of keys per query,
`key_range`, by which kernels skip tiles. The two must agree; `kernels.block_mask` checks that.
"""

from __future__ import annotations


import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.component import Component, check_integers

_LARGEST = 2**30  # tokens: positions are 32-bit numbers on a device

Positions = int | np.ndarray | jax.Array


class Mask(Component):
  """A predicate of two 0-based positions; the keys that one query sees are contiguous."""

  def __init_subclass__(cls, **options):
    super().__init_subclass__(**options)
    # A count is not inherited by a mask that shows other keys.
    if 'keep' in vars(cls) and 'visible' not in vars(cls):
      cls.visible = Mask.visible

  def keep(self, i: Positions, j: Positions) -> Positions:
    """Whether query i sees key j, for integers i and j that broadcast together.

    It runs inside kernel tiles, so it may only use elementwise arithmetic and comparisons.
    """
    raise NotImplementedError

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    """Returns the half-open range of keys, out of `keys`, that queries first..last can see.

    Arguments and results are Python integers: chunks and tiles outside the range are skipped when
    a program is traced, and tiles inside the range of each of their queries are not masked at all.
    For first == last the range must hold exactly the keys for which `keep` is true.
    """
    raise NotImplementedError

  def visible(self, i: Positions, keys: Positions) -> Positions:
    """Returns how many of `keys` keys query i sees, elementwise: the length of its `key_range`.

    Raises:
      ValueError: the mask does not define this number.
    """
    raise ValueError(f'{self} does not say how many keys a query sees: give '
                     f'{type(self).__name__} a method visible(i, keys), as Causal() has.')

  # What the rest of the package asks of a mask, so that nothing tests for its class.

  @property
  def window(self) -> int | None:
    """The largest number of keys that a query can see; None without such a limit."""
    return None

  @property
  def prefix(self) -> int | None:
    """The number of leading tokens that every query sees; None if no query sees later tokens.

    These tokens see one another, so a cache is correct only if they are read in one step.
    """
    return None

  @property
  def first_target(self) -> int:
    """The 0-based position of the first query whose next token counts in the training loss."""
    return 0

  def scaled(self, length: int, of: int) -> Mask:
    """Returns the same mask for sequences of `length` tokens instead of `of`.

    Raises:
      ValueError: the mask has no counterpart at that length; the message gives the reason.
    """
    return self


class Causal(Mask):
  """Query i sees key j if j <= i."""

  def keep(self, i: Positions, j: Positions) -> Positions:
    return j <= i

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    return 0, min(last + 1, keys)

  def visible(self, i: Positions, keys: Positions) -> Positions:
    return i + 1


class Window(Mask):
  """Query i sees key j if i - size < j <= i: `size` keys, including its own (Figure 6)."""

  size: int = 32

  def __post_init__(self):
    check_integers(self, 'size')
    if not 1 <= self.size <= _LARGEST:
      raise ValueError(f'Window(size={str(self.size)[:50]}): size must be at least 1, the token '
                       f'itself, and at most {_LARGEST}.')

  def keep(self, i: Positions, j: Positions) -> Positions:
    # `&` and not `and`: i and j may be whole tiles of positions, traced in a kernel.
    return (j <= i) & (j > i - self.size)

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    return max(0, first - self.size + 1), min(last + 1, keys)

  def visible(self, i: Positions, keys: Positions) -> Positions:
    return jnp.minimum(i + 1, self.size)

  @property
  def window(self) -> int | None:
    return self.size

  def scaled(self, length: int, of: int) -> Window:
    size = self.size * length / of
    if size < 1:
      raise ValueError(f'a window of {self.size} of {of} tokens would be {size:g} of {length}')
    return Window(size=round(size))


class Prefix(Mask):
  """Query i sees key j if j <= i or j < length: all see the whole prefix (Figure 5)."""

  length: int = 5

  def __post_init__(self):
    check_integers(self, 'length')
    if not 1 <= self.length <= _LARGEST:
      raise ValueError(f'Prefix(length={str(self.length)[:50]}): length must be at least 1, which '
                       f'is plain causal, and at most {_LARGEST}.')

  def keep(self, i: Positions, j: Positions) -> Positions:
    return (j <= i) | (j < self.length)

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    # A query inside the prefix sees beyond itself, up to the end of the prefix; a sequence may be
    # shorter than that.
    return 0, min(max(last + 1, self.length), keys)

  def visible(self, i: Positions, keys: Positions) -> Positions:
    return jnp.minimum(jnp.maximum(i + 1, self.length), keys)

  @property
  def prefix(self) -> int | None:
    return self.length

  @property
  def first_target(self) -> int:
    # Tokens of the prefix see their own targets; the last one predicts what follows it.
    return self.length - 1
