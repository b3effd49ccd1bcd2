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


@pytest.mark.every(4)
@BOTH
@pytest.mark.parametrize('spec', PAPER.values(), ids=PAPER)
def test_no_token_sees_its_future(spec, implementation):
  if isinstance(spec.mask, sj.Prefix):
    pytest.skip('a prefix is seen by all')
  q, k, v, params = random_inputs(spec, length=9)
  before = attend(spec, q, k, v, params, implementation=implementation)
  for x in (q, k, v):
    x[:, 6:] += 1.0
  after = attend(spec, q, k, v, params, implementation=implementation)
  np.testing.assert_array_equal(before[:, :6], after[:, :6])
  assert np.abs(before[:, 6:] - after[:, 6:]).max() > 1e-3


@BOTH
def test_softmax_ignores_a_shift_of_a_row_and_survives_huge_scores(implementation):
  spec = sj.AttentionSpec(position=sj.Nope())
  q, k, v, _ = random_inputs(spec)
  out = attend(spec, q * 1e4, k, v, implementation=implementation)
  assert np.isfinite(out).all()
  i, scores = 6, np.einsum('hd,jhd->hj', q[0, 6], k[0]) * 1e4
  np.testing.assert_allclose(out[0, i], v[0, scores.argmax(-1), np.arange(3)], rtol=1e-5)


@pytest.mark.every(4)
@BOTH
@pytest.mark.parametrize('spec', PAPER.values(), ids=PAPER)
def test_bfloat16_follows_float32(spec, implementation):
  if spec.signed and isinstance(spec.normalizer, sj.AbsFloor):
    pytest.skip('a sum of signed terms cancels, and its division magnifies any rounding')
  q, k, v, params = random_inputs(spec, length=16, head_dim=8)
  exact = attend(spec, q, k, v, params, implementation=implementation)
  low = sj.attend(
    spec, *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), params, implementation=implementation
  )
  assert low.dtype == jnp.bfloat16
  # Inputs are rounded to 8 bits. That is a few errors of 2^-9 each, times scores of order ten under
  # the relative bias.
  error = np.abs(np.asarray(low, np.float32) - exact).max() / np.abs(exact).max()
  assert error < 0.05


@BOTH
def test_exclusive_attention_is_orthogonal_to_the_values_of_the_token(implementation):
  q, k, v, _ = random_inputs(sj.AttentionSpec(), heads=4, kv_heads=2, head_dim=8)
  v[0, 3, 1] = 0  # a zero value removes nothing
  out, plain = (
    attend(sj.AttentionSpec(head=head), q, k, v, implementation=implementation)
    for head in (sj.Exclusive(), sj.PlainOutput())
  )
  assert np.abs((out * np.repeat(v, 2, axis=2)).sum(-1)).max() < 1e-5
  np.testing.assert_allclose(out[0, 3, 2:], plain[0, 3, 2:], rtol=1e-6)
  for size in (0.0, 1e-13, 1e-10, 1e-8, 1e-6):
    of = lambda v: sj.Exclusive().output(jnp.ones((1, 4)), v, None, {}).sum()
    assert np.isfinite(jax.grad(of)(jnp.full((1, 4), size))).all()
