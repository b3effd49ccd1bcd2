"""The tiles of scores that a mask leaves visible, as ranges of tile numbers.

NumPy computes the ranges from `Mask.key_range` when a program is built, and a kernel gets them as a
small table. A kernel visits only the tiles first..last, and applies no mask in
first_full..last_full. That halves the work under a causal mask, and makes it linear in T under a
window.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import numpy as np

from sink_jax.attention.mask import Mask


LANES = 128  # of a TPU's vectors: tiles are multiples of it
_LEAST = 256  # rows of a tile, below which the overhead of a step is most of it


class Ranges(NamedTuple):
  """For every tile along one axis, the tiles along the other; int32 arrays, half-open ranges.

  Tiles first..last hold every visible score. Tiles first_full..last_full, a part of them, hold
  neither hidden scores nor padding.
  """

  first: np.ndarray
  first_full: np.ndarray
  last_full: np.ndarray
  last: np.ndarray

  @property
  def loops(self) -> list[tuple[int, bool]]:
    """The loops that a kernel needs: (row of the table at which it begins, are its tiles masked?).

    There are up to three: only tiles at the edges of the mask pay for masking.
    """
    before = (self.first < self.first_full).any()
    after = (self.last_full < self.last).any()
    return [(0, True)] * bool(before) + [(1, False)] + [(2, True)] * bool(after)


def padded_tiles(length: int, most: int) -> tuple[int, int]:
  """The length with the least padding, and the largest tile that divides it.

  Tiles have _LEAST to `most` rows, or as many as a shorter length needs. 2,049 tokens become six
  tiles of 384 rows: under a causal mask 21 x 384^2 scores are computed, where five tiles of 512
  rows would make it 15 x 512^2, a quarter more.
  """
  one = -(-length // LANES) * LANES
  if one <= most:
    return one, one
  sizes = range(min(_LEAST, most), most + 1, LANES)
  padded = min(-(-length // size) * size for size in sizes)
  return padded, max(size for size in sizes if padded % size == 0)


def tiles_of(mask: Mask, length: int, own: int, other: int, by_queries: bool) -> Ranges:
  """The tiles of `other` rows that each tile of `own` rows needs, of queries or of keys."""
  if by_queries:
    return key_tiles(mask, length, own, other)
  return query_tiles(mask, length, other, own)


@functools.lru_cache(maxsize=64)
def key_tiles(mask: Mask, length: int, block_q: int, block_k: int) -> Ranges:
  """The tiles of keys that every tile of queries needs."""
  lo, hi = np.array([mask.key_range(i, i, length) for i in range(length)]).T  # of every query
  _check(mask, lo, hi, length)
  starts = np.arange(0, length, block_q)
  first = np.minimum.reduceat(lo, starts) // block_k
  last = -(-np.maximum.reduceat(hi, starts) // block_k)
  # A full tile lies between the latest first key of these queries and their earliest last one.
  first_full = -(-np.maximum.reduceat(lo, starts) // block_k)
  last_full = np.minimum.reduceat(hi, starts) // block_k
  if length % block_q:  # the last tile has padding queries, which see nothing
    first_full[-1] = last_full[-1]
  return _ranges(first, first_full, last_full, last)


def _check(mask: Mask, lo: np.ndarray, hi: np.ndarray, length: int) -> None:
  """Raises a ValueError unless `keep` shows the ends and the middle of a key_range, and no more."""
  i = np.arange(length)
  with jax.ensure_compile_time_eval():  # a trace may be in progress, and numbers are needed
    seen = lambda j: np.asarray(mask.keep(i, np.clip(j, 0, length - 1)))
    within = seen(lo) & seen((lo + hi) // 2) & seen(hi - 1) | (lo >= hi)
    beyond = seen(lo - 1) & (lo > 0) | seen(hi) & (hi < length)
  fits = within & ~beyond
  if not fits.all():
    raise ValueError(
      f'{mask}: keep() and key_range() disagree about the keys of query '
      f'{fits.argmin()}, of {length}: the range must hold the visible keys, '
      'which must be contiguous, and no others.'
    )


@functools.lru_cache(maxsize=64)
def query_tiles(mask: Mask, length: int, block_q: int, block_k: int) -> Ranges:
  """The tiles of queries that every tile of keys needs."""
  keys = key_tiles(mask, length, block_q, block_k)
  tiles = np.arange(-(-length // block_k))[:, None]
  first, last = _span((keys.first <= tiles) & (tiles < keys.last))
  full = (keys.first_full <= tiles) & (tiles < keys.last_full)
  first_full, last_full = _span(full)
  # Under a user's mask the tiles of queries that see all of these keys need not be contiguous. A
  # range with holes would omit the mask where it is needed.
  holes = full.sum(1) != last_full - first_full
  return _ranges(first, np.where(holes, last_full, first_full), last_full, last)


def _span(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """First and one past the last chosen column of each row; (0, 0) without any."""
  first = chosen.argmax(1)
  last = np.where(chosen.any(1), chosen.shape[1] - chosen[:, ::-1].argmax(1), 0)
  return first, last


def _ranges(
  first: np.ndarray,
  first_full: np.ndarray,
  last_full: np.ndarray,
  last: np.ndarray,
) -> Ranges:
  # Without a full tile both ends are `first`: the loops before and over full tiles are then empty,
  # and the masked loop after them takes every tile.
  none = first_full >= last_full
  first_full, last_full = np.where(none, first, first_full), np.where(none, first, last_full)
  return Ranges(*(x.astype(np.int32) for x in (first, first_full, last_full, last)))
