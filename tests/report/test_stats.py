"""Intervals against SciPy and closed forms, and simulations of how often verdicts are wrong."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from sink_jax.report import claims, stats
from sink_jax.report.claims import Verdict
from sink_jax.report.conditions import above, below, equal, greater, less


def test_an_interval_is_that_of_the_one_sample_test():
  x = [3.1, 2.9, 3.4, 3.0]
  expected = scipy_stats.ttest_1samp(x, 0)
  found = stats.interval(x)
  low, high = expected.confidence_interval(0.99)

  np.testing.assert_allclose(
    [found.mean, found.low, found.high, found.p], [np.mean(x), low, high, expected.pvalue]
  )
  assert (found.n, found.unseen) == (4, 0)


def test_one_value_and_equal_values():
  assert stats.interval([2.0])[:3] == (2.0, -math.inf, math.inf)
  assert stats.interval([2.0] * 3)[:3] == (2.0, 2.0, 2.0)
  assert stats.interval([0.0] * 3).p == 1
  assert stats.interval([2.0] * 3).p == 0


def test_seeds_that_agree_leave_the_rule_of_three_open():
  assert stats.unseen(3) == pytest.approx(1 - 0.05 ** (1 / 3))
  assert stats.unseen(1000) == pytest.approx(3 / 1000, rel=0.01)

  agree = stats.interval([25.0, 26.0, 27.0], head=12.5)
  assert agree.unseen == stats.unseen(3)

  wide = agree.widened()
  assert (wide.low, wide.high) == pytest.approx((26 - 126 * wide.unseen, 26 + 74 * wide.unseen))
  assert stats.interval([25.0, 40.0, 27.0], head=12.5).unseen == 0
  assert stats.interval([3.0, 3.0, 3.0]).widened()[:3] == (3.0, 3.0, 3.0)  # a loss has no heads


def test_equality_is_two_one_sided_tests():
  for differences in ([0.02, -0.03, 0.05, 0.01], [0.05, 0.08, 0.02, 0.05], [0.3, 0.2, 0.1, 0.4]):
    for margin in (0.03, 0.07, 0.1, 0.5):
      p = max(
        scipy_stats.ttest_1samp(differences, -margin, alternative='greater').pvalue,
        scipy_stats.ttest_1samp(differences, margin, alternative='less').pvalue,
      )
      assert stats.equal(differences, margin) == (p < 0.05), (differences, margin)
  assert not stats.equal([0.0] * 50, 5, head=12.5)  # 50 seeds cannot exclude 5.8 points
  assert stats.equal([0.0] * 60, 5, head=12.5)


def test_holm():
  # Holm's procedure by hand: 3 x 0.01, 2 x 0.02, 1 x 0.04, and the adjusted values may not fall.
  np.testing.assert_allclose(stats.holm([0.04, 0.01, math.nan, 0.02]), [0.04, 0.03, math.nan, 0.04])
  assert stats.holm([]) == []
  assert stats.holm([0.9, 0.8]) == [1, 1]


# Of a trial `a` or `b` against a level, and of `a` against `b`.
(ABOVE_10,) = above('sink_1', 'a', 10)
(BELOW_5,) = below('sink_1', 'a', 5)
(B_ABOVE_10,) = above('sink_1', 'b', 10)
(B_BELOW_5,) = below('sink_1', 'b', 5)
(GREATER,) = greater('sink_1', 'a', 'b')
(GREATER_BY_2,) = greater('sink_1', 'a', 'b', by=2)
(LESS,) = less('sink_1', 'a', 'b')
(LESS_BY_2,) = less('sink_1', 'a', 'b', plus=-2)
(EQUAL,) = equal('sink_1', 'a', 'b', within=2)


def rates(rng, n, usual, odd, share, noise=0.0):
  """Rates in percent of n seeds, a share of which is odd; with a sink also noise of sequences."""
  values = np.where(rng.random(n) < share, odd, usual)
  return dict(enumerate(np.clip(values + noise * rng.standard_normal(n) * (values > 0), 0, 100)))


# Points per head; seeds; usual rate, odd rate and share of odd seeds, for a and for the baseline b;
# conditions that are true of their means; conditions that are false.
@pytest.mark.parametrize(
  ('head', 'n', 'a', 'b', 'true', 'false'),
  [
    pytest.param(
      25,
      3,
      (50, 25, 0.2),
      (50, 50, 0),
      [ABOVE_10, LESS_BY_2],
      [EQUAL, GREATER, BELOW_5],
      id='one of four heads is off in one of five seeds',
    ),
    pytest.param(
      12.5,
      3,
      (27, 0, 0.1),
      (27, 27, 0),
      [ABOVE_10, LESS_BY_2],
      [EQUAL, GREATER, BELOW_5],
      id='collapse in one of ten seeds',
    ),
    pytest.param(
      12.5,
      50,
      (0, 0, 0),
      (0, 0, 0),
      [BELOW_5, EQUAL],
      [GREATER, LESS, ABOVE_10],
      id='0 in all of 50 seeds',
    ),
    pytest.param(
      12.5,
      3,
      (27, 27, 0),
      (27, 0, 0.1),
      [B_ABOVE_10, GREATER_BY_2],
      [EQUAL, LESS, B_BELOW_5],
      id='softmax itself collapses in one of ten seeds',
    ),
  ],
)
@pytest.mark.parametrize('noise', [0, 1.5])
def test_verdicts_are_wrong_in_one_experiment_of_a_hundred(
  head, n, a, b, true, false, noise, request
):
  runs = 10_000 if request.config.getoption('--full') else 250
  rng = np.random.default_rng(0)
  wrong = dict.fromkeys([*true, *false], 0)

  for _ in range(runs):
    seeds = {'a': rates(rng, n, *a, noise), 'b': rates(rng, n, *b, noise)}
    for asked in wrong:
      decided, _ = claims.decide(
        asked, seeds[asked.trials[0]], seeds['b'] if asked.other else {}, head
      )
      wrong[asked] += decided == (Verdict.NOT_REPRODUCED if asked in true else Verdict.REPRODUCED)

  assert max(wrong.values()) <= 0.01 * runs, wrong


# Heads; the condition; the true rate of a head, in percent; the most experiments, in percent, that
# may call the condition true. A head of a run is a coin, so that seeds differ and often agree
# within a head.
@pytest.mark.parametrize(
  ('heads', 'asked', 'rate', 'most'),
  [
    (8, ABOVE_10, 10, 1),
    (8, ABOVE_10, 5, 1),
    (80, ABOVE_10, 10, 1),
    (8, GREATER_BY_2, 2, 1.5),
    (80, GREATER_BY_2, 2, 1.5),
    (8, GREATER, 0, 1.5),
    (80, GREATER, 0, 1.5),
  ],
)
def test_a_boundary_is_seldom_called_crossed(heads, asked, rate, most, request):
  runs = 20_000 if request.config.getoption('--full') else 400
  rng = np.random.default_rng(0)
  draw = lambda percent: dict(enumerate(100 * rng.binomial(heads, percent / 100, 3) / heads))
  base = 20 if asked.other else 0
  said = [
    claims.decide(asked, draw(base + rate), draw(base) if asked.other else {}, 100 / heads)[0]
    for _ in range(runs)
  ]
  allowed = most / 100 * runs

  assert said.count(Verdict.REPRODUCED) <= allowed + 3 * math.sqrt(allowed)


def test_far_from_a_level_seeds_that_agree_decide():
  for heads, rates, decided in (
    (8, (25, 25, 25), Verdict.REPRODUCED),
    (8, (12.5, 12.5, 12.5), Verdict.OPEN),
    (8, (0, 0, 0), Verdict.NOT_REPRODUCED),
    (80, (12.5,) * 3, Verdict.REPRODUCED),
  ):
    assert claims.decide(ABOVE_10, dict(enumerate(rates)), {}, 100 / heads)[0] == decided
  # Below 5 points three seeds of 8 heads speak for themselves, and six for others too.
  for n in (3, 6):
    zeros = dict.fromkeys(range(n), 0.0)
    decided, x = claims.decide(BELOW_5, zeros, {}, 12.5)
    assert decided == Verdict.REPRODUCED
    assert (x.high > 0) == (n == 6)
    assert x.unseen == stats.unseen(n)


def test_a_share_of_seeds_beyond_the_stated_one_is_missed_in_one_experiment_of_twenty(request):
  runs = 10_000 if request.config.getoption('--full') else 500
  rng = np.random.default_rng(0)
  said = [
    claims.decide(BELOW_5, rates(rng, 3, 0, 25, stats.unseen(3)), {}, 12.5)[0] for _ in range(runs)
  ]

  assert said.count(Verdict.REPRODUCED) / runs == pytest.approx(
    0.05, abs=4 * math.sqrt(0.05 * 0.95 / runs)
  )


def test_fifty_seeds_without_a_sink_are_enough_for_a_verdict_on_it():
  a = dict.fromkeys(range(50), 0.0)
  assert claims.decide(BELOW_5, a, {}, 12.5)[0] == Verdict.REPRODUCED

  decided, x = claims.decide(EQUAL, a, a, 12.5)
  # 50 seeds cannot exclude this
  assert decided == Verdict.OPEN
  assert x.high == pytest.approx(100 * stats.unseen(50))
