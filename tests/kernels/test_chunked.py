"""The chunked implementation: blocks and spans, rounding, special rows, and linear memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.spec import TransformedQK
from sink_jax.kernels import chunked
from sink_jax.kernels.dispatch import attend_transformed
from tests.attention_specs import PAPER, random_inputs


def small_blocks(monkeypatch, block, spans):
  monkeypatch.setattr(chunked, 'BLOCK', block)
  monkeypatch.setattr(chunked, '_SPANS', spans)


def relative_error(a, b):
  """The largest error relative to its array's size plus 1 % of the largest size, as arrays may vanish."""
  pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
  largest = max(float(jnp.abs(y).max()) for _, y in pairs)
  return max(float(jnp.abs(x - y).max() / (jnp.abs(y).max() + 0.01 * largest)) for x, y in pairs)


def value_and_grad(spec, implementation, inputs):
  weight = np.random.default_rng(9).standard_normal(inputs[0].shape)
  f = lambda *args: jnp.sum(sj.attend(spec, *args, implementation=implementation) * weight)
  return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3)))(*inputs)


@pytest.mark.parametrize('mask, block, spans, length', [
    (sj.Window(size=5), 4, 3, 23),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (sj.Prefix(length=9), 4, 8, 16), (sj.Causal(), 4, 3, 23), (sj.Window(size=1), 4, 3, 23),
        (sj.Prefix(length=9), 4, 3, 23), (sj.Causal(), 4, 1, 11), (sj.Window(size=5), 8, 2, 7)))])
def test_blocks_and_spans_change_nothing(monkeypatch, mask, block, spans, length):
  small_blocks(monkeypatch, block, spans)
  for slots in (dict(similarity=sj.Sigmoid(), normalizer=sj.RowSum(eps=1e-8)),
                dict(normalizer=sj.PNorm(p=0.5), position=sj.Alibi(), kv_bias=sj.KVBias()),
                dict(normalizer=sj.Clipped(low=-0.05), kv_bias=sj.KVBias())):
    spec = sj.AttentionSpec(mask=mask, **slots)
    inputs = random_inputs(spec, batch=2, length=length, heads=4, kv_heads=2)
    results = (value_and_grad(spec, name, inputs) for name in ('chunked', 'reference'))
    assert relative_error(*results) < 1e-5
    alpha = sj.streaming_importance(spec, inputs[0], inputs[1], inputs[3])
    direct = sj.importance(sj.attention_map(spec, inputs[0], inputs[1], inputs[3]), raw=True)
    np.testing.assert_allclose(alpha.raw, direct, rtol=1e-5, atol=1e-6)
    first = sj.streaming_importance(spec, inputs[0], inputs[1], inputs[3], keys=3)
    np.testing.assert_allclose(first.raw, alpha.raw[..., :3], rtol=1e-6)
    np.testing.assert_allclose(first.normalized, alpha.normalized[..., :3], rtol=1e-6)
    if spec.kv_bias.has_extra_key:
      np.testing.assert_allclose(first.bias_slot, alpha.bias_slot, rtol=1e-6)
    with pytest.raises(ValueError, match=f'keys = {length + 1} is outside 1..{length}'):
      sj.streaming_importance(spec, inputs[0], inputs[1], inputs[3], keys=length + 1)


def test_gradients_are_finite_where_a_padded_query_sees_no_key():
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=3), mask=sj.Window(size=8))
  q, k, v, params = random_inputs(spec, length=577, heads=1)
  found, expected = (jax.jit(jax.grad(lambda v: (sj.attend(spec, q, k, v, params, implementation=name)**2).sum()))(v)
                     for name in ('chunked', 'reference'))
  assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize('name', ['softmax', 'normalized sigmoid (Table 15)'])
def test_bfloat16_is_near_float32(name):
  inputs = random_inputs(PAPER[name], length=300, head_dim=32)
  low = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
  exact = value_and_grad(PAPER[name], 'reference', [*(x.astype(jnp.float32) for x in low), inputs[3]])
  near = value_and_grad(PAPER[name], 'chunked', [*low, inputs[3]])
  assert {x.dtype for x in near[1][:3]} == {jnp.dtype('bfloat16')}
  for x, y in zip(near[1][:3], exact[1][:3]):
    # Weights, the cotangents of scores and the gradients are rounded to 8 bits, 2^-9 each.
    assert jnp.linalg.norm(x.astype(jnp.float32) - y) < 0.01 * jnp.linalg.norm(y)


@pytest.mark.every(9)
@pytest.mark.parametrize('implementation', ['chunked', 'reference'])
@pytest.mark.parametrize('normalizer', [sj.RowSum(), sj.RowSum(eps=1e-8), sj.PNorm(p=0.25), sj.PNorm(p=4.0),
                                        sj.AbsFloor()])
