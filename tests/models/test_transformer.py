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
from sink_jax.models.config import Layer, Mamba
from sink_jax.models.layers import apply
from sink_jax.models.record import maps, states
from sink_jax.models.sizes import attention_flops, flops_per_token, parameter_shapes
from sink_jax.models.transformer import Transformer, init_params
from tests.models.numpy_model import numpy_model
from tests.random_params import random_tokens, tiny, tiny_config

EVERY = sj.RecordOptions(attention=maps, hidden=states)
TOKENS = random_tokens()


def spec(**components):
  return dict(attention=sj.AttentionSpec(**components))


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
  assert sj.parameter_count(config) == total
  assert sj.parameter_count(config, embeddings=False) == body


@pytest.mark.parametrize(
  'options, extra',
  [
    (spec(kv_bias='KBias(shared=True, learnable_dims=2)'), 2 * 2),
    (spec(kv_bias='KVBias()'), 2 * 2 * 4 * 4),
    (spec(feature_map='Mlp()'), 2 * 2 * 4 * 4),
    (spec(position='Learned(max_length=9)'), 9 * 16),
    (spec(head="HeadGate(source='slice', opening=0.25)"), 2 * 4 * 5),
    (dict(sink_tokens=3), 3 * 16),
    (dict(combine_heads='add'), -2 * (16 - 4) * 16),
    (dict(kv_heads=2), -2 * 2 * 16 * 8),
    (dict(ffn='relu'), -2 * 16 * 24),
    (dict(linear='sigma_reparam'), 2 * (7 + 6 * 16 + 24)),
    (dict(norm='dyt'), 5 * (16 + 1)),
  ],
  ids=str,
)
def test_what_options_add_to_the_parameters(options, extra):
  count = lambda **options: sj.parameter_count(tiny_config(**options))
  assert count(**options) - count() == extra


def test_flops_are_those_of_the_matrices_and_the_visible_keys():
  # 681 and 7,957 MFLOP per token: 3 x (2 x matrices + attention at half of 2048 keys).
  config = sj.sized('60m', vocab_size=50432)
  matrices = 10 * (4 * 768**2 + 3 * 768 * 1536) + 768 * 50432
  of_a_key = 4 * 10 * 768
  expected = 3 * (2 * matrices + of_a_key * 2049 / 2)
  assert math.isclose(flops_per_token(config, 2048), expected, rel_tol=1e-12)
  window = dataclasses.replace(config, **spec(mask='Window(size=1)'))
  expected = 3 * (2 * matrices + of_a_key)
  assert math.isclose(flops_per_token(window, 2048), expected)


THREE = (
  Layer(mask=sj.Window(size=1)),
  Layer(),
  Layer(mamba=Mamba(32, 4, 3, 2)),
)


@pytest.mark.parametrize(
  'options, matrices, head_keys',
  [
    # A tied unembedding multiplies as much as an untied one, and a narrow table multiplies in two
    # steps.
    (dict(tied=True), 0, 3 * 4 * 4.5),
    (dict(tied=True, embedding_dim=8), 2 * 8 * 16 + 32 * (8 - 16), 3 * 4 * 4.5),
    # Wide heads, as in gpt-oss and Qwen3: 4 heads of 8 dimensions in a model of width 16.
    (dict(head_dim=8), 3 * 4 * 16 * 16, 3 * 8 * 4.5),
    # Three blocks: one with the window of a single key, one with full attention, and one without
    # attention.
    (
      dict(pattern=THREE),
      -4 * 16 * 16 + 16 * 64 + 3 * 32 + 32 * 10 + 2 * 32 + 32 * 16,
      4 * 4.5 + 4,
    ),
    # Each of the four heads computes its four gates from the values of both key heads.
    (
      spec(head="ElementGate(source='value')") | dict(kv_heads=2),
      3 * (16 * 8 - 2 * 16 * 8),
      3 * 4 * 4.5,
    ),
  ],
  ids=['tied', 'narrow table', 'wide heads', 'pattern', 'gates'],
)
def test_flops_count_what_each_block_multiplies(options, matrices, head_keys):
  config, plain = tiny_config(layers=3, **options), tiny_config(layers=3)
  attention = 4 * 4 * head_keys  # 8 queries see 4.5 keys on average
  assert math.isclose(attention_flops(config, 8), attention)
  shared = flops_per_token(plain, 8) - 3 * attention_flops(plain, 8)
  expected = shared + 3 * (2 * matrices + attention)
  assert math.isclose(flops_per_token(config, 8), expected)


