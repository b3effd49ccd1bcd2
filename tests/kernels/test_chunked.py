"""The chunked implementation: special rows, digits of Softpick, and linear memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.spec import TransformedQK
from sink_jax.kernels import chunked
from sink_jax.kernels.dispatch import attend_transformed
from tests.attention_checks import error_of, with_gradients
from tests.attention_specs import random_inputs
from tests.kernels.test_implementations import FLOAT32, attention


def test_gradients_are_finite_where_a_padded_query_sees_no_key(monkeypatch):
  monkeypatch.setattr(chunked, 'BLOCK', 8)
  spec = sj.AttentionSpec(normalizer='PNorm(p=3)', mask='Window(size=2)')
  inputs = random_inputs(spec, length=9, heads=1)
  assert error_of(attention('chunked', spec), spec, *inputs) < FLOAT32


@pytest.mark.parametrize(
  'similarity, normalizer, kv_bias',
  [
    ('Sigmoid()', 'RowSum()', 'SinkLogit()'),
    ('Sigmoid()', 'PNorm(p=0.25)', 'SinkLogit()'),
    ('Sigmoid()', 'PNorm(p=4.0)', 'NoBias()'),
    ('EluPlusOne()', 'RowSum(eps=1e-8)', 'NoBias()'),
    ('EluPlusOne()', 'AbsFloor()', 'SinkLogit()'),
    # Without a positive score the row is zero.
    ('Relu()', 'RowSum()', 'NoBias()'),
    ('Relu()', 'PNorm(p=0.25)', 'NoBias()'),
    ('Relu()', 'PNorm(p=4.0)', 'NoBias()'),
    ('Relu()', 'Count()', 'NoBias()'),
    ('Softpick()', 'AbsSum()', 'NoBias()'),
  ],
)
def test_vanishing_similarities_stay_finite(similarity, normalizer, kv_bias):
  spec = sj.AttentionSpec(similarity, normalizer, position='Nope()', kv_bias=kv_bias)
  q, k, v, params = random_inputs(spec)
  if params:
    params['kv_bias']['logit'][:] = -200.0
  run = jax.jit(functools.partial(with_gradients, attention('chunked', spec)))
  q, k = -np.abs(q), np.abs(k)
  for scale in (0.0, 1.0, 5.0, 12.0, 30.0, 200.0):
    found = jax.tree.leaves(run(scale * q, k, v, params))
    assert all(np.isfinite(x).all() for x in found)
    if similarity in ('Relu()', 'Softpick()'):
      assert not any(np.any(x) for x in found)


EPS, T, DH = 1e-6, 11, 8
SOFTPICK = sj.AttentionSpec('Softpick()', 'AbsSum()', position='Nope()')


@jax.jit
def softpick(q, k, v, do):
  """The output and the cotangents of keys and values, one head."""
  attend = lambda k, v: attend_transformed(SOFTPICK, TransformedQK(q, k), v, {})
  out, pull = jax.vjp(attend, k, v[None, :, None])
  dk, dv = pull(do[None, :, None])
  return out[0, :, 0], dk[0, :, 0, 0], dv[0, :, 0]


def softpick_in_float64(s, v, do):
  """[(result, size of the terms in its sum)]: output, and cotangents of scores and values.

  It is the paper's formula, and its gradient as the released kernels write it.
  """
  s, v, do = (np.float64(x) for x in (s, v, do))
  seen = np.tri(T, dtype=bool)
  m = np.maximum(np.maximum.accumulate(s), 0)[:, None]
  less_one = seen * (np.exp(s - m) - np.exp(-m))
  z = np.abs(less_one).sum(1, keepdims=True) + EPS
  weights = np.maximum(less_one, 0) / z
  slope = seen * np.exp(s - m) / z
  of_weights = do @ v.T
  of_sums = (do * (weights @ v)).sum(1, keepdims=True)
  ds = slope * ((s > 0) * of_weights - np.sign(s) * of_sums)
  terms = slope * (np.abs(of_weights) + np.abs(of_sums))
  return [
    (weights @ v, weights @ np.abs(v)),
    (ds.sum(0), terms.sum(0)),
    (weights.T @ do, weights.T @ np.abs(do)),
  ]


@pytest.mark.parametrize(
  'shift, scale',
  [
    (0, 1),
    (0, 30),
    (0, 1e-4),
    (-3, 1),
    (30, 1),
    (300, 1),
  ],
)
def test_softpick_keeps_four_digits_of_scores_of_every_size(shift, scale):
  """In float32, exp(s) - 1 keeps three digits of scores of 1e-4, and exp(300) overflows."""
  rng = np.random.default_rng(3)
  s = np.float32(scale * rng.standard_normal(T) + shift)
  v, do = np.float32(rng.standard_normal((2, T, DH)))
  # Every query has the same scores s with the keys.
  q, k = np.zeros((2, 1, T, 1, DH), np.float32)
  q[..., 0] = DH**0.5
  k[0, :, 0, 0] = s
  found = softpick(q, k, v, do)
  share = 5e-5 + 2**-24 * 4 * abs(shift)
  for actual, (expected, size) in zip(found, softpick_in_float64(s, v, do)):
    error = np.abs(actual - expected)
    np.testing.assert_array_less(error, share * size + 1e-30)


SPEC = sj.AttentionSpec(normalizer='PNorm(p=2.0)', position='Alibi()', kv_bias='KVBias()')


@pytest.fixture
def two_spans(monkeypatch):
  """Fewer spans compile faster; the memory of a program is that of its largest one."""
  monkeypatch.setattr(chunked, '_SPANS', 2)


def temporary_bytes(f, *inputs):
  program = jax.jit(f).lower(*inputs).compile()
  return program.memory_analysis().temp_size_in_bytes


def queries(length, heads=1):
  return jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)


EXTRA = jax.ShapeDtypeStruct((1, 64), jnp.float32)
PARAMS = {'kv_bias': {'key': EXTRA, 'value': EXTRA}}


def test_training_needs_memory_linear_in_the_length(two_spans):
  gradient = functools.partial(with_gradients, attention('chunked', SPEC))

  def size(length):
    q = queries(length)
    return temporary_bytes(gradient, q, q, q, PARAMS)

  assert size(4096) < 4.5 * size(1024)
  assert size(4096) < 4 * 4096**2 / 2  # half of a T x T map in float32


def test_grouped_keys_are_not_repeated(two_spans):
  f, q = attention('chunked', sj.AttentionSpec()), queries(1024, heads=16)
  size = lambda k: temporary_bytes(f, q, k, k)
  assert size(queries(1024)) < size(q)  # repeated keys would take as much as 16 heads


def test_importance_of_131072_tokens_needs_little_memory(two_spans):
  f = lambda q, k, params: sj.streaming_importance(SPEC, q, k, params)
  size = lambda q: temporary_bytes(f, q, q, PARAMS)
  long, short = size(queries(131072)), size(queries(32768))
  assert long < 512 * 2**20  # a float32 map would take 64 GiB
  assert long < 4.5 * short
