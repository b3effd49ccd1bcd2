"""How often intervals miss a mean, and how often a cache is called safe wrongly, by simulation.

docs/card.md prints the table. Experiments have the size of a card: 16 sequences or documents, or
32.
"""

import re

import numpy as np
import pytest

from sink_jax.analyses.cache import TOLERANCE
from sink_jax.evaluate.intervals import t_interval
from tests.documents import TEXTS

RUNS = 20_000
# Changes of the loss (per cent) by document of SmolLM2-135M-Instruct with 4 + 252 of 512 tokens.
STORED = np.array(
  [0.1, 1.11, 5.02, 0.89, -0.28, 0.26, -0.41, 4.06, 0.72, -0.8, 0.45, -0.34, 2.29, 0.61, 0.09, 0.92]
)


def draws(kind, rng, shape):
  """Values (n, RUNS) whose mean is the tolerance."""
  if kind == 'normal':
    return TOLERANCE + rng.standard_normal(shape)
  if kind == 'exponential':
    return TOLERANCE - 1 + rng.exponential(size=shape)
  return TOLERANCE + rng.choice(STORED, shape) - STORED.mean()


def rates(kind, n):
  """Of experiments, in percent: intervals that cover the mean, and caches called safe wrongly.

  The mean lies at the tolerance, where that is likeliest. A cache that is chosen on n documents is
  advised if it is safe on n others too.
  """
  rng = np.random.default_rng(0)
  (low, high), (_, again) = (t_interval(draws(kind, rng, (n, RUNS))) for _ in range(2))
  covered = (low <= TOLERANCE) & (TOLERANCE <= high)
  safe, safe_again = high < TOLERANCE, again < TOLERANCE
  return [100 * x.mean() for x in (covered, safe, safe & safe_again)]


@pytest.mark.parametrize('n', [16, 32])
@pytest.mark.parametrize('kind', ['normal', 'stored', 'exponential'])
def test_the_page_has_the_rates(kind, n):
  found = rates(kind, n)
  [line] = re.findall(rf'^\| {kind}[^|]* \| {n} \|(.*)\|$', TEXTS['docs/card.md'], re.MULTILINE)
  printed = [float(cell.strip(' %')) for cell in line.split('|')]
  np.testing.assert_allclose(printed, found, atol=0.051)  # rounded to a decimal
  assert found[2] <= 1
  if kind == 'normal':  # no t interval is exact for skewed values
    assert found[0] > 98.5 and found[1] <= 1
