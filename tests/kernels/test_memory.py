"""Memory of compiled attention: linear in the length of the sequence."""

import jax
import jax.numpy as jnp
import pytest

import sink_jax as sj

SPECS = [
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


@pytest.mark.parametrize('spec', SPECS)
def test_training_needs_memory_linear_in_the_length(spec):
  def grow(implementation):
    loss = lambda q, k, v, p: sj.attend(spec, q, k, v, p, implementation=implementation).sum()
    sizes = []
    for length in (2048, 8192):
      q, params = inputs(spec, length)
      sizes.append(temporary_bytes(jax.grad(loss, (0, 1, 2, 3)), q, q, q, params))
    return sizes[1] / sizes[0]

  assert grow('chunked') < 4.5
  assert grow('reference') > 10  # the comparison can tell


def test_grouped_keys_are_not_repeated():
  q, _ = inputs(sj.AttentionSpec(), 4096, heads=16)
  size = lambda kv: temporary_bytes(lambda *x: sj.attend(sj.AttentionSpec(), *x, implementation='chunked'),
                                    q, *inputs(sj.AttentionSpec(), 4096, heads=kv)[:1] * 2)
  assert size(1) < size(16)  # repeated, these keys would take what those of 16 heads take


@pytest.mark.parametrize('spec', SPECS)
def test_importance_of_131072_tokens_needs_little_memory(spec):
  length = 131072
  q, params = inputs(spec, length)
  size = temporary_bytes(lambda q, k, p: sj.streaming_importance(spec, q, k, p), q, q, params)
  assert size < 512 * 2**20  # a float32 map would take 64 GiB
  short = temporary_bytes(lambda q, k, p: sj.streaming_importance(spec, q, k, p),
                          *inputs(spec, length // 4)[:1] * 2, params)
  assert size / short < 4.5


def test_long_sequences_agree_with_the_definition():
  length = 5000
  q, k = jax.random.normal(jax.random.key(0), (2, 1, length, 1, 16))
  alpha = sj.streaming_importance(sj.AttentionSpec(position=sj.Nope()), q, k)
  s = jnp.einsum('ld,td->lt', q[0, :, 0], k[0, :, 0], precision='highest') / 4
  map_LxT = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), s, -jnp.inf))
  expected = map_LxT.sum(0) / (length - jnp.arange(length))
  assert jnp.abs(alpha.raw[0, 0] - expected).max() < 1e-6
