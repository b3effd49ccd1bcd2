"""Edits of rows of tokens, and the counter-based random numbers that they draw."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from sink_jax.data import counter_rng
from sink_jax.data.token_edits import FixedToken, RandomTokens, first_token

_V = 50


def _apply(edit, rows, split='train', length=9):
  rows = np.asarray(rows)
  return edit.apply(np.full((len(rows), length), -1), rows, split, _V)


def test_only_the_named_positions_change_and_the_input_is_kept():
  rows = np.full((3, 9), -1)
  changed = RandomTokens(first=2, last=4).apply(rows, np.arange(3), 'train', _V)
  assert (changed[:, 1:4] >= 0).all()
  assert (np.delete(changed, [1, 2, 3], 1) == -1).all()
  fixed = FixedToken(position=3, token=1).apply(rows, np.arange(3), 'train', _V)
  assert (fixed[:, 2] == 1).all()
  assert (np.delete(fixed, 2, 1) == -1).all()
  assert (rows == -1).all()


def test_random_tokens_are_uniform_and_differ_between_rows_positions_and_splits():
  drawn = _apply(RandomTokens(last=9), np.arange(20_000))
  shares = np.bincount(drawn.ravel(), minlength=_V) / drawn.size
  assert_allclose(shares, 1 / _V, rtol=0.06)
  correlation = lambda x, y: abs(np.corrcoef(x, y)[0, 1])
  assert correlation(drawn[:, 0], drawn[:, 1]) < 0.03
  assert correlation(drawn[1:, 0], drawn[:-1, 0]) < 0.03
  training = _apply(RandomTokens(), range(99))
  valid = _apply(RandomTokens(), range(99), split='valid')
  assert (training != valid).any()
  assert (training != _apply(RandomTokens(seed=5), range(99))).any()


def test_the_last_position_and_the_last_id_fit():
  RandomTokens(last=9).check(9, _V)
  FixedToken(position=9, token=49).check(9, _V)


def test_the_token_that_every_sequence_begins_with():
  fixed, random = FixedToken(position=1, token=7), RandomTokens(first=1, last=5)
  assert first_token(()) is None
  assert first_token((fixed,)) == 7
  assert first_token((FixedToken(position=2),)) is None
  assert first_token((random, fixed)) == 7
  assert first_token((fixed, random)) is None
  behind = RandomTokens(first=2, last=2), FixedToken(position=3)
  assert first_token((fixed, *behind)) == 7
  assert first_token((fixed, FixedToken(token=8))) == 8


def test_draws_depend_on_every_key_and_on_nothing_else():
  keys = np.arange(20)
  drawn = counter_rng.bits(1, keys[:, None], keys[None])
  assert len(np.unique(drawn)) == 400
  assert_array_equal(drawn[7, 3], counter_rng.bits(1, 7, 3))
  assert counter_rng.bits(1, 7, 3) != counter_rng.bits(1, 3, 7)
  assert counter_rng.bits(2, 7, 3) != counter_rng.bits(1, 7, 3)


def test_first_draws_stay_what_they_are():
  """Caches, subsets and tasks of older runs depend on these numbers."""
  assert int(counter_rng.bits(0)) == 0xE220A8397B1DCDAF  # the first output of SplitMix64(0)
