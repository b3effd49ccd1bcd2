"""The decoder: sizes, structure, initialisation, recording."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels import dispatch
from sink_jax.models import attention
from sink_jax.models.config import CHOICES, Layer, Mamba
from sink_jax.models.record import maps, states
from sink_jax.models.sizes import attention_flops, flops_per_token, parameter_shapes
from sink_jax.models.transformer import Transformer, init_params
from tests.random_params import random_params

EVERY = sj.RecordOptions(attention=maps, hidden=states)
TINY = dict(layers=3, d_model=16, heads=4, ffn_hidden=24, vocab_size=11, dtype='float32')


AFTER = dict(
  norm_location='after',
  ffn='tanh_geglu',
  logit_cap=2.0,
  attention=sj.AttentionSpec(position='Nope()', qk_norm='ProjectionQKNorm(eps=0.1)'),
)
PROTECTED = dict(
  norm_location='protected', attention=sj.AttentionSpec(position='Nope()', qk_norm='QKNorm()')
)


def model(**options):
  config = sj.ModelConfig(**TINY | options)
  return config, init_params(config, 0)


def tokens(batch=2, length=9, vocab=11, seed=0):
  return np.random.default_rng(seed).integers(0, vocab, (batch, length))


def logits(config, params, inputs):
  return np.asarray(Transformer(config).apply({'params': params}, inputs))


@pytest.mark.parametrize(
  'size, vocab_size, body, total',
  [
    # the paper's
    ('60m', 50432, 58_998_528, 136_462_080),
    ('1b', 50432, 1_130_457_088, 1_337_026_560),
    # LLaMA 2
    ('7b', 32000, 6_476_271_616, 6_738_415_616),
    ('13b', 32000, 12_688_184_320, 13_015_864_320),
  ],
)
def test_parameter_counts(size, vocab_size, body, total):
  config = sj.sized(size, vocab_size=vocab_size)
  assert (sj.parameter_count(config, embeddings=False), sj.parameter_count(config)) == (body, total)


@pytest.mark.parametrize(
  'options, extra',
  [
    (dict(attention=sj.AttentionSpec(kv_bias=sj.KBias())), 3 * 4 * 4),
    (dict(attention=sj.AttentionSpec(kv_bias=sj.KBias(shared=True, learnable_dims=2))), 3 * 2),
    (dict(attention=sj.AttentionSpec(kv_bias=sj.KVBias())), 3 * 2 * 4 * 4),
    (dict(attention=sj.AttentionSpec(feature_map=sj.Mlp())), 3 * 2 * 4 * 4),
    (dict(attention=sj.AttentionSpec(position=sj.Learned(max_length=9))), 9 * 16),
    (dict(attention=sj.AttentionSpec(head=sj.HeadGate())), 3 * 16 * 4),
    (dict(attention=sj.AttentionSpec(head=sj.HeadGate(source='slice', opening=0.25))), 3 * 4 * 5),
    (dict(attention=sj.AttentionSpec(head=sj.ElementGate())), 3 * 16 * 16),
    (
      dict(attention=sj.AttentionSpec(head=sj.ElementGate(source='value')), kv_heads=2),
      3 * (8 * 16 - 2 * 16 * 8),
    ),
    (dict(attention=sj.AttentionSpec(head=sj.HeadNorm())), 3 * 4),
    (dict(sink_tokens=1), 16),
    (dict(sink_tokens=3), 3 * 16),
    (dict(combine_heads='add'), -3 * (16 - 4) * 16),
    (dict(kv_heads=2), -3 * 2 * 16 * 8),
    (dict(ffn='relu'), -3 * 16 * 24),
    (dict(ffn='none'), -3 * 3 * 16 * 24),
    (dict(norm_location='post'), -16),
    (dict(norm_location='sandwich'), 3 * 2 * 16),
    (AFTER, 3 * 2 * 16),
    (AFTER | dict(kv_heads=2), 3 * (16 + 8) - 3 * 2 * 16 * 8),
    (PROTECTED, -3 * 2 * 16 + 3 * 2 * 4),
    (dict(linear='sigma_reparam'), 3 * (7 + 6 * 16 + 24)),
    (dict(norm='layernorm'), 7 * 16),
    (dict(norm='single'), -7 * (16 - 1)),
    (dict(norm='dyt'), 7 * (16 + 1)),
  ],
)
def test_what_options_add_to_the_parameters(options, extra):
  count = lambda **o: sj.parameter_count(sj.ModelConfig(**TINY | o))
  assert count(**options) - count() == extra


def test_flops_are_those_of_the_matrices_and_the_visible_keys():
  # 681 and 7,957 MFLOP per token: 3 x (2 x matrices + attention at half of 2048 keys).
  config = sj.sized('60m', vocab_size=50432)
  matrices = 10 * (4 * 768**2 + 3 * 768 * 1536) + 768 * 50432
  expected = 3 * (2 * matrices + 4 * 10 * 768 * 2049 / 2)
  assert math.isclose(flops_per_token(config, 2048), expected, rel_tol=1e-12)
  window = dataclasses.replace(config, attention=sj.AttentionSpec(mask=sj.Window(size=1)))
  assert math.isclose(flops_per_token(window, 2048), 3 * (2 * matrices + 4 * 10 * 768))


@pytest.mark.parametrize(
  'options, matrices, head_keys',
  [
    # A tied unembedding multiplies as much as an untied one, and a narrow table multiplies in two
    # steps.
    (dict(tied=True), 0, 3 * 4 * 4.5),
    (dict(tied=True, embedding_dim=8), 2 * 8 * 16 + 11 * (8 - 16), 3 * 4 * 4.5),
    # Wide heads, as in gpt-oss and Qwen3: 4 heads of 8 dimensions in a model of width 16.
    (dict(head_dim=8), 3 * 4 * 16 * 16, 3 * 8 * 4.5),
    # Three blocks: one with the window of a single key, one with full attention, and one without
    # attention.
    (
      dict(pattern=(Layer(mask=sj.Window(size=1)), Layer(), Layer(mamba=Mamba(32, 4, 3, 2)))),
      -4 * 16 * 16 + 16 * 64 + 3 * 32 + 32 * 10 + 2 * 32 + 32 * 16,
      4 * 4.5 + 4,
    ),
    # Each of the four heads computes its four gates from the values of both key heads.
    (
      dict(attention=sj.AttentionSpec(head=sj.ElementGate(source='value')), kv_heads=2),
      3 * (16 * 8 - 2 * 16 * 8),
      3 * 4 * 4.5,
    ),
  ],
  ids=['tied', 'narrow table', 'wide heads', 'pattern', 'gates'],
)
def test_flops_count_what_each_block_multiplies(options, matrices, head_keys):
  config, plain = sj.ModelConfig(**TINY | options), sj.ModelConfig(**TINY)
  attention = 4 * 4 * head_keys  # 8 queries see 4.5 keys on average
  assert math.isclose(attention_flops(config, 8), attention)
  shared = flops_per_token(plain, 8) - 3 * attention_flops(plain, 8)
  assert math.isclose(flops_per_token(config, 8), shared + 3 * (2 * matrices + attention))


def numpy_model(config, params, inputs, before_norm=None):
  """The same decoder in NumPy float64: softmax attention without positions, one layer at a time."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def rms(x, eps=1e-5, axis=-1):
    return x / np.sqrt((x**2).mean(axis, keepdims=True) + eps)

  def ln(x, own):
    if config.norm == 'none':
      return x
    if config.norm == 'dyt':
      return np.tanh(own['alpha'] * x) * own['gain'] + own['bias']
    if config.norm == 'layernorm':
      x = x - x.mean(-1, keepdims=True)
    return rms(x) * own['gain'] + own.get('bias', 0)

  erf = np.vectorize(math.erf)
  act = {
    'relu': lambda x: np.maximum(x, 0),
    'gelu': lambda x: x * (1 + erf(x / 2**0.5)) / 2,
    'swish': lambda x: x / (1 + np.exp(-x)),
    'gelu_tanh': lambda x: x / 2 * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
  }
  act |= {
    'reglu': act['relu'],
    'geglu': act['gelu'],
    'swiglu': act['swish'],
    'tanh_geglu': act['gelu_tanh'],
  }

  def linear(x, own):
    kernel = own['kernel']
    if 'gamma' in own:
      kernel = own['gamma'] / np.linalg.norm(kernel, 2) * kernel
    return x @ kernel + own.get('bias', 0)

  def ffn(x, own):
    if config.ffn == 'none':
      return 0 * x
    h = linear(x, own['w1'])
    if config.ffn == 'clamped_swiglu':
      h = np.minimum(h, 7)
      h = h / (1 + np.exp(-1.702 * h)) * (np.clip(linear(x, own['w2']), -7, 7) + 1)
      return linear(h, own['w_out'])
    h = act[config.ffn](3**0.5 * h if config.norm_location == 'protected' else h)
    if config.ffn.endswith('glu'):
      h = h * linear(x, own['w2'])
    return linear(h, own['w_out'])

  def attention(x, own):
    q, k, v = (
      np.stack(np.split(linear(x, own[n]), config.heads, -1)) for n in ('query', 'key', 'value')
    )
    gains = [own.get(f'qk_norm_{name}_gain') for name in ('query', 'key')]
    if config.attention.qk_norm == sj.QKNorm():
      q, k = (rms(x, 1e-6) * gain for x, gain in zip((q, k), gains))
    # (H, B, T, Dh), one mean over all heads
    if isinstance(config.attention.qk_norm, sj.ProjectionQKNorm):
      q, k = (
        rms(x, config.attention.qk_norm.eps, (0, -1)) * gain[:, None, None]
        for x, gain in zip((q, k), gains)
      )
    s = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    s = np.where(np.tril(np.ones(s.shape[-2:])), s, -np.inf)
    a = np.exp(s - s.max(-1, keepdims=True))
    o = a / a.sum(-1, keepdims=True) @ v  # (H, B, T, Dh)
    if 'head_kernel' in own:
      o = o / (1 + np.exp(-np.stack(np.split(x @ own['head_kernel'], config.heads, -1))))
    o = o.sum(0) if config.combine_heads == 'add' else np.concatenate(o, -1)
    return linear(o, own['out'])

  h = p['embed'][inputs]
  if config.embedding_dim:
    h = linear(h, p['embed_in'])
  for layer in range(config.layers):
    own = jax.tree.map(lambda x: x[layer], p['blocks'])
    n1, n2 = own.get('norm1'), own.get('norm2')
    if config.norm_location == 'pre':  # Eq. 2
      x = attention(ln(h, n1), own['attention']) + h
      h = ffn(ln(h if config.parallel_residual else x, n2), own.get('ffn')) + x
    elif config.norm_location == 'sandwich':
      x = ln(attention(ln(h, n1), own['attention']), own['norm1_after']) + h
      h = ln(ffn(ln(x, n2), own.get('ffn')), own['norm2_after']) + x
    elif config.norm_location == 'after':  # 2501.00656, Eq. 1 and 2
      x = ln(attention(h, own['attention']), own['norm1_after']) + h
      h = ln(ffn(x, own.get('ffn')), own['norm2_after']) + x
    # 2405.19279; beta^2 times the number of sub-layers is 1
    elif config.norm_location == 'protected':
      x = h + attention(h, own['attention']) / math.sqrt(2 * config.layers)
      h = x + ffn(x, own.get('ffn')) / math.sqrt(2 * config.layers)
    else:  # Eq. 3
      x = ln(attention(h, own['attention']) + h, n1)
      h = ffn(x, own.get('ffn')) + x
      if before_norm is not None:
        before_norm.append(h)
      h = ln(h, n2)
  if config.norm_location != 'post':
    h = ln(h, p.get('final_norm'))
  if config.embedding_dim:
    h = linear(h, p['embed_out'])
  logits = h @ p['embed'].T if config.tied else linear(h, p['unembed'])
  return config.logit_cap * np.tanh(logits / config.logit_cap) if config.logit_cap else logits


