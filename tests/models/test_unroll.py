"""Blocks that are compiled one after another compute what the loop over them computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.config import Layer
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import Transformer, init_params

TINY = dict(layers=3, d_model=16, heads=2, ffn_hidden=24, vocab_size=11, dtype='float32')
TWO = dict(layers=4, pattern=(Layer(), Layer(mask=sj.Window(size=2))))
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 9))


def assert_close(ours, theirs):
  """Equal to 1e-5 of the largest number of each array, in the same tree."""
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def loss_and_gradients(config, params):
  apply = Transformer(config).apply
  return jax.jit(jax.value_and_grad(
      lambda p: jnp.mean(jax.nn.logsumexp(apply({'params': p}, TOKENS), -1) ** 2)))(params)


@pytest.mark.every(2)
@pytest.mark.parametrize('options, unroll', [
    pytest.param({}, 2, marks=pytest.mark.full),
    (dict(sink_tokens=1, norm='dyt', linear='sigma_reparam',
          attention=sj.AttentionSpec(value='ValueResidual()')), 99),
    (TWO | dict(norm_location='sandwich', norm='single'), 4)], ids=str)
def test_loss_and_gradients_are_those_of_the_loop(options, unroll):
  config = sj.ModelConfig(**TINY | options)
  laid_out = dataclasses.replace(config, unroll=unroll)
  params = init_params(laid_out, 0)
  jax.tree.map(np.testing.assert_array_equal, params, init_params(config, 0))
  assert_close(loss_and_gradients(laid_out, params), loss_and_gradients(config, params))


def test_records_and_generated_texts_are_those_of_the_loop():
  config = sj.ModelConfig(**TINY | dict(layers=2, sink_tokens=1))
  params = init_params(config, 0)
  runs = [sj.Run(dataclasses.replace(config, unroll=n), params) for n in (config.layers, 1)]
  assert_close(*(run.record(TOKENS, sj.RecordOptions(maps=True, hidden=True)) for run in runs))
  np.testing.assert_array_equal(*(run.generate(TOKENS, 5) for run in runs))


@pytest.mark.parametrize('options, loops', [
    ({}, 2), (dict(unroll=3), 0), (dict(unroll=3, remat='blocks'), 2),
    (TWO | dict(unroll=4), 0), (TWO | dict(unroll=3), 2)], ids=str)
def test_loops_over_blocks_that_remain(options, loops):
  """Forward and backward; none where one turn has them all. With remat it is kept."""
  config = sj.ModelConfig(**TINY | options, implementation='reference')  # no loops of its own
  loss = lambda params: Transformer(config).apply({'params': params}, TOKENS).sum()
  text = jax.jit(jax.grad(loss)).lower(parameter_shapes(config)).as_text()
  assert text.count('stablehlo.while') == loops


@pytest.mark.parametrize('unroll, words', [
    (0, 'model.unroll must be at least 1'), (2.0, 'model.unroll = 2.0 must be a whole number'),
    (True, 'model.unroll = True must be a whole number'),
    (2**20, 'model.unroll = 1048576 cannot be')])
def test_bad_numbers_of_blocks_are_explained(unroll, words):
  with pytest.raises(ValueError, match=words):
    sj.ModelConfig(**TINY, unroll=unroll)
