"""The recorder for other training loops against NumPy on full T x T maps."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import entr, softmax
from scipy.stats import kurtosis

import sink_jax as sj
from sink_jax.analyses.recorder import record_attention, record_hidden
from tests.analyses.small import near


def drawn(*shape):
  return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize('length, window', [(7, None), (150, None), (150, 20)])
def test_statistics_are_those_of_whole_maps(length, window):
  q = 3 * drawn(2, length, 4, 8)
  k = 3 * drawn(2, length, 2, 8)
  mask = sj.Window(window) if window else sj.Causal()
  spec = sj.AttentionSpec(position=sj.Nope(), mask=mask)
  found = jax.jit(lambda q, k: record_attention(q, k, spec=spec))(q, k)

  of_heads = np.repeat(k, 2, 2)  # a key head serves two query heads
  products = np.einsum('bihd,bjhd->bhij', q.astype(float), of_heads)
  i, j = np.ogrid[:length, :length]
  seen = (j <= i) & (i - j < (window or length))
  scores = np.where(seen, products / np.sqrt(8), -np.inf)
  weights = softmax(scores, -1)
  queries = length - np.arange(4)  # that may see a key
  alpha = weights.sum(-2)[..., :4] / queries
  uniform = np.log(seen.sum(1)).sum()
  entropy = entr(weights).sum((-2, -1)) / uniform

  # Float32 sums of 150 numbers.
  assert_allclose(found.importance, alpha.mean(0), rtol=1e-4)
  assert_allclose(found.largest_logit, scores.max((0, 2, 3)), rtol=1e-5)
  assert_allclose(found.entropy, entropy.mean(0), rtol=1e-4)


def test_rotation_belongs_to_the_spec():
  q = drawn(1, 9, 2, 8)
  k = q[:, ::-1]
  maps = sj.attention_map(sj.AttentionSpec(), q, k)

  found = record_attention(q, k, keys=2)

  assert_allclose(found.importance, sj.importance(maps)[0, :, :2], rtol=1e-5)


def test_hidden_states_against_numpy():
  h = drawn(3, 9, 16)
  h[:, 0, 3] = 50
  found = record_hidden(h)
  flat = h.astype(float).reshape(3, -1)
  medians = np.median(abs(flat), 1)
  kurtoses = kurtosis(flat, 1, fisher=False)

  assert found.largest == 50
  assert found.median == near(medians.mean())
  assert found.kurtosis == pytest.approx(kurtoses.mean(), rel=1e-4)
