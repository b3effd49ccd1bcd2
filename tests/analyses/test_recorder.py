"""The recorder for other training loops against NumPy on full T x T maps."""

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses.recorder import record_attention, record_hidden
from tests.analyses import foreign_loop


@pytest.mark.parametrize('length, window', [(7, None), (150, None), (150, 20)])
def test_statistics_are_those_of_whole_maps(length, window):
  rng = np.random.default_rng(0)
  q, k = (3 * rng.standard_normal((2, length, heads, 8)).astype(np.float32) for heads in (4, 2))
  spec = sj.AttentionSpec(position=sj.Nope(), mask=sj.Window(window) if window else sj.Causal())
  found = jax.jit(lambda q, k: record_attention(q, k, spec=spec))(q, k)
  scores = np.einsum('bihd,bjhd->bhij', q.astype(float), np.repeat(k, 2, 2)) / np.sqrt(8)
  age = np.arange(length)[:, None] - np.arange(length)
  seen = (age >= 0) & (age < (window or length))
  scores = np.where(seen, scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  alpha = weights.sum(-2)[..., :4] / (length - np.arange(4))
  entropy = (
    -(weights * np.log(np.where(weights > 0, weights, 1))).sum((-2, -1)) / np.log(seen.sum(1)).sum()
  )
  # Float32 sums of 150 numbers.
  np.testing.assert_allclose(found.importance, alpha.mean(0), rtol=1e-4)
  np.testing.assert_allclose(found.largest_logit, scores.max((0, 2, 3)), rtol=1e-5)
  np.testing.assert_allclose(found.entropy, entropy.mean(0), rtol=1e-4)


def test_rotation_belongs_to_the_spec():
  q, k = (
    np.random.default_rng(0).standard_normal((1, 9, 2, 8)).astype(np.float32) for _ in range(2)
  )
  alpha = sj.importance(sj.attention_map(sj.AttentionSpec(), q, k))[0, :, :2]
  np.testing.assert_allclose(record_attention(q, k, keys=2).importance, alpha, rtol=1e-5)


def test_hidden_states_against_numpy():
  h = np.random.default_rng(0).standard_normal((3, 9, 16)).astype(np.float32)
  h[:, 0, 3] = 50
  found = record_hidden(h)
  flat = h.astype(float).reshape(3, -1)
  centred = flat - flat.mean(1, keepdims=True)
  assert found.largest == 50
  assert found.median == pytest.approx(np.median(abs(flat), 1).mean(), rel=1e-5)
  assert found.kurtosis == pytest.approx(
    ((centred**4).mean(1) / (centred**2).mean(1) ** 2).mean(), rel=1e-4
  )


def test_a_foreign_loop_records_while_it_learns():
  recorded = list(foreign_loop.train(101))
  assert [step for step, *_ in recorded] == [0, 50, 100]
  losses = [foreign_loop.loss(p, x) for _, p, x, _ in recorded]
  assert losses[-1] < losses[0]
  for _, p, x, (attention, hidden) in recorded:
    q, k, h = foreign_loop.forward(p, x[:4])[1]
    maps = sj.attention_map(sj.AttentionSpec(position=sj.Nope()), q, k)
    np.testing.assert_allclose(attention.importance, sj.importance(maps).mean(0)[:, :4], rtol=1e-4)
    assert hidden.largest == pytest.approx(float(abs(h).max((1, 2)).mean()), rel=1e-5)