@pytest.mark.every(8)
@pytest.mark.parametrize(
  'options',
  [
    *(dict(ffn=kind) for kind in CHOICES['ffn']),
    dict(biases=('qkv', 'out', 'ffn', 'unembed')),
    dict(parallel_residual=True),
    dict(tied=True),
    dict(embedding_dim=6),
    dict(head_dim=6),
    dict(tied=True, embedding_dim=6),
    dict(norm_location='post'),
    dict(norm='layernorm'),
    dict(norm='none'),
    dict(norm='single'),
    dict(norm='dyt'),
    dict(combine_heads='add', head='ElementGate()'),
    dict(heads=1),
    dict(remat='blocks', head='HeadGate()'),
    dict(implementation='reference'),
    dict(norm_location='post', norm='layernorm', ffn='gelu'),
    dict(norm_location='sandwich'),
    dict(norm_location='sandwich', norm='dyt', ffn='none'),
    AFTER,
    PROTECTED,
    PROTECTED | dict(norm='layernorm', ffn='relu'),
    dict(linear='sigma_reparam', biases=('qkv', 'out', 'ffn')),
    dict(linear='sigma_reparam', norm='none', ffn='gelu', combine_heads='add'),
  ],
  ids=str,
)
def test_the_decoder_is_equations_2_to_4(options):
  options = dict(options)
  spec = sj.AttentionSpec(position=sj.Nope(), head=options.pop('head', 'PlainOutput()'))
  # Parameters are drawn. Initial gains of one and biases of zero would be correct for any norm.
  config = sj.ModelConfig(**TINY | dict(attention=spec) | options)
  params, inputs = random_params(config), tokens()
  expected = numpy_model(config, params, inputs)
  np.testing.assert_allclose(
    logits(config, params, inputs), expected, atol=1e-5 * np.abs(expected).max()
  )


