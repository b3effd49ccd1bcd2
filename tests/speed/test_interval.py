"""The interval of a median ratio, against its definition."""

import itertools

from tests.speed.__main__ import interval


def test_the_interval_covers_the_median_as_often_as_it_says():
  # Every pattern of 'above or below the median' is as likely, whatever the distribution.
  for n, wanted in ((5, 1), (9, 2), (10, 2), (12, 3)):
    low, high = interval(range(1, n + 1))
    assert (low, high) == (wanted, n + 1 - wanted)
    counts = [sum(signs) for signs in itertools.product((0, 1), repeat=n)]
    covered = sum(low <= below <= high - 1 for below in counts) / 2**n
    assert covered >= 0.9
    narrower = sum(low + 1 <= below <= high - 2 for below in counts) / 2**n
    assert narrower < 0.9
