"""Running sums against the T x T definition: values, gradients, FLOPs, memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention import reference
from sink_jax.attention.spec import repeat_heads, transform_qk
from sink_jax.kernels import linear
from sink_jax.kernels.epilogue import apply_epilogue
from tests import attention_oracle as oracle
from tests.attention_specs import PAPER, legal, random_inputs

SPECS = [spec for spec in (
    legal(similarity=sj.Linear(), feature_map=feature_map, normalizer=normalizer)
    for feature_map in (sj.Identity(), sj.EluPlusOne(), sj.Mlp())
    for normalizer in (sj.AbsFloor(), sj.Unnormalized(), sj.RowSum(scale=0.5), sj.PNorm(p=1.0),
                       sj.Count()))
    if spec is not None]
SPECS += [
    sj.AttentionSpec(similarity=sj.Linear(), normalizer=sj.AbsFloor(), position=sj.Nope(),
                     kv_bias=sj.KVBias(), qk_norm=sj.QKNorm()),
    sj.AttentionSpec(similarity=sj.Linear(), normalizer=sj.Unnormalized(), kv_bias=sj.VBias()),
]
SIGNED = PAPER['normalized identity (Table 15)']

# Float32 rounding of sums over tokens, in another order than the definition's, relative to
# the largest entry. 7e-7 was the most that came up, at 2048 tokens, but 6e-6 for gradients
# through a normalizer that divides by a sum of large Mlp products of both signs.
TOLERANCE = 2e-5


by_definition = functools.partial(sj.attend, implementation='reference')


def attend(spec, q, k, v, params):
  """What `sj.attend` does, through `linear.rows`."""
  dtype = q.dtype
  q, k = transform_qk(spec, q, k, params)
  rows = linear.rows(spec, q, k, repeat_heads(v, k.shape[2]))
  return apply_epilogue(spec, q, rows, params).astype(dtype)


def dense_rows(q, k, v):
  """The rows and their sums by the definition, from T x T scores."""
  k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
  i = jnp.arange(q.shape[1])
  s = jnp.where(i[:, None] >= i, reference.scores(SIGNED, q, k, i, i), 0)
  return jnp.einsum('bhlt,bthd->blhd', s, v), s.sum(-1), s.sum(-1)


def errors(actual, expected):
  """Of each array, relative to its largest entry."""
  pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
  return [float(np.abs(np.asarray(x, np.float64) - y).max() / max(np.abs(y).max(), 1e-3))
          for x, y in pairs]


def random_heads(length, heads, kv_heads, head_dim=8, batch=2):
  return random_inputs(SIGNED, batch, length, heads, kv_heads, head_dim)[:3]


def value_and_vjp(f, inputs):
  """The outputs, and the gradients for random cotangents of all of them."""
  outputs = jax.eval_shape(lambda *x: tuple(f(*x)), *inputs)
  rng = np.random.default_rng(3)
  cotangents = tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in outputs)

  @jax.jit
  def run(inputs, cotangents):
    outputs, vjp = jax.vjp(lambda *x: tuple(f(*x)), *inputs)
    return outputs, vjp(cotangents)

  return run(tuple(inputs), cotangents)


@pytest.mark.every(4)
@pytest.mark.parametrize('spec', SPECS, ids=str)
def test_equal_to_the_reference(monkeypatch, spec):
  monkeypatch.setattr(linear, '_BLOCK', 4)
  assert linear.unsupported(spec) is None
  inputs = random_inputs(spec, batch=2, length=23, heads=2, kv_heads=1)
  run = lambda f: value_and_vjp(lambda *x: (f(spec, *x),), inputs)
  assert max(errors(run(attend), run(by_definition))) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize('block, length, heads, kv_heads', [
    (128, 1, 2, 2), (128, 5, 3, 1), (4, 3, 6, 2), (4, 4, 2, 2), (4, 5, 2, 2), (4, 8, 6, 2),
    (3, 10, 3, 1), (1, 6, 4, 2), (128, 300, 4, 2)])
def test_rows_and_sums_and_their_gradients(monkeypatch, block, length, heads, kv_heads):
  monkeypatch.setattr(linear, '_BLOCK', block)
  inputs = random_heads(length, heads, kv_heads)
  ours = value_and_vjp(functools.partial(linear.rows, SIGNED), inputs)
  assert max(errors(ours, value_and_vjp(dense_rows, inputs))) < TOLERANCE
  assert [x.dtype for x in ours[0]] == [jnp.float32] * 3


def test_without_a_normalizer_the_sums_are_zero_and_have_no_gradient():
  spec = PAPER['identity (Table 15)']
  inputs = random_heads(9, 4, 2)
  (out, stat, power_stat), gradients = value_and_vjp(
      functools.partial(linear.rows, spec), inputs)
  assert stat.shape == power_stat.shape == (2, 4, 9)
  assert not stat.any() and not power_stat.any()
  expected = value_and_vjp(lambda *x: dense_rows(*x)[:1], inputs)
  assert max(errors(((out,), gradients), expected)) < TOLERANCE


@pytest.mark.parametrize('spec', SPECS[:1] + SPECS[-2:], ids=str)
def test_against_loops_in_float64(monkeypatch, spec):
  monkeypatch.setattr(linear, '_BLOCK', 3)
  inputs = random_inputs(spec, heads=4, kv_heads=2)
  assert max(errors(attend(spec, *inputs), oracle.attention(spec, *inputs)[0])) < TOLERANCE


@pytest.mark.parametrize('feature_map', [sj.Identity(), sj.EluPlusOne()])
def test_bfloat16_is_near_float32(feature_map):
  q, k, v = random_heads(300, 4, 2, head_dim=32)
  rounded = [feature_map.features(jnp.asarray(x, jnp.bfloat16), {}) for x in (q, k)]
  rounded.append(jnp.asarray(v, jnp.bfloat16))
  near = value_and_vjp(functools.partial(linear.rows, SIGNED), rounded)
  exact = value_and_vjp(dense_rows, [x.astype(jnp.float32) for x in rounded])
  out, stat, power_stat, *gradients = errors(near, jax.tree.map(np.asarray, exact))
  # Products of bfloat16 are exact in float32, so the sums do not suffer. Scores and running
  # sums are rounded to 8 bits (2^-9 relative) on their way into the second matmul, and
  # gradients once more at the end: 0.002 and 0.0056 were the most that came up.
  assert max(stat, power_stat) < TOLERANCE
  assert out < 0.01 and max(gradients) < 0.015
  assert {x.dtype for x in near[0]} == {jnp.dtype(jnp.float32)}
  assert {x.dtype for x in near[1]} == {jnp.dtype(jnp.bfloat16)}


def test_flops_grow_linearly_with_the_length(monkeypatch):
  # XLA counts the body of a loop once, however often it runs: here loops are unrolled.
  monkeypatch.setattr(jax.lax, 'scan', functools.partial(jax.lax.scan, unroll=True))
  monkeypatch.setattr(linear, '_BLOCK', 32)

  def flops(f, length):
    x = jax.ShapeDtypeStruct((1, length, 1, 32), jnp.float32)
    loss = lambda *inputs: sum(jnp.sum(r) for r in f(*inputs))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(
        x, x, x).compile().cost_analysis()['flops']

  ours = functools.partial(linear.rows, SIGNED)
  assert 3.5 < flops(ours, 1024) / flops(ours, 256) < 5
  assert flops(dense_rows, 1024) / flops(dense_rows, 256) > 12  # T x T is 16
  # A matmul of two 32 x 32 blocks for the scores, the rows, the earlier keys and the sum,
  # in each of four scans; a quarter more for everything elementwise.
  assert flops(ours, 1024) < 1.25 * 4 * 4 * 2 * 32 * 32 * 1024


def test_memory_grows_linearly_with_the_length():
  def temporary_bytes(length):
    x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    loss = lambda *inputs: sum(jnp.sum(r) for r in linear.rows(SIGNED, *inputs))
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  small, large = temporary_bytes(4096), temporary_bytes(16384)
  assert large < 4.5 * small  # T x T would be 16
  assert large < 12 * 16384 * 16 * 4  # twelve arrays of the size of the queries


@pytest.mark.parametrize('spec, reason', [
    (sj.AttentionSpec(), r'only the similarity Linear\(\) has running sums, Exp\(\) has not'),
    (sj.AttentionSpec('Softpick()', 'AbsSum()'), r'only the similarity Linear\(\).*Softpick\(\)'),
    (sj.AttentionSpec(similarity=sj.EluPlusOne(), normalizer=sj.Unnormalized()),
     r'only the similarity Linear\(\).*EluPlusOne\(\)'),
    (sj.AttentionSpec(similarity=sj.Linear(), normalizer=sj.AbsFloor(), mask=sj.Window(size=8)),
     r'need the mask Causal\(\), not Window\(size=8\)'),
    (sj.AttentionSpec(similarity=sj.Linear(), normalizer=sj.AbsFloor(), mask=sj.Prefix(length=2)),
     r'need the mask Causal\(\), not Prefix\(length=2\)'),
    (sj.AttentionSpec(similarity=sj.Linear(), normalizer=sj.AbsFloor(), position=sj.Alibi()),
     r'Alibi\(\) adds a bias to every score'),
    (sj.AttentionSpec(similarity=sj.Linear(), feature_map=sj.EluPlusOne(),
                      normalizer=sj.PNorm(p=2.0)),
     r'PNorm\(p=2.0\) needs a sum of powers of the scores'),
], ids=str)
def test_what_has_no_running_sum_says_why(spec, reason):
  assert re.search(reason, linear.unsupported(spec))
  assert '\n' not in linear.unsupported(spec) and not linear.unsupported(spec).endswith('.')


def test_all_linear_attention_of_the_paper_is_supported():
  linear_specs = {name: s for name, s in PAPER.items() if isinstance(s.similarity, sj.Linear)}
  assert len(linear_specs) == 6
  assert [name for name, s in linear_specs.items() if linear.unsupported(s)] == []
