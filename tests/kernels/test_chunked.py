"""Blocks and spans of the chunked implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.reference import scores
from sink_jax.kernels import chunked
from tests.attention_specs import PAPER, random_inputs


def small_blocks(monkeypatch, block, spans):
  monkeypatch.setattr(chunked, 'BLOCK', block)
  monkeypatch.setattr(chunked, '_SPANS', spans)


def relative_error(a, b):
  """Of each array to its own size, or 1 % of the largest one's where it vanishes."""
  pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
  largest = max(float(jnp.abs(y).max()) for _, y in pairs)
  return max(float(jnp.abs(x - y).max() / (jnp.abs(y).max() + 0.01 * largest)) for x, y in pairs)


MASKS = [sj.Causal(), sj.Window(size=5), sj.Window(size=1), sj.Prefix(length=9)]


@pytest.mark.full
@pytest.mark.parametrize('mask, block, spans, length', [
    (MASKS[1], 4, 3, 23),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (sj.Prefix(length=9), 4, 8, 16),
        *((mask, 4, 3, 23) for mask in (MASKS[0], *MASKS[2:])), (sj.Causal(), 4, 1, 11),
        (sj.Window(size=5), 8, 2, 7)))])
def test_blocks_and_spans_change_nothing(monkeypatch, mask, block, spans, length):
  small_blocks(monkeypatch, block, spans)
  for slots in (dict(similarity=sj.Sigmoid(), normalizer=sj.RowSum(eps=1e-8)),
                dict(normalizer=sj.PNorm(p=0.5), position=sj.Alibi(), kv_bias=sj.KVBias()),
                dict(normalizer=sj.Clipped(low=-0.05), kv_bias=sj.KVBias())):
    spec = sj.AttentionSpec(mask=mask, **slots)
    inputs = random_inputs(spec, batch=2, length=length, heads=2)
    weight = np.random.default_rng(9).standard_normal(inputs[0].shape)

    def value_and_grad(implementation):
      f = lambda *args: jnp.sum(sj.attend(spec, *args, implementation=implementation) * weight)
      return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3)))(*inputs)

    assert relative_error(value_and_grad('chunked'), value_and_grad('reference')) < 1e-5
    alpha = sj.streaming_importance(spec, inputs[0], inputs[1], inputs[3])
    direct = sj.importance(sj.attention_map(spec, inputs[0], inputs[1], inputs[3]), raw=True)
    np.testing.assert_allclose(alpha.raw, direct, rtol=1e-5, atol=1e-6)


def test_padding_stays_finite_under_a_growing_bias(monkeypatch):
  # A row of padding has statistic 0, far below what the bias of its position gives.
  small_blocks(monkeypatch, 64, 1)
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=4.0), position=sj.Relative())
  inputs = random_inputs(spec, length=200, heads=1)
  grads = [jax.grad(lambda *x: sj.attend(spec, *x, implementation=i).sum(), argnums=(0, 1, 2))(
      *inputs) for i in ('chunked', 'reference')]
  assert all(np.isfinite(g).all() for g in grads[0])
  assert relative_error(*grads) < 1e-4


@pytest.mark.every(4)
@pytest.mark.parametrize('implementation', ['chunked', 'reference'])
@pytest.mark.parametrize('normalizer', [sj.RowSum(), sj.RowSum(eps=1e-8), sj.PNorm(p=0.25),
                                        sj.PNorm(p=2.0), sj.PNorm(p=4.0), sj.AbsFloor()])
@pytest.mark.parametrize('similarity', [sj.Sigmoid(), sj.EluPlusOne()])
def test_vanishing_similarities_stay_finite(similarity, normalizer, implementation):
  for bias in (sj.NoBias(), sj.SinkLogit()):
    spec = sj.AttentionSpec(similarity, normalizer, position=sj.Nope(), kv_bias=bias)
    q, k, v, params = random_inputs(spec)
    if params:
      params['kv_bias']['logit'][:] = -200.0
    for scale in (5, 12, 30, 200):
      loss = lambda *x: jnp.sum(sj.attend(spec, *x, implementation=implementation) ** 2)
      value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(
          -scale * np.abs(q), np.abs(k), v, params)
      assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize('normalizer', [sj.RowSum(), sj.PNorm(p=0.25), sj.PNorm(p=4.0), sj.Count()])
def test_rows_without_a_positive_score_are_zero(normalizer):
  spec = sj.AttentionSpec('Relu()', normalizer, position='Nope()')
  q, k, v, _ = random_inputs(spec)
  loss = lambda *x: (lambda out: (jnp.sum(out * v), out))(
      sj.attend(spec, *x, implementation='chunked'))
  (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(
      -np.abs(q), np.abs(k), v)
  assert not any(np.any(x) for x in (out, *grads))  # neither numbers nor nan


@pytest.mark.every(3)
@pytest.mark.parametrize('spec', [
    PAPER['softmax'], PAPER['p-norm softmax 1/2 (Figure 29)'], PAPER['relative (Table 3)'],
    PAPER['normalized sigmoid (Table 15)'], PAPER['p-norm sigmoid 2 (Figure 29)'],
    PAPER['normalized identity (Table 15)']])
def test_row_statistics_are_differentiable(monkeypatch, spec):
  small_blocks(monkeypatch, 4, 2)
  q, k, v, _ = random_inputs(spec, batch=2, length=13, heads=2)
  i = jnp.arange(13)
  rng = np.random.default_rng(2)

  def dense(q, k, v):
    s = scores(spec, q, k, i, i)
    keep = spec.mask.keep(i[:, None], i[None, :])
    power = spec.normalizer.power
    if spec.similarity.kind == 'exponential':
      s = jnp.where(keep, s, -jnp.inf)
      out = jnp.einsum('bhlt,bthd->blhd', jax.nn.softmax(s), v)
      return out, jax.nn.logsumexp(s, -1), jax.nn.logsumexp(power * s, -1)
    f = jnp.where(keep, spec.similarity(s), 0)
    total = (f if power == 1 else f ** power).sum(-1)
    return jnp.einsum('bhlt,bthd->blhd', f, v), total, total

  shapes = jax.eval_shape(dense, q, k, v)
  cotangents = [rng.standard_normal(s.shape) for s in shapes]
  project = lambda outs: sum(jnp.sum(o * c) for o, c in zip(outs, cotangents))
  ours = jax.grad(lambda *x: project(chunked.rows(spec, *x)), argnums=(0, 1, 2))(q, k, v)
  theirs = jax.grad(lambda *x: project(dense(*x)), argnums=(0, 1, 2))(q, k, v)
  assert relative_error(ours, theirs) < 1e-5