def test_what_the_backward_pass_recomputes(monkeypatch):
  """Counts matrix products and attention kernels in a training step for TPUs."""
  inputs = jax.ShapeDtypeStruct((2, 128), jnp.int32)

  def counts(**options):
    config = sj.ModelConfig(**TINY | dict(d_model=32, implementation='pallas') | options)
    loss = lambda params, x: Transformer(config).apply({'params': params}, x).sum()
    text = (
      jax.jit(jax.grad(loss))
      .trace(parameter_shapes(config), inputs)
      .lower(lowering_platforms=('tpu',))
      .as_text()
    )
    return text.count('stablehlo.dot_general'), text.count('custom_call @tpu_custom_call')

  (products, kernels), *others = (
    counts(remat=remat) for remat in ('none', 'save_matmuls', 'save_attention', 'blocks')
  )
  assert kernels == 3  # forward, dq, dk with dv
  # The block's seven products are recomputed, except for the last, which no gradient needs.
  assert others == [(products, 3), (products + 6, 3), (products + 6, 4)]
  # A norm after the network reads the block's last product, so that product is kept.
  for after in ('sandwich', 'after', 'post'):
    assert counts(remat='save_matmuls', norm_location=after) == (products, 3)
  gated = dict(attention=sj.AttentionSpec(head='ElementGate()'))
  products, _ = counts(remat='none', **gated)
  assert counts(remat='save_matmuls', **gated) == (products, 3)  # the gate's product is kept
  with pytest.raises(ValueError, match="remat = 'all'; choices: none, save_matmuls, save_att"):
    counts(remat='all')
  monkeypatch.setattr(dispatch, 'platform', lambda: 'tpu')
  for kv_bias in ('NoBias()', 'SinkLogit()'):  # forward and one backward kernel
    splash = dict(implementation='splash', heads=2, attention=sj.AttentionSpec(kv_bias=kv_bias))
    assert [counts(remat=remat, **splash)[1] for remat in ('save_attention', 'blocks')] == [2, 3]


