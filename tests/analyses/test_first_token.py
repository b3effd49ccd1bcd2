"""The first token is a chain of MLPs, no other token in it (Section 3.1)."""

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses.first_token import first_token_chain
from sink_jax.models.layers import Norm
from tests.random_params import random_params

TINY = dict(layers=3, d_model=16, heads=4, ffn_hidden=24, vocab_size=11, dtype='float32')
SIGMOID = sj.AttentionSpec('Sigmoid()', 'Unnormalized()')


def model(**options):
  config = sj.ModelConfig(**TINY | options)
  return config, random_params(config)


def tokens(seed=0):
  return np.random.default_rng(seed).integers(0, 11, (2, 9))


def first_states(config, params, inputs):
  """(N, B, D) of the first token, by the model."""
  return np.asarray(sj.Run(config, params).record(
      inputs, sj.RecordOptions(hidden=True)).layers.hidden_BxTxD[:, :, 0], np.float64)


def numpy_chain(params, first_token):
  """The default model's chain: RMSNorm, values, SwiGLU; neither queries nor keys."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  ln = lambda x, own: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * own['gain']
  h, states = p['embed'][first_token], []
  for layer in range(3):
    own = jax.tree.map(lambda x: x[layer], p['blocks'])
    weight = lambda room, name: own[room][name]['kernel']
    h = h + ln(h, own['norm1']) @ weight('attention', 'value') @ weight('attention', 'out')
    x = ln(h, own['norm2'])
    gate = x @ weight('ffn', 'w1')
    h = h + (gate / (1 + np.exp(-gate)) * (x @ weight('ffn', 'w2'))) @ weight('ffn', 'w_out')
    states.append(h)
  return np.stack(states)


def relative_difference(a, b):
  return np.linalg.norm(a - b, axis=-1).max() / np.linalg.norm(b, axis=-1).min()


def test_the_default_model_by_hand():
  config, params = model()
  inputs = tokens()
  expected = numpy_chain(params, inputs[:, 0])
  assert relative_difference(first_states(config, params, inputs), expected) < 1e-6
  assert relative_difference(first_token_chain(config, params, inputs), expected) < 1e-6


def test_unnormalised_sigmoid_is_no_such_chain():
  # Its first token weighs its own value by sigmoid(q k), so queries and keys take part.
  config, params = model(attention=SIGMOID)
  states = first_states(config, params, tokens())
  assert relative_difference(states, numpy_chain(params, tokens()[:, 0])) > 0.1
  params['blocks']['attention']['query']['kernel'] *= 3.0
  assert relative_difference(first_states(config, params, tokens()), states) > 0.01


@pytest.mark.parametrize('mask, depends', [
    ('Causal()', False), ('Window(size=4)', False), ('Prefix(length=3)', True)])
def test_no_other_token_takes_part_unless_it_is_seen(mask, depends):
  config, params = model(attention=sj.AttentionSpec(mask=mask))
  a, b = tokens(seed=0), tokens(seed=1)
  b[:, 0] = a[:, 0]
  assert np.array_equal(first_states(config, params, a), first_states(config, params, b)) != depends


@pytest.mark.every(4)
@pytest.mark.parametrize('options', [
    dict(ffn='relu', norm='layernorm'), dict(ffn='gelu', norm='none'),
    dict(norm='single', norm_location='post'),
    dict(norm_location='sandwich', linear='sigma_reparam'),
    dict(norm_location='protected', attention=sj.AttentionSpec(qk_norm='QKNorm()')),
    dict(norm_location='after', ffn='tanh_geglu'),
    dict(ffn='relu', norm='dyt'),
    dict(ffn='swish', norm_location='post', combine_heads='add', kv_heads=2,
         attention=sj.AttentionSpec(head="ElementGate(source='value')")),
    dict(ffn='reglu', norm_location='post', norm='layernorm', heads=1),
    dict(ffn='geglu', kv_heads=2, attention=sj.AttentionSpec(position='Learned(max_length=9)')),
    dict(ffn='none', attention=sj.AttentionSpec(position='Sinusoidal()', qk_norm='QKNorm()')),
    dict(attention=sj.AttentionSpec(
        'Sigmoid()', 'RowSum()', mask='Window(size=2)', head="HeadGate(source='slice')")),
    dict(kv_heads=2, attention=sj.AttentionSpec(temperature='LogLength()', value='ValueScale()')),
    dict(kv_heads=2, attention=sj.AttentionSpec(value='ValueResidual()')),
    dict(norm_location='post', attention=sj.AttentionSpec(
        value='ValueResidual(own=0.0, first=1.0, learned=False)')),
    dict(attention=sj.AttentionSpec('Linear()', 'RowSum()', 'EluPlusOne()', head='HeadNorm()')),
    dict(biases=('qkv', 'out', 'ffn'), parallel_residual=True, head_dim=6),
    dict(vocab_size=0, input_features=5, output_features=2)], ids=str)
def test_the_chain_of_every_architecture(options):
  config, params = model(**options)
  inputs = tokens()
  if config.input_features:
    inputs = np.random.default_rng(0).standard_normal((2, 9, 5)).astype(np.float32)
  h = first_token_chain(config, params, inputs)[-1]
  if config.norm_location != 'post':
    h = Norm(config).apply({'params': params.get('final_norm', {})}, h)
  logits = sj.Run(config, params).logits(inputs)[:, 0]
  assert relative_difference(h @ params['unembed']['kernel'], logits) < 1e-6