@pytest.mark.parametrize('similarity', [sj.Sigmoid(), sj.EluPlusOne()])
def test_vanishing_similarities_stay_finite(similarity, normalizer, implementation):
  for bias in (sj.NoBias(), sj.SinkLogit()):
    spec = sj.AttentionSpec(similarity, normalizer, position=sj.Nope(), kv_bias=bias)
    q, k, v, params = random_inputs(spec)
    if params:
      params['kv_bias']['logit'][:] = -200.0
    for scale in (5, 12, 30, 200):
      results = value_and_grad(spec, implementation, (-scale * np.abs(q), np.abs(k), v, params))
      assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


@pytest.mark.parametrize('similarity, normalizer', [
    *(('Relu()', z) for z in ('RowSum()', 'PNorm(p=0.25)', 'PNorm(p=4.0)', 'Count()')),
    ('Softpick()', 'AbsSum()')])
def test_rows_without_a_positive_score_are_zero(similarity, normalizer):
  spec = sj.AttentionSpec(similarity, normalizer, position='Nope()')
  q, k, v, params = random_inputs(spec)
  for scale in (0, 1, 200):
    results = value_and_grad(spec, 'chunked', (-scale * np.abs(q), np.abs(k), v, params))
    assert not any(np.any(x) for x in jax.tree.leaves(results))  # all zero, and no NaN


EPS, T, DH = 1e-6, 11, 8


@pytest.mark.parametrize('shift, scale', [(0, 1), (0, 30), (0, 1e-4), (-3, 1), (30, 1), (300, 1)])
def test_softpick_keeps_four_digits_of_scores_of_every_size(shift, scale):
  """In float32, exp(s) - 1 keeps three digits of scores of 1e-4, and exp(s) overflows at scores of 300."""
  rng = np.random.default_rng(3)
  s, v, do = (np.float32(x) for x in (
      scale * rng.standard_normal(T) + shift, *rng.standard_normal((2, T, DH))))
  # Every query has the same scores s with the keys.
  q = jnp.zeros((1, T, 1, DH)).at[..., 0].set(DH**.5)
  k = jnp.zeros((1, T, 1, DH)).at[0, :, 0, 0].set(s)
  spec = sj.AttentionSpec('Softpick()', 'AbsSum()', position='Nope()')
  out, pull = jax.vjp(lambda k, v: attend_transformed(spec, TransformedQK(q, k), v, {}), k,
                      v[None, :, None])
  dk, dv = pull(do[None, :, None])
  # The paper's formula in float64, and its gradient as the released kernels write it.
  s, v, do = (np.float64(x) for x in (s, v, do))
  seen = np.tri(T, dtype=bool)
  m = np.maximum(np.maximum.accumulate(s), 0)[:, None]
  less_one = seen * np.where(m > 100, np.exp(s - m) - np.exp(-m), np.expm1(np.minimum(s, 100)) * np.exp(-m))
  z = np.abs(less_one).sum(1, keepdims=True) + EPS
  weights, power = np.maximum(less_one, 0) / z, seen * np.exp(np.minimum(s - m, 0)) / z
  dp, by_sum = do @ v.T, (do * (weights @ v)).sum(1, keepdims=True)
  expected = weights @ v, (power * ((s > 0) * dp - np.sign(s) * by_sum)).sum(0), weights.T @ do
  # The sizes of the terms in each sum.
  sizes = weights @ np.abs(v), (power * (np.abs(dp) + np.abs(by_sum))).sum(0), weights.T @ np.abs(do)
  for actual, e, size in zip((out[0, :, 0], dk[0, :, 0, 0], dv[0, :, 0]), expected, sizes):
    np.testing.assert_array_less(np.abs(actual - e), (5e-5 + 2**-24 * 4 * abs(shift)) * size + 1e-30)


GROWING = [
    pytest.param(sj.AttentionSpec(), id='softmax'),
    pytest.param(sj.AttentionSpec(normalizer='PNorm(p=2.0)', position='Alibi()',
                                  kv_bias='KVBias()'), id='p-norm with bias')]


def temporary_bytes(f, *inputs):
  return jax.jit(f).lower(*inputs).compile().memory_analysis().temp_size_in_bytes


def inputs(spec, length, heads=1, head_dim=64):
  q = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)
  params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32),
                        spec.params(sj.Dims(heads, heads, head_dim)),
                        is_leaf=lambda x: isinstance(x, sj.Param))
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
  q, _ = inputs(sj.AttentionSpec(), 4096, heads=16)
  size = lambda kv: temporary_bytes(lambda *x: sj.attend(sj.AttentionSpec(), *x, implementation='chunked'),
                                    q, *inputs(sj.AttentionSpec(), 4096, heads=kv)[:1] * 2)
  assert size(1) < size(16)  # repeated keys would take as much as 16 heads


@pytest.mark.parametrize('spec', GROWING)
def test_importance_of_131072_tokens_needs_little_memory(spec):
  length = 131072
  q, params = inputs(spec, length)
  size = temporary_bytes(lambda q, k, p: sj.streaming_importance(spec, q, k, p), q, q, params)
  assert size < 512 * 2**20  # a float32 map would take 64 GiB
  short = temporary_bytes(lambda q, k, p: sj.streaming_importance(spec, q, k, p),
                          *inputs(spec, length // 4)[:1] * 2, params)
  assert size / short < 4.5
