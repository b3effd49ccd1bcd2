"""The chunked implementation: special rows, digits of Softpick, and linear memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.spec import TransformedQK
from sink_jax.kernels.dispatch import attend_transformed
from tests.attention_checks import with_gradients
from tests.attention_specs import random_inputs
from tests.kernels.test_implementations import FLOAT32, attention, error_of


def test_gradients_are_finite_where_a_padded_query_sees_no_key():
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=3), mask=sj.Window(size=8))
  inputs = random_inputs(spec, length=577, heads=1)
  assert error_of(attention('chunked', spec), spec, *inputs) < FLOAT32


def values(implementation, spec, *inputs):
  return jax.tree.leaves(with_gradients(attention(implementation, spec), *inputs))


@pytest.mark.every(9)
@pytest.mark.parametrize('implementation', ['chunked', 'reference'])
@pytest.mark.parametrize(
  'normalizer',
  [
    sj.RowSum(),
    sj.RowSum(eps=1e-8),
    sj.PNorm(p=0.25),
    sj.PNorm(p=4.0),
    sj.AbsFloor(),
  ],
)
@pytest.mark.parametrize('similarity', [sj.Sigmoid(), sj.EluPlusOne()])
def test_vanishing_similarities_stay_finite(similarity, normalizer, implementation):
  for bias in (sj.NoBias(), sj.SinkLogit()):
    spec = sj.AttentionSpec(similarity, normalizer, position=sj.Nope(), kv_bias=bias)
    q, k, v, params = random_inputs(spec)
    if params:
      params['kv_bias']['logit'][:] = -200.0
    for scale in (5, 12, 30, 200):
      results = values(implementation, spec, -scale * np.abs(q), np.abs(k), v, params)
      assert all(np.isfinite(x).all() for x in results)


@pytest.mark.parametrize(
  'similarity, normalizer',
  [
    *(('Relu()', z) for z in ('RowSum()', 'PNorm(p=0.25)', 'PNorm(p=4.0)', 'Count()')),
    ('Softpick()', 'AbsSum()'),
  ],
)
def test_rows_without_a_positive_score_are_zero(similarity, normalizer):
  spec = sj.AttentionSpec(similarity, normalizer, position='Nope()')
  q, k, v, params = random_inputs(spec)
  for scale in (0, 1, 200):
    results = values('chunked', spec, -scale * np.abs(q), np.abs(k), v, params)
    assert not any(np.any(x) for x in results)  # all zero, and no NaN


EPS, T, DH = 1e-6, 11, 8


@pytest.mark.parametrize('shift, scale', [(0, 1), (0, 30), (0, 1e-4), (-3, 1), (30, 1), (300, 1)])
def test_softpick_keeps_four_digits_of_scores_of_every_size(shift, scale):
  """In float32, exp(s) - 1 keeps three digits of scores of 1e-4, and exp(300) overflows."""
  rng = np.random.default_rng(3)
  s = np.float32(scale * rng.standard_normal(T) + shift)
  v, do = np.float32(rng.standard_normal((2, T, DH)))
  # Every query has the same scores s with the keys.
  q = jnp.zeros((1, T, 1, DH)).at[..., 0].set(DH**0.5)
  k = jnp.zeros((1, T, 1, DH)).at[0, :, 0, 0].set(s)
  spec = sj.AttentionSpec('Softpick()', 'AbsSum()', position='Nope()')
  attend = lambda k, v: attend_transformed(spec, TransformedQK(q, k), v, {})
  out, pull = jax.vjp(attend, k, v[None, :, None])
  dk, dv = pull(do[None, :, None])
  # The paper's formula in float64, and its gradient as the released kernels write it.
  s, v, do = (np.float64(x) for x in (s, v, do))
  seen = np.tri(T, dtype=bool)
  m = np.maximum(np.maximum.accumulate(s), 0)[:, None]
  small = np.expm1(np.minimum(s, 100)) * np.exp(-m)
  less_one = seen * np.where(m > 100, np.exp(s - m) - np.exp(-m), small)
  z = np.abs(less_one).sum(1, keepdims=True) + EPS
  weights, power = np.maximum(less_one, 0) / z, seen * np.exp(np.minimum(s - m, 0)) / z
  dp, by_sum = do @ v.T, (do * (weights @ v)).sum(1, keepdims=True)
  expected = weights @ v, (power * ((s > 0) * dp - np.sign(s) * by_sum)).sum(0), weights.T @ do
  # The sizes of the terms in each sum.
  of_scores = (power * (np.abs(dp) + np.abs(by_sum))).sum(0)
  sizes = weights @ np.abs(v), of_scores, weights.T @ np.abs(do)
  for actual, e, size in zip((out[0, :, 0], dk[0, :, 0, 0], dv[0, :, 0]), expected, sizes):
    allowed = (5e-5 + 2**-24 * 4 * abs(shift)) * size + 1e-30
    np.testing.assert_array_less(np.abs(actual - e), allowed)


P_NORM = sj.AttentionSpec(normalizer='PNorm(p=2.0)', position='Alibi()', kv_bias='KVBias()')
GROWING = [
  pytest.param(sj.AttentionSpec(), id='softmax'),
  pytest.param(P_NORM, id='p-norm with bias'),
]


def temporary_bytes(f, *inputs):
  return jax.jit(f).lower(*inputs).compile().memory_analysis().temp_size_in_bytes


def inputs(spec, length, heads=1, head_dim=64):
  q = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)
  params = jax.tree.map(
    lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32),
    spec.params(sj.Dims(heads, heads, head_dim)),
    is_leaf=lambda x: isinstance(x, sj.Param),
  )
  return q, params


@pytest.mark.parametrize('spec', GROWING)
def test_training_needs_memory_linear_in_the_length(spec):
  def grow(implementation):
    loss = lambda q, k, v, p: sj.attend(spec, q, k, v, p, implementation=implementation).sum()
    sizes = []
    for length in (2048, 8192):
      q, params = inputs(spec, length)
      sizes.append(temporary_bytes(jax.grad(loss, (0, 1, 2, 3)), q, q, q, params))
    return sizes[1] / sizes[0]

  assert grow('chunked') < 4.5
  assert grow('reference') > 10  # this test can detect quadratic growth


def test_grouped_keys_are_not_repeated():
  spec = sj.AttentionSpec()
  q, _ = inputs(spec, 4096, heads=16)
  size = lambda kv: temporary_bytes(
    attention('chunked', spec), q, *inputs(spec, 4096, heads=kv)[:1] * 2
  )
  assert size(1) < size(16)  # repeated keys would take as much as 16 heads


@pytest.mark.parametrize('spec', GROWING)
def test_importance_of_131072_tokens_needs_little_memory(spec):
  f = lambda q, k, params: sj.streaming_importance(spec, q, k, params)
  (q, params), (short, _) = inputs(spec, 131072), inputs(spec, 131072 // 4)
  size = temporary_bytes(f, q, q, params)
  assert size < 512 * 2**20  # a float32 map would take 64 GiB
  assert size / temporary_bytes(f, short, short, params) < 4.5
