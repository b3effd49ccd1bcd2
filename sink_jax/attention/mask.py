"""Which keys a query sees (Section 6).

A mask is a predicate for the elements of a tile, `keep`, and a range of keys per query,
`key_range`, by which kernels leave out tiles. Both must say the same; `kernels.block_mask`
checks it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.component import Component, check_integers

_LARGEST = 2**30  # tokens: positions are 32-bit numbers on a device

Positions = int | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Mask(Component):
  """A predicate of two 0-based positions; the keys that one query sees are contiguous."""

  def __init_subclass__(cls, **options):
    super().__init_subclass__(**options)
    # A count is not inherited by a mask that shows other keys.
    if 'keep' in vars(cls) and 'visible' not in vars(cls):
      cls.visible = Mask.visible

  def keep(self, i: Positions, j: Positions) -> Positions:
    """True where query i sees key j; i and j are integers that broadcast together.

    This runs inside kernel tiles, so it is elementwise arithmetic and comparisons.
    """
    raise NotImplementedError

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    """Half-open range of keys that queries first..last can see, out of `keys`.

    The numbers are Python integers: chunks and tiles outside are skipped when a program is
    built, and tiles that lie in the range of each of their queries are not masked at all. For
    first == last it must be exactly the keys for which `keep` is true.
    """
    raise NotImplementedError

  def visible(self, i: Positions, keys: Positions) -> Positions:
    """How many of `keys` keys query i sees, elementwise: the length of its `key_range`.

    Raises:
      ValueError: the mask does not say it.
    """
    raise ValueError(f'{self} does not say how many keys a query sees: give '
                     f'{type(self).__name__} a method visible(i, keys), as Causal() has.')

  # What the rest of the package asks of a mask, so that nothing tests for its class.

  @property
  def window(self) -> int | None:
    """Most keys that a query sees, where a window limits them; None without such a limit."""
    return None

  @property
  def prefix(self) -> int | None:
    """Number of leading tokens that every query sees; None where none is seen early.

    They see one another, so a cache is correct only if they are read in one step.
    """
    return None

  @property
  def first_target(self) -> int:
    """0-based position of the first query whose next token the training loss counts."""
    return 0

  def scaled(self, length: int, of: int) -> Mask:
    """The same mask for sequences of `length` tokens instead of `of`.

    Raises:
      ValueError: the mask has no counterpart in sequences of that length, with the reason.
    """
    return self


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
  """j <= i."""

  def keep(self, i: Positions, j: Positions) -> Positions:
    return j <= i

  def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
    return 0, min(last + 1, keys)

  def visible(self, i: Positions, keys: Positions) -> Positions:
    return i + 1


@dataclasses.dataclass(frozen=True)
class Window(Mask):
  """i - size < j <= i: `size` keys, the query's own included (Figure 6)."""

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


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
  """Causal, or j < length: every query sees the whole prefix (Figure 5)."""

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
