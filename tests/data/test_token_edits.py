"""Edits of rows of tokens, and the counter-based random numbers that they draw."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from sink_jax.data import counter_rng
from sink_jax.data.token_edits import FixedToken, RandomTokens, first_token

_V = 50


def _drawn(count, split='train', **options):
  """What replaces rows of nine tokens."""
  rows = np.full((count, 9), -1)
  return RandomTokens(**options).apply(rows, np.arange(count), split, _V)


def test_only_the_named_positions_change_and_the_input_is_kept():
  rows = np.full((3, 9), -1)
  for edit, places in (
    (RandomTokens(first=2, last=4), [1, 2, 3]),
    (FixedToken(position=3, token=1), [2]),
  ):
    changed = edit.apply(rows, np.arange(3), 'train', _V)
    assert_array_equal(changed >= 0, [np.isin(np.arange(9), places)] * 3)
  assert (changed[:, 2] == 1).all()
  assert (rows == -1).all()


def test_random_tokens_are_uniform_and_differ_between_rows_positions_splits_and_seeds():
  drawn = _drawn(20_000, last=9)
  shares = np.bincount(drawn.ravel(), minlength=_V) / drawn.size
  assert_allclose(shares, 1 / _V, rtol=0.06)
  for other in (
    drawn[:-1, 1],  # the next position
    drawn[1:, 0],  # the next row
    _drawn(19_999, 'valid')[:, 0],
    _drawn(19_999, seed=5)[:, 0],
  ):
    assert abs(np.corrcoef(drawn[:-1, 0], other)[0, 1]) < 0.03


def test_the_last_position_and_the_last_id_fit():
  RandomTokens(last=9).check(9, _V)
  FixedToken(position=9, token=49).check(9, _V)


_SEVEN = FixedToken(position=1, token=7)
_RANDOM = RandomTokens(first=1, last=5)


@pytest.mark.parametrize(
  'edits, token',
  [
    ((), None),
    ((FixedToken(position=2),), None),
    ((_RANDOM, _SEVEN), 7),
    ((_SEVEN, _RANDOM), None),
    ((_SEVEN, RandomTokens(first=2, last=2), FixedToken(position=3)), 7),
    ((_SEVEN, FixedToken(token=8)), 8),
  ],
)
def test_the_token_that_every_sequence_begins_with(edits, token):
  assert first_token(edits) == token


def test_draws_depend_on_every_key_and_on_nothing_else():
  keys = np.arange(20)
  drawn = counter_rng.bits(1, keys[:, None], keys[None])
  assert len(np.unique(drawn)) == 400
  assert_array_equal(drawn[7, 3], counter_rng.bits(1, 7, 3))
  assert counter_rng.bits(2, 7, 3) not in drawn

  # Caches, subsets and tasks of older runs depend on these numbers.
  assert int(counter_rng.bits(0)) == 0xE220A8397B1DCDAF  # the first output of SplitMix64(0)
