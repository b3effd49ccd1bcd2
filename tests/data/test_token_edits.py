"""Edits of token chunks, and the counter-based random numbers that they draw."""

import numpy as np
import pytest

from sink_jax.data import counter_rng
from sink_jax.data.token_edits import FixedToken, RandomTokens, first_token

_V = 50


def _apply(edit, rows, split='train', length=9):
  rows = np.asarray(rows)
  return edit.apply(np.full((len(rows), length), -1), rows, split, _V)


def test_only_the_named_positions_change_and_the_input_is_kept():
  chunks = np.full((3, 9), -1)
  changed = RandomTokens(first=2, last=4).apply(chunks, np.arange(3), 'train', _V)
  assert (changed[:, 1:4] >= 0).all() and (changed[:, [0, 4, 5, 6, 7, 8]] == -1).all()
  fixed = FixedToken(position=3, token=1).apply(chunks, np.arange(3), 'train', _V)
  assert (fixed[:, 2] == 1).all() and (np.delete(fixed, 2, 1) == -1).all()
  assert (chunks == -1).all()


def test_random_tokens_are_uniform_and_differ_between_chunks_positions_and_splits():
  drawn = _apply(RandomTokens(last=9), np.arange(20_000))
  np.testing.assert_allclose(np.bincount(drawn.ravel(), minlength=_V) / drawn.size, 1 / _V, rtol=0.06)
  assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.03
  assert abs(np.corrcoef(drawn[1:, 0], drawn[:-1, 0])[0, 1]) < 0.03
  assert (_apply(RandomTokens(), range(99)) != _apply(RandomTokens(), range(99), split='valid')).any()
  assert (_apply(RandomTokens(), range(99)) != _apply(RandomTokens(seed=5), range(99))).any()


@pytest.mark.parametrize('edit, words', [
    (lambda: RandomTokens(first=0), 'RandomTokens'), (lambda: RandomTokens(first=3, last=2), 'RandomTokens'),
    (lambda: RandomTokens(below=2**31), 'RandomTokens'), (lambda: FixedToken(token=-1), 'FixedToken'),
    (lambda: RandomTokens(last=10), 'only 9 tokens'), (lambda: FixedToken(position=10), 'only 9 tokens'),
    (lambda: FixedToken(token=50), 'only 50 tokens')])
def test_what_does_not_fit_is_refused(edit, words):
  with pytest.raises(ValueError, match=words):
    edit().check(9, _V)
  RandomTokens(last=9).check(9, _V)
  FixedToken(position=9, token=49).check(9, _V)


def test_the_token_that_every_sequence_begins_with():
  fixed, random = FixedToken(position=1, token=7), RandomTokens(first=1, last=5)
  assert first_token(()) is None and first_token((fixed,)) == 7
  assert first_token((FixedToken(position=2),)) is None
  assert first_token((random, fixed)) == 7 and first_token((fixed, random)) is None
  assert first_token((fixed, RandomTokens(first=2, last=2), FixedToken(position=3))) == 7
  assert first_token((fixed, FixedToken(token=8))) == 8


def test_draws_depend_on_every_key_and_on_nothing_else():
  keys = np.arange(20)
  drawn = counter_rng.bits(1, keys[:, None], keys[None])
  assert len(np.unique(drawn)) == 400
  np.testing.assert_array_equal(drawn[7, 3], counter_rng.bits(1, 7, 3))
  assert counter_rng.bits(1, 7, 3) != counter_rng.bits(1, 3, 7)
  assert counter_rng.bits(2, 7, 3) != counter_rng.bits(1, 7, 3)


def test_first_draws_stay_what_they_are():
  """Caches, subsets and tasks of older runs depend on these numbers."""
  assert int(counter_rng.bits(0)) == 0xE220A8397B1DCDAF  # the first output of SplitMix64(0)


def test_smaller_subsets_are_nested():
  order = counter_rng.permutation(50, 1)
  assert sorted(order) == list(range(50)) and list(order) != list(range(50))
