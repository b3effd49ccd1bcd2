"""Counter-based random numbers."""

import numpy as np

from sink_jax.data import counter_rng


def test_draws_depend_on_every_key_and_on_nothing_else():
  keys = np.arange(20)
  drawn = counter_rng.bits(1, keys[:, None], keys[None])
  assert len(np.unique(drawn)) == 400
  np.testing.assert_array_equal(drawn[7, 3], counter_rng.bits(1, 7, 3))
  assert counter_rng.bits(1, 7, 3) != counter_rng.bits(1, 3, 7)
  assert counter_rng.bits(2, 7, 3) != counter_rng.bits(1, 7, 3)


def test_first_draws_stay_what_they_are():
  """Caches, subsets and tasks of older runs rely on these numbers."""
  assert int(counter_rng.bits(0)) == 0xE220A8397B1DCDAF  # the first output of SplitMix64(0)


def test_smaller_subsets_are_nested():
  order = counter_rng.permutation(50, 1)
  assert sorted(order) == list(range(50)) and list(order) != list(range(50))
