"""Identities that hold for any numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from tests.attention_specs import PAPER, random_inputs

BOTH = pytest.mark.parametrize('implementation', ['chunked', 'reference'])


def attend(spec, *inputs, implementation=None):
  return np.asarray(sj.attend(spec, *inputs, implementation=implementation))


@BOTH
@pytest.mark.parametrize(
  'name',
  [
    'softmax',
    'p-norm softmax 2 (Figure 29)',
    'p-norm sigmoid 2 (Figure 29)',
    'normalized identity (Table 15)',
    'softpick',
  ],
)
def test_no_token_sees_its_future(name, implementation):
  q, k, v, params = random_inputs(PAPER[name], length=9)
  before = attend(PAPER[name], q, k, v, params, implementation=implementation)
  for x in (q, k, v):
    x[:, 6:] += 1.0
  after = attend(PAPER[name], q, k, v, params, implementation=implementation)
  difference = np.abs(before - after)
  assert (difference[:, :6] == 0).all()
  assert difference[:, 6:].max() > 1e-3


@BOTH
def test_softmax_survives_huge_scores(implementation):
  spec = sj.AttentionSpec(position=sj.Nope())
  q, k, v, _ = random_inputs(spec)
  out = attend(spec, q * 1e4, k, v, implementation=implementation)
  assert np.isfinite(out).all()
  scores = np.einsum('hd,jhd->hj', q[0, 6], k[0]) * 1e4
  largest = v[0, scores.argmax(-1), np.arange(3)]
  np.testing.assert_allclose(out[0, 6], largest, rtol=1e-5)


def test_exclusive_attention_is_orthogonal_to_the_values_of_the_token():
  q, k, v, _ = random_inputs(sj.AttentionSpec(), heads=4, kv_heads=2, head_dim=8)
  v[0, 3, 1] = 0  # a zero value removes nothing
  out = attend(sj.AttentionSpec(head='Exclusive()'), q, k, v)
  plain = attend(sj.AttentionSpec(), q, k, v)
  products = (out * np.repeat(v, 2, axis=2)).sum(-1)
  assert np.abs(products).max() < 1e-5
  np.testing.assert_allclose(out[0, 3, 2:], plain[0, 3, 2:], rtol=1e-6)


def test_exclusive_attention_has_finite_gradients_at_small_values():
  head, ones = sj.Exclusive(), jnp.ones((1, 4))
  loss = lambda v: head.output(ones, v, None, {}).sum()
  slope = jax.jit(jax.grad(loss))
  for size in (0.0, 1e-13, 1e-10, 1e-8, 1e-6):
    assert np.isfinite(slope(jnp.full((1, 4), size))).all()
