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
@pytest.mark.parametrize('a, b', [
    (dict(mask=sj.Window(size=99)), {}),
    (dict(mask=sj.Prefix(length=1)), {}),
    (dict(normalizer=sj.PNorm(p=1.0)), {}),
    (dict(normalizer=sj.Clipped(low=0.0)), {}),
    (dict(kv_bias=sj.PseudoMask(context=1)), {}),  # in a context of 1 no key is still to come
    (dict(similarity=sj.Linear(), feature_map=sj.EluPlusOne(), normalizer=sj.RowSum()),
     dict(similarity=sj.Linear(), feature_map=sj.EluPlusOne(), normalizer=sj.PNorm(p=1.0))),
    (dict(position=sj.Nope()), dict(position=sj.Sinusoidal())),
])
def test_two_ways_to_say_the_same(a, b, implementation):
  a, b = sj.AttentionSpec(**a), sj.AttentionSpec(**b)
  inputs = random_inputs(a, length=10)
  np.testing.assert_allclose(attend(a, *inputs, implementation=implementation),
                             attend(b, *inputs, implementation=implementation),
                             rtol=1e-5, atol=1e-6)


@BOTH
def test_a_kv_bias_is_one_more_token(implementation):
  # Without positions, and if every query sees it, the bias equals a first token k*, v*.
  spec = sj.AttentionSpec(position=sj.Nope(), kv_bias=sj.KVBias())
  q, k, v, params = random_inputs(spec)
  biased = attend(spec, q, k, v, params, implementation=implementation)
  first = lambda x, row: np.concatenate([np.broadcast_to(row, (1, 1, *row.shape)), x], 1)
  own = params['kv_bias']
  longer = attend(sj.AttentionSpec(position=sj.Nope()), first(q, q[0, 0]), first(k, own['key']),
                  first(v, own['value']), implementation=implementation)
  np.testing.assert_allclose(biased, longer[:, 1:], rtol=1e-4, atol=1e-5)


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
  low = sj.attend(spec, *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), params,
                  implementation=implementation)
  assert low.dtype == jnp.bfloat16
  # Inputs are rounded to 8 bits. That is a few errors of 2^-9 each, times scores of order ten under the
  # relative bias.
  error = np.abs(np.asarray(low, np.float32) - exact).max() / np.abs(exact).max()
  assert error < 0.05


@BOTH
def test_exclusive_attention_is_orthogonal_to_the_values_of_the_token(implementation):
  q, k, v, _ = random_inputs(sj.AttentionSpec(), heads=4, kv_heads=2, head_dim=8)
  v[0, 3, 1] = 0  # a zero value removes nothing
  out, plain = (attend(sj.AttentionSpec(head=head), q, k, v, implementation=implementation)
                for head in (sj.Exclusive(), sj.PlainOutput()))
  assert np.abs((out * np.repeat(v, 2, axis=2)).sum(-1)).max() < 1e-5
  np.testing.assert_allclose(out[0, 3, 2:], plain[0, 3, 2:], rtol=1e-6)
  for size in (0.0, 1e-13, 1e-10, 1e-8, 1e-6):
    of = lambda v: sj.Exclusive().output(jnp.ones((1, 4)), v, None, {}).sum()
    assert np.isfinite(jax.grad(of)(jnp.full((1, 4), size))).all()


@BOTH
def test_off_by_one_is_a_sink_logit_at_zero_and_a_token_of_zeros(implementation):
  q, k, v, _ = random_inputs(sj.AttentionSpec())
  zero_sink = lambda n: attend(sj.AttentionSpec(kv_bias=sj.ZeroSink(n)), q, k, v,
                               implementation=implementation)
  for n in (0.25, 1.0):
    logit = {'kv_bias': {'logit': np.full(3, np.log(n), np.float32)}}
    learned = attend(sj.AttentionSpec(kv_bias='SinkLogit()'), q, k, v, logit,
                     implementation=implementation)
    np.testing.assert_array_equal(zero_sink(n), learned)
  # A first token whose key is zero has the logit 0 for every query, at any position.
  first = lambda x: np.concatenate([np.zeros_like(x[:, :1]), x], 1)
  longer = attend(sj.AttentionSpec(), *map(first, (q, k, v)), implementation=implementation)
  np.testing.assert_allclose(zero_sink(1.0), longer[:, 1:], rtol=1e-5, atol=1e-6)


def test_one_token():
  for spec in PAPER.values():
    q, k, v, params = random_inputs(spec, length=1)
    np.testing.assert_allclose(attend(spec, q, k, v, params),
                               attend(spec, q, k, v, params, implementation='reference'),
                               rtol=1e-5, atol=1e-6)