def test_initialisations():
  big = dict(layers=2, d_model=256, heads=4, ffn_hidden=512, vocab_size=500)
  std = lambda x: float(jnp.std(x))
  p = init_params(sj.ModelConfig(**big, init='torch_default'), 0)
  assert abs(std(p['embed']) - 1) < 0.02
  assert abs(float(jnp.abs(p['blocks']['ffn']['w1']['kernel']).max()) - 1 / 16) < 1e-3
  assert abs(std(p['blocks']['ffn']['w_out']['kernel']) * math.sqrt(3 * 512) - 1) < 0.02
  p = init_params(sj.ModelConfig(**big, init='tinyllama'), 0)
  assert abs(std(p['embed']) / math.sqrt(2 / (5 * 256)) - 1) < 0.02
  assert abs(std(p['blocks']['attention']['out']['kernel']) / math.sqrt(2 / (5 * 256)) - 1) < 0.02
  assert abs(std(p['blocks']['ffn']['w_out']['kernel']) * math.sqrt(512) * 2 - 1) < 0.02
  p = init_params(sj.ModelConfig(**big, init='tinyllama', ffn='geglu'), 0)  # no depth scaling
  assert abs(std(p['blocks']['ffn']['w_out']['kernel']) / math.sqrt(2 / (5 * 512)) - 1) < 0.02
  p = init_params(
    sj.ModelConfig(**big, norm='dyt', attention=sj.AttentionSpec(kv_bias=sj.KBias())), 0
  )
  assert {float(x) for x in (*p['blocks']['norm1']['alpha'], p['final_norm']['alpha'])} == {0.5}
  assert abs(std(p['blocks']['attention']['kv_bias_key']) / 0.02 - 1) < 0.1


