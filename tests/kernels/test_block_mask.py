"""The tiles of a mask, against the mask itself."""

import itertools

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels.block_mask import key_tiles, padded_tiles, query_tiles

MASKS = [
  sj.Causal(),
  sj.Window(size=1),
  sj.Window(size=5),
  sj.Window(size=99),
  sj.Prefix(length=1),
  sj.Prefix(length=6),
  sj.Prefix(length=99),
]


def tiled(seen, block_q, block_k):
  """(tiles of queries, tiles of keys, block_q, block_k), where padding sees and shows nothing."""
  length, _ = seen.shape
  seen = np.pad(seen, [(0, -length % block_q), (0, -length % block_k)])
  columns = seen.shape[1] // block_k
  return seen.reshape(-1, block_q, columns, block_k).swapaxes(1, 2)


@pytest.mark.parametrize('mask', MASKS, ids=str)
def test_tiles_hold_all_that_is_visible_and_full_ones_nothing_else(mask):
  for length, block_q, block_k in itertools.product((1, 8, 13, 24), (4, 8), (4, 8)):
    i, j = np.indices((length, length))
    tiles = tiled(np.asarray(mask.keep(i, j)), block_q, block_k)
    some, every = tiles.any((2, 3)), tiles.all((2, 3))
    for found, axis in ((key_tiles, 0), (query_tiles, 1)):
      ranges = found(mask, length, block_q, block_k)
      for n, (first, first_full, last_full, last) in enumerate(zip(*ranges)):
        number = np.arange(some.shape[1 - axis])
        within = (first <= number) & (number < last)
        full = (first_full <= number) & (number < last_full)
        np.testing.assert_array_equal(within, some.take(n, axis))
        np.testing.assert_array_equal(full, every.take(n, axis))


class Unlimited(sj.Causal):
  """Its key range includes keys that the mask hides. As an abstract class it is not a choice."""

  abstract = True

  def keep(self, i, j):
    return (j <= i) & (j > i - 5)


def test_a_range_that_is_too_wide_is_refused():
  with pytest.raises(ValueError, match='disagree about the keys of query 5, of 13'):
    key_tiles(Unlimited(), 13, 8, 8)


@pytest.mark.parametrize(
  'length, most, padded, tile',
  [
    (2048, 512, 2048, 512),
    (2049, 512, 2304, 384),
    (2049, 1024, 2304, 768),
    (64, 512, 128, 128),
    (129, 512, 256, 256),
    (513, 512, 768, 384),
    (2049, 256, 2304, 256),
  ],
)
def test_lengths_are_padded_by_as_little_as_tiles_allow(length, most, padded, tile):
  assert padded_tiles(length, most) == (padded, tile)
  causal = key_tiles(sj.Causal(), length, tile, tile)
  assert (causal.last - causal.first).sum() == padded // tile * (padded // tile + 1) // 2