POST_NORM = dict(
  ffn='gelu',
  norm='layernorm',
  norm_location='post',
  remat='blocks',
  head='HeadGate()',
)
PROTECTED = dict(norm_location='protected', qk_norm='QKNorm()')
# Every network, norm and place of the norms; every bias, table and way to combine heads.
DECODERS = [
  dict(
    ffn='relu',
    biases=('qkv', 'out', 'ffn', 'unembed'),
    parallel_residual=True,
  ),
  dict(ffn='geglu', norm='single', tied=True, embedding_dim=6),
  dict(ffn='reglu', norm='layernorm', tied=True, head_dim=6),
  POST_NORM,
  PROTECTED,
  dict(ffn='gelu_tanh', norm_location='sandwich', embedding_dim=6),
  dict(ffn='none', norm_location='sandwich', norm='dyt', heads=1),
  dict(
    ffn='tanh_geglu',
    norm_location='after',
    logit_cap=2.0,
    qk_norm='ProjectionQKNorm(eps=0.1)',
  ),
  dict(
    ffn='clamped_swiglu',
    norm='dyt',
    combine_heads='add',
    head='ElementGate()',
  ),
  dict(
    ffn='swish',
    norm='none',
    linear='sigma_reparam',
    biases=('qkv', 'out', 'ffn'),
  ),
]


def without_positions(head='PlainOutput()', qk_norm='NoQKNorm()', **options):
  # Parameters are drawn. Initial gains of one and biases of zero would be correct for any norm.
  return tiny(**spec(position='Nope()', head=head, qk_norm=qk_norm), **options)


@pytest.mark.parametrize('options', DECODERS, ids=str)
def test_the_decoder_is_equations_2_to_4(options):
  run = without_positions(**options)
  expected = numpy_model(run.config, run.params, TOKENS)
  atol = 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(run.logits(TOKENS), expected, atol=atol)


def test_what_the_backward_pass_recomputes(monkeypatch):
  """Counts matrix products and attention kernels in a training step for TPUs."""
  inputs = jax.ShapeDtypeStruct((2, 128), jnp.int32)

  def counts(**options):
    config = tiny_config(**dict(d_model=32, implementation='pallas') | options)
    loss = lambda params, x: apply(Transformer(config), params, x).sum()
    traced = jax.jit(jax.grad(loss)).trace(parameter_shapes(config), inputs)
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
    products = text.count('stablehlo.dot_general')
    return products, text.count('custom_call @tpu_custom_call')

  products, kernels = counts(remat='none')
  assert kernels == 3  # forward, dq, dk with dv
  assert counts(remat='save_matmuls') == (products, 3)
  # The block's seven products are recomputed, except for the last, which no gradient needs.
  assert counts(remat='save_attention') == (products + 6, 3)
  assert counts(remat='blocks') == (products + 6, 4)
  # A norm after the network reads the block's last product, so that product is kept.
  for after in ('after', 'post'):
    assert counts(remat='save_matmuls', norm_location=after) == (products, 3)
  # The product of a gate, and its two gradients.
  gated = spec(head='ElementGate()') | dict(remat='save_matmuls')
  assert counts(**gated) == (products + 3, 3)
  monkeypatch.setattr(dispatch, 'platform', lambda: 'tpu')
  # Splash has one forward and one backward kernel.
  splash = dict(implementation='splash', heads=2)
  assert counts(remat='save_attention', **splash)[1] == 2
  with_key = splash | spec(kv_bias='SinkLogit()')
  assert counts(remat='save_attention', **with_key)[1] == 2
  assert counts(remat='blocks', **with_key)[1] == 3


WIDE = dict(d_model=64, ffn_hidden=128, vocab_size=500)
TINYLLAMA = math.sqrt(2 / (5 * 64))


@pytest.mark.parametrize(
  'options, embed, out, w_out',
  [
    # U(-1/sqrt(n), 1/sqrt(n)) for n inputs.
    (dict(init='torch_default'), 1, 1 / math.sqrt(3 * 64), 1 / math.sqrt(3 * 128)),
    # The last matrix is scaled by the depth.
    (dict(init='tinyllama'), TINYLLAMA, TINYLLAMA, 1 / (math.sqrt(128) * 2)),
    (
      dict(init='tinyllama', ffn='geglu'),
      TINYLLAMA,
      TINYLLAMA,
      math.sqrt(2 / (5 * 128)),
    ),
  ],
  ids=['torch', 'tinyllama', 'not scaled by the depth'],
)
def test_initialisations(options, embed, out, w_out):
  """Standard deviations of 8,192 and more numbers."""
  config = tiny_config(**WIDE | options)
  params = init_params(config, 0)
  assert not np.allclose(params['embed'], init_params(config, 1)['embed'])
  blocks = params['blocks']
  for kernel, expected in (
    (params['embed'], embed),
    (blocks['attention']['out']['kernel'], out),
    (blocks['ffn']['w_out']['kernel'], w_out),
  ):
    assert abs(np.std(kernel) / expected - 1) < 0.02
  if options['init'] == 'torch_default':
    largest = np.abs(blocks['ffn']['w1']['kernel']).max()
    assert abs(largest - 1 / math.sqrt(64)) < 1e-3