def test_layers_start_different_and_seeds_matter():
  config, params = model()
  kernel = params['blocks']['ffn']['w1']['kernel']
  again, other = (init_params(config, n) for n in (0, 1))
  assert not np.allclose(kernel[0], kernel[1]) and not np.allclose(params['embed'], other['embed'])
  np.testing.assert_array_equal(params['embed'], again['embed'])


SHOWN = [
  dict(),
  dict(norm_location='post'),
  dict(norm_location='sandwich'),
  PROTECTED,
  dict(sink_tokens=1),
  dict(kv_heads=2),
  dict(attention=sj.AttentionSpec(kv_bias=sj.KBias())),
  dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()')),
  dict(sink_tokens=3, attention=sj.AttentionSpec(mask=sj.Prefix(length=5))),
]


@pytest.mark.every(3)
@pytest.mark.parametrize('options', SHOWN, ids=str)
def test_a_record_shows_the_forward_pass_it_belongs_to(options):
  config, params = model(**options)
  inputs = tokens()
  hidden, record, _ = Transformer(config).apply({'params': params}, inputs, EVERY, method='hidden')
  shown = Transformer(config).apply({'params': params}, hidden, method='logits')
  np.testing.assert_array_equal(shown, logits(config, params, inputs))
  layers = record.layers
  # The maps give the importances, and the hidden states give the norms.
  np.testing.assert_allclose(
    sj.importance(np.asarray(layers.attention.weights_BxHxTxT), raw=True),
    layers.importance.raw,
    rtol=1e-5,
    atol=1e-6,
  )
  np.testing.assert_allclose(
    sj.importance(np.asarray(layers.attention.proxy_BxHxTxT)),
    layers.importance.normalized,
    rtol=1e-5,
    atol=1e-6,
  )
  if config.sink_tokens or config.attention.kv_bias.has_extra_key:
    np.testing.assert_allclose(
      1 - np.asarray(layers.attention.proxy_BxHxTxT).sum(-1).mean(-1),
      layers.importance.extra_key,
      rtol=1e-4,
    )
  np.testing.assert_allclose(
    np.linalg.norm(layers.hidden, axis=-1), layers.hidden_norm_BxT, rtol=1e-5
  )
  assert layers.importance.raw.shape == (3, 2, 4, 9)
  assert layers.key_norm_BxHxT.shape == (3, 2, config.dims.kv_heads, 9)
  np.testing.assert_allclose(
    record.embedding_norm_BxT, np.linalg.norm(params['embed'][inputs], axis=-1), rtol=1e-5
  )
  # The last hidden state gives the logits.
  h = np.asarray(layers.hidden[-1], np.float64)
  if config.norm_location != 'post':
    h = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(h @ params['unembed']['kernel'], shown, rtol=1e-4, atol=1e-5)
  if config.norm_location != 'post':
    np.testing.assert_array_equal(layers.hidden_before_norm_BxT, layers.hidden_norm_BxT)


