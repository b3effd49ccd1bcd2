"""Models without the bias they were trained with."""

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.config import Layer
from sink_jax.models.removal import learned_bias, without_bias
from sink_jax.models.sizes import parameter_shapes
from tests.random_params import random_params

TINY = dict(layers=2, d_model=16, heads=4, ffn_hidden=24, vocab_size=11, dtype='float32')
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 9))


def run(**options):
  config = sj.ModelConfig(**TINY | options)
  return sj.Run(config, random_params(config), name='biased', step=3)


def biased(kv_bias):
  return dict(attention=sj.AttentionSpec(kv_bias=kv_bias))


@pytest.mark.parametrize('options', [
    biased('KBias()'), biased("KBias(value='first')"), biased('KVBias(shared=True)'),
    biased('VBias()'), biased('SinkLogit()'), dict(sink_tokens=1),
    biased('VBias()') | dict(sink_tokens=1),
    # Blocks that differ, as those of gpt-oss: their parameters lie one level deeper.
    biased('SinkLogit()') | dict(pattern=(Layer(mask=sj.Window(size=4)), Layer()))], ids=str)
def test_the_rest_is_a_model_without_it(options):
  full = run(**options)
  bare = without_bias(full)
  plain = sj.ModelConfig(**TINY, pattern=full.config.pattern)
  assert bare.config == plain and (bare.name, bare.step) == ('biased', 3)
  shapes = jax.tree.map(lambda x: x.shape, bare.params)
  assert shapes == jax.tree.map(lambda x: x.shape, parameter_shapes(plain))
  # What is left is what was there: this is the plain model with the other's parameters.
  theirs = dict(jax.tree_util.tree_leaves_with_path(full.params))
  for path, x in jax.tree_util.tree_leaves_with_path(bare.params):
    assert x is theirs.pop(path)
  assert theirs and all('kv_bias' in str(path) or 'sink_tokens' in str(path) for path in theirs)


def test_a_value_bias_of_zero_can_go():
  full = run(**biased('VBias()'))
  assert np.abs(without_bias(full).logits(TOKENS) - full.logits(TOKENS)).max() > 0.1
  full.params['blocks']['attention']['kv_bias_value'] *= 0
  np.testing.assert_array_equal(without_bias(full).logits(TOKENS), full.logits(TOKENS))


@pytest.mark.parametrize('options', [
    biased('KBias()'), biased('KVBias(shared=True)'), dict(sink_tokens=1)], ids=str)
def test_its_attention_goes_to_the_tokens(options):
  # In the first block, where both models see the same: shares of one without the slot's share.
  full = run(**options)
  first = lambda r: np.asarray(r.record(TOKENS, sj.RecordOptions(maps=True)).layers.maps_BxHxTxT)[0]
  tokens = first(full)
  assert tokens.sum(-1).max() < 1
  np.testing.assert_allclose(first(without_bias(full)), tokens / tokens.sum(-1, keepdims=True),
                             rtol=1e-4, atol=1e-6)


def test_what_is_removed_is_said_in_words():
  said = lambda **options: learned_bias(sj.ModelConfig(**TINY | options))
  assert said() == ''
  assert said(**biased('KVBias()')) == 'the key and value biases k* and v*'
  assert said(sink_tokens=3) == 'the 3 learned sink tokens x*'
  assert said(sink_tokens=1, **biased('VBias()')) == (
      'the learned sink token x* and the value bias v*')


def test_a_model_without_a_bias_is_refused():
  with pytest.raises(ValueError, match='no bias'):
    without_bias(run())