def test_initialisations_of_other_parameters():
  config = tiny_config(d_model=256, norm='dyt', **spec(kv_bias='KBias()'))
  params = init_params(config, 0)
  blocks = params['blocks']
  alphas = *blocks['norm1']['alpha'], params['final_norm']['alpha']
  assert {float(x) for x in alphas} == {0.5}
  keys = blocks['attention']['kv_bias_key']
  assert abs(np.std(keys) / 0.02 - 1) < 0.1


TWO = dict(layers=4, pattern=(Layer(), Layer(mask=sj.Window(size=2))))


def norm(x):
  return np.linalg.norm(x, axis=-1)


@pytest.mark.parametrize('options', [POST_NORM, PROTECTED], ids=['post', 'protected'])
def test_recorded_states_give_the_norms(options):
  run = without_positions(**options)
  record = run.record(TOKENS, EVERY)
  layers, embedded = record.layers, run.params['embed'][TOKENS]
  np.testing.assert_allclose(norm(embedded), record.embedding_norm_BxT, rtol=1e-5)
  np.testing.assert_allclose(norm(layers.hidden), layers.hidden_norm_BxT, rtol=1e-5)
  if run.config.norm_location == 'post':
    before = []
    numpy_model(run.config, run.params, TOKENS, before)
    np.testing.assert_allclose(norm(before), layers.hidden_before_norm_BxT, rtol=1e-5)
    logits = layers.hidden[-1] @ run.params['unembed']['kernel']
    np.testing.assert_allclose(logits, run.logits(TOKENS), rtol=1e-4, atol=1e-5)
  else:
    np.testing.assert_array_equal(layers.hidden_before_norm_BxT, layers.hidden_norm_BxT)


def test_bfloat16_activations_float32_parameters_and_logits():
  exact = tiny()
  low = dataclasses.replace(exact, config=tiny_config(dtype='bfloat16'))
  found, expected = low.logits(TOKENS), exact.logits(TOKENS)
  assert found.dtype == jnp.float32
  for shape in jax.tree.leaves(parameter_shapes(low.config)):
    assert shape.dtype == jnp.float32
  # A dozen roundings of 2^-9 occur in two blocks.
  error = np.abs(found - expected).max() / np.abs(expected).max()
  assert 0 < error < 0.05


def test_the_implementation_is_that_of_every_block(monkeypatch):
  config = tiny_config(**TWO)
  no_windows = lambda spec: 'no windows' if spec.mask.window else None
  choose = lambda spec, q, k: 'chunked' if no_windows(spec) else 'splash'
  unsupported = lambda name, spec, q, k: no_windows(spec) if name == 'splash' else None
  monkeypatch.setattr(attention, 'choose', choose)
  monkeypatch.setattr(attention, 'unsupported', unsupported)
  assert attention.training_implementation(config, 8) == 'splash, chunked'
  splash = dataclasses.replace(config, implementation='splash')
  with pytest.raises(ValueError, match="model.implementation = 'splash'.*no windows"):
    attention.training_implementation(splash, 8)


def test_runs_are_compared_and_hashed_by_identity():
  one, other = tiny(), tiny()
  assert one == one != other
  assert len({one, other}) == 2


def assert_close(ours, theirs):
  atol = 1e-5 * np.abs(theirs).max()
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=atol)


def test_loss_and_gradients_are_those_of_the_loop():
  run = tiny(layers=3, sink_tokens=1, norm='dyt', **spec(value='ValueScale()'))
  laid_out = dataclasses.replace(run.config, unroll=2)

  @jax.jit
  def both(params):
    def loss(params, config):
      logits = apply(Transformer(config), params, TOKENS)
      return jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)

    slope = jax.value_and_grad(loss)
    return slope(params, laid_out), slope(params, run.config)

  jax.tree.map(assert_close, *both(run.params))


@pytest.mark.parametrize(
  'options, unroll',
  [
    (dict(layers=3, sink_tokens=1), 2),
    (TWO | dict(norm_location='sandwich', norm='single'), 4),
  ],
  ids=['two of three', 'all'],
)
def test_a_record_is_that_of_the_loop(options, unroll):
  run = tiny(**options)
  laid_out = dataclasses.replace(run, config=dataclasses.replace(run.config, unroll=unroll))
  ours, theirs = laid_out.record(TOKENS, EVERY), run.record(TOKENS, EVERY)
  jax.tree.map(assert_close, ours, theirs)


@pytest.mark.parametrize(
  'options, loops',
  [
    (dict(unroll=2), 0),
    (dict(unroll=2, remat='blocks'), 2),
    (TWO | dict(unroll=4), 0),
    (TWO | dict(unroll=3), 2),
  ],
  ids=str,
)
def test_loops_over_blocks_that_remain(options, loops):
  """One forward and one backward loop; none if one iteration has all blocks, without a remat."""
  config = tiny_config(**options, implementation='reference')  # without loops inside
  loss = lambda params: apply(Transformer(config), params, TOKENS).sum()
  lowered = jax.jit(jax.grad(loss)).lower(parameter_shapes(config))
  text = lowered.as_text()
  assert text.count('stablehlo.while') == loops