def test_what_enters_the_last_norm_of_a_post_norm_block_is_recorded():
  config, params = model(norm_location='post', attention=sj.AttentionSpec(position=sj.Nope()))
  before = []
  numpy_model(config, params, tokens(), before)
  record = sj.Run(config, params).record(tokens())
  np.testing.assert_allclose(
    record.layers.hidden_before_norm_BxT, np.linalg.norm(before, axis=-1), rtol=1e-5
  )


@pytest.mark.every(2)
@pytest.mark.parametrize('n', [1, 3])
def test_sink_tokens_are_the_first_keys_of_all(n):
  config, params = model(sink_tokens=n, attention=sj.AttentionSpec(position=sj.Nope()))
  inputs = tokens()
  # Equivalent: a vocabulary with n more entries, which come before every sequence.
  longer = dataclasses.replace(config, sink_tokens=0, vocab_size=11 + n)
  table = np.concatenate([params['embed'], params['sink_tokens']])
  same = {k: v for k, v in params.items() if k != 'sink_tokens'} | {'embed': table}
  with_tokens = np.concatenate([np.broadcast_to(11 + np.arange(n), (2, n)), inputs], 1)
  kernel = np.pad(params['unembed']['kernel'], ((0, 0), (0, n)))
  same['unembed'] = {'kernel': kernel}
  full, record = logits(longer, same, with_tokens), sj.Run(longer, same).record(with_tokens, EVERY)
  np.testing.assert_allclose(full[:, n:, :11], logits(config, params, inputs), rtol=1e-5, atol=1e-6)
  ours = sj.Run(config, params).record(inputs).layers.importance
  theirs = record.layers.importance.normalized
  whole = np.asarray(record.layers.attention.weights_BxHxTxT)
  np.testing.assert_allclose(ours.extra_key_released, whole[..., :n].sum(-1).mean(-1), rtol=1e-5)
  maps = sj.Run(config, params).record(inputs, EVERY).layers.attention.weights_BxHxTxT
  np.testing.assert_allclose(ours.extra_key, 1 - maps.sum(-1).mean(-1), rtol=1e-4)
  np.testing.assert_allclose(ours.normalized, theirs[..., n:], rtol=1e-4, atol=1e-6)


def test_bfloat16_activations_float32_parameters_and_logits():
  config, params = model(dtype='bfloat16')
  out = Transformer(config).apply({'params': params}, tokens())
  assert out.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  exact = logits(dataclasses.replace(config, dtype='float32'), params, tokens())
  # A dozen roundings of 2^-9 occur in three blocks.
  assert 0 < np.abs(out - exact).max() < 0.05 * np.abs(exact).max()


HYBRID = dict(layers=2, pattern=(Layer(), Layer(mamba=Mamba(8, 2, 2, 2))))


@pytest.mark.parametrize(
  'options, words',
  [
    (dict(ffn='swigloo'), 'model.ffn.*swiglu'),
    (dict(heads=3), 'must divide model.d_model'),
    (dict(kv_heads=3), 'must divide model.heads'),
    (dict(layers=0), 'at least 1'),
    (dict(implementation='flash'), 'chunked'),
    (dict(unroll=True), 'unroll = True must be int'),
    (dict(sink_tokens=-1), 'sink_tokens must be at least 0'),
    (dict(vocab_size=0), 'vocab_size'),
    (dict(norm_location='sandwich', parallel_residual=True), "norm_location = 'pre'"),
    (dict(logit_cap=-30.0), 'model.logit_cap = -30.0 must be'),
    (dict(norm_eps=-1.0), 'norm_eps'),
    (dict(logit_cap=30.0, vocab_size=0, input_features=2, output_features=2), 'need a vocabulary'),
    (dict(norm_location='protected'), r"qk_norm = 'QKNorm\(\)'"),
    (PROTECTED | dict(init='tinyllama'), 'torch_default'),
    (dict(tied=True, biases=('unembed',)), 'unembed'),
    (dict(biases=('x',)), 'choices: qkv'),
    (PROTECTED | HYBRID, 'without Mamba'),
    (dict(linear='sigma_reparam') | HYBRID, 'without Mamba'),
    (dict(layers=3, pattern=(Layer(), Layer())), 'a multiple of the 2 blocks'),
    (dict(layers=1, pattern=(Layer(mamba=Mamba(8, 2, 2, 2)),)), 'no block with attention'),
    (dict(layers=2, pattern=(Layer(position=sj.Alibi()), Layer())), 'blocks differ in rotary'),
    (dict(sink_tokens=1, attention=sj.AttentionSpec(kv_bias=sj.KBias())), 'choose one'),
    (
      dict(sink_tokens=4, attention=sj.AttentionSpec(mask=sj.Prefix(length=3))),
      'which is shorter: give Prefix.length=4',
    ),
    (dict(attention=sj.AttentionSpec(value='ValueResidual()'), layers=1), 'two layers or more'),
    (dict(attention=sj.AttentionSpec(kv_bias=sj.KBias(learnable_dims=9))), 'exceeds'),
  ],
)
def test_bad_options_are_explained(options, words):
  with pytest.raises(ValueError, match=words):
    sj.ModelConfig(**TINY | options)


def test_the_implementation_is_that_of_every_block(monkeypatch):
  config = sj.ModelConfig(**TINY | dict(layers=4, pattern=(Layer(), Layer(mask=sj.Window(size=4)))))
  monkeypatch.setattr(
    attention, 'choose', lambda spec, q, k: 'splash' if spec.mask == sj.Causal() else 'chunked'
  )
  monkeypatch.setattr(
    attention,
    'unsupported',
    lambda name, spec, q, k: (
      'no windows' if name == 'splash' and spec.mask != sj.Causal() else None
    ),
  )
  assert attention.training_implementation(config, 8) == 'splash, chunked'
  with pytest.raises(ValueError, match="model.implementation = 'splash'.*no windows"):
    attention.training_implementation(dataclasses.replace(config, implementation='splash'), 8)


def test_runs_are_compared_and_hashed_by_identity():
  runs = [sj.Run(*model()) for _ in range(2)]
  assert runs[0] == runs[0] != runs[1] and len({*runs}) == 2


TWO = dict(layers=4, pattern=(Layer(), Layer(mask=sj.Window(size=2))))


def assert_close(ours, theirs):
  """Equal within 1e-5 of the largest number of each array, in the same tree."""
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def loss_and_gradients(config, params):
  apply = Transformer(config).apply
  return jax.jit(
    jax.value_and_grad(
      lambda p: jnp.mean(jax.nn.logsumexp(apply({'params': p}, tokens()), -1) ** 2)
    )
  )(params)


@pytest.mark.every(2)
@pytest.mark.parametrize(
  'options, unroll',
  [
    pytest.param({}, 2, marks=pytest.mark.full),
    (
      dict(
        sink_tokens=1,
        norm='dyt',
        linear='sigma_reparam',
        attention=sj.AttentionSpec(value='ValueResidual()'),
      ),
      99,
    ),
    (TWO | dict(norm_location='sandwich', norm='single'), 4),
  ],
  ids=str,
)
def test_loss_and_gradients_are_those_of_the_loop(options, unroll):
  config = sj.ModelConfig(**TINY | options)
  laid_out = dataclasses.replace(config, unroll=unroll)
  params = init_params(laid_out, 0)
  jax.tree.map(np.testing.assert_array_equal, params, init_params(config, 0))
  assert_close(loss_and_gradients(laid_out, params), loss_and_gradients(config, params))
  assert_close(*(sj.Run(config, params).record(tokens(), EVERY) for config in (laid_out, config)))


@pytest.mark.parametrize(
  'options, loops',
  [
    ({}, 2),
    (dict(unroll=3), 0),
    (dict(unroll=3, remat='blocks'), 2),
    (TWO | dict(unroll=4), 0),
    (TWO | dict(unroll=3), 2),
  ],
  ids=str,
)
def test_loops_over_blocks_that_remain(options, loops):
  """One forward and one backward loop; none if one iteration has all blocks, without a remat."""
  config = sj.ModelConfig(**TINY | options, implementation='reference')  # without loops inside
  loss = lambda params: Transformer(config).apply({'params': params}, tokens()).sum()
  text = jax.jit(jax.grad(loss)).lower(parameter_shapes(config)).as_text()
  assert text.count('stablehlo.while') == loops
