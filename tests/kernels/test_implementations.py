"""Every implementation against the definition: output and all gradients, by one comparison.

A CPU interprets the kernels, with tiles so small that a few tokens need many of them. cuDNN's calls
are replaced by what they mean.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels import chunked, flash, flash_gpu, flash_tpu, library_kernels
from tests.attention_checks import check_gradient, error_of, with_gradients
from tests.attention_specs import PAPER, pairwise_specs, random_inputs

# Float32 rounding of sums of up to a few hundred terms in another order.
FLOAT32 = 1e-5
# Queries, weights, cotangents of scores and results are rounded to 8 bits, 2^-9 each.
BFLOAT16 = 0.015
BOTH_KERNELS = pytest.mark.parametrize('kernels', ['tpu', 'cuda'])


def small_tiles(monkeypatch, kernels, block=8, other=4):
  """Makes 'pallas' interpret the kernels of a platform with small tiles, in new programs."""
  blocks = flash_gpu.TritonBlocks(block, other, 4, 1)
  monkeypatch.setattr(flash, '_INTERPRETED', kernels)
  padded = lambda length, most: (-(-length // block) * block, block)
  monkeypatch.setattr(flash_tpu, 'padded_tiles', padded)
  monkeypatch.setattr(flash_gpu, '_FLOAT32', blocks)
  monkeypatch.setattr(flash_gpu, 'BLOCKS', dict.fromkeys(flash_gpu.BLOCKS, {256: blocks}))


def attention(implementation, spec):
  return functools.partial(sj.attend, spec, implementation=implementation)


def softmax(**components):
  return sj.AttentionSpec(**{'position': sj.Nope(), **components})


def low(inputs):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), inputs)


SIGMOID = dict(similarity='Sigmoid()', normalizer='RowSum(eps=1e-8)')
P_NORM = dict(normalizer='PNorm(p=0.5)', position='Alibi()', kv_bias='KVBias()')
CLIPPED = dict(normalizer='Clipped(low=-0.05)', kv_bias='KVBias()')


class Cube(sj.Linear):
  """A similarity of a user; as an abstract class it is not a choice, so no other test finds it."""

  abstract = True

  def __call__(self, s):
    return s**3


class Strictly(sj.Causal):
  """A mask of a user, which shows only keys before the query: the first query sees none."""

  abstract = True

  def keep(self, i, j):
    return j < i

  def key_range(self, first, last, keys):
    return 0, min(last, keys)


@pytest.mark.parametrize(
  'mask, block, spans, length, components',
  [
    (sj.Window(size=5), 4, 3, 23, P_NORM),
    (sj.Prefix(length=9), 4, 8, 16, SIGMOID),
    (sj.Causal(), 4, 1, 11, CLIPPED),
    (sj.Window(size=1), 8, 2, 7, SIGMOID),
    (Strictly(), 4, 2, 13, {}),
  ],
  ids=str,
)
def test_blocks_and_spans_change_nothing(monkeypatch, mask, block, spans, length, components):
  monkeypatch.setattr(chunked, 'BLOCK', block)
  monkeypatch.setattr(chunked, '_SPANS', spans)
  spec = sj.AttentionSpec(mask=mask, **components)
  inputs = q, k, _, params = random_inputs(spec, batch=2, length=length, heads=4, kv_heads=2)
  assert error_of(attention('chunked', spec), spec, *inputs) < FLOAT32

  @jax.jit
  def importance(q, k, params):
    few = sj.streaming_importance(spec, q, k, params, keys=3)
    every = sj.streaming_importance(spec, q, k, params)
    return few, every, sj.attention_map(spec, q, k, params)

  few, every, weights = importance(q, k, params)
  direct = sj.importance(weights, raw=True)
  np.testing.assert_allclose(every.raw, direct, rtol=1e-5, atol=1e-6)
  for some, everything in zip(few[:2], every[:2]):
    np.testing.assert_allclose(some, everything[..., :3], rtol=1e-6)
  if spec.kv_bias.has_extra_key:
    np.testing.assert_allclose(few.extra_key, every.extra_key, rtol=1e-6)


@pytest.mark.parametrize(
  'kernels, mask, block, other',
  [
    ('tpu', sj.Causal(), 8, 8),
    ('tpu', sj.Window(size=9), 4, 4),
    ('cuda', sj.Window(size=9), 4, 8),
    ('cuda', sj.Prefix(length=6), 8, 4),
  ],
  ids=str,
)
def test_masked_and_full_tiles_and_padding(kernels, mask, block, other, monkeypatch):
  small_tiles(monkeypatch, kernels, block, other)
  spec = sj.AttentionSpec(mask=mask, normalizer='PNorm(p=0.5)', position='Alibi()')
  check_gradient(spec, 'pallas', length=13, heads=2, head_dim=8)


# For both families of kernels: exponential and additive tiles with every kind of extra key.
@pytest.mark.parametrize(
  'kernels, components',
  [
    ('tpu', dict(normalizer='RowSum(scale=0.2)', kv_bias='SinkLogit()', position='Relative()')),
    ('tpu', dict(similarity='CappedExp(cap=1.5)', normalizer='PNorm(p=2.0)', kv_bias='KBias()')),
    ('tpu', dict(similarity='Sigmoid()', normalizer='PNorm(p=2.0)', kv_bias='KVBias(shared=True)')),
    ('tpu', dict(similarity='Linear()', normalizer='Unnormalized()', feature_map='EluPlusOne()')),
    ('cuda', dict(kv_bias="KBias(value='first', value_norm=5.0)")),
    ('cuda', dict(kv_bias='PseudoMask(context=9)', qk_norm='QKNorm()', value='ValueScale()')),
    ('cuda', dict(normalizer='PNorm(p=0.5)', kv_bias='VBias()', position='Alibi()')),
    ('cuda', SIGMOID | dict(kv_bias='KVBias()', head='HeadNorm()')),
  ],
  ids=str,
)
def test_components_by_our_kernels(kernels, components, monkeypatch):
  small_tiles(monkeypatch, kernels)
  sizes = dict(length=11, heads=2, kv_heads=1, head_dim=8)
  check_gradient(sj.AttentionSpec(**components), 'pallas', **sizes)


@BOTH_KERNELS
def test_one_token_by_our_kernels(kernels, monkeypatch):
  small_tiles(monkeypatch, kernels)
  check_gradient(sj.AttentionSpec(kv_bias=sj.KVBias()), 'pallas', length=1, head_dim=8)


@pytest.mark.full  # a part takes ten seconds: each of its twenty specs is a program
@BOTH_KERNELS
@pytest.mark.parametrize('part', range(6))
def test_every_pair_of_components_by_our_kernels(part, kernels, monkeypatch):
  small_tiles(monkeypatch, kernels)
  specs = [*PAPER.values(), *pairwise_specs()[0]]
  runs = lambda spec: not isinstance(spec.normalizer, sj.Clipped | sj.AbsSum)
  for spec in [*filter(runs, specs)][part::6]:
    check_gradient(spec, 'pallas', length=9, heads=2, head_dim=8)


@pytest.mark.parametrize('kernels', ['tpu', 'cuda', None])
def test_large_scores_stay_exact(kernels, monkeypatch):
  """The maximum grows from tile to tile, up to scores whose exponential overflows."""
  small_tiles(monkeypatch, kernels or 'tpu')
  q, k, v, _ = random_inputs(softmax(), length=21, heads=1, head_dim=8)
  k *= np.linspace(1, 300, 21, dtype=np.float32)[:, None, None]
  # Scores of some hundreds are rounded to 2^-24 of themselves, and weights by as much.
  f = attention('pallas' if kernels else 'chunked', softmax())
  assert error_of(f, softmax(), q, k, v) < 1e-4


@BOTH_KERNELS
def test_padding_stays_finite_under_a_bias_that_grows_with_the_position(kernels, monkeypatch):
  small_tiles(monkeypatch, kernels, 64, 64)
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=4.0), position=sj.Relative())
  inputs = random_inputs(spec, length=100, heads=1, head_dim=8)
  run = jax.jit(functools.partial(with_gradients, attention('pallas', spec)))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(run(*inputs)))


@pytest.mark.parametrize(
  'implementation, kernels, name, length',
  [
    ('reference', None, 'softmax', 40),
    ('chunked', None, 'normalized sigmoid (Table 15)', 60),
    ('pallas', 'tpu', 'normalized sigmoid (Table 15)', 40),
    ('pallas', 'cuda', 'softmax', 40),
  ],
)
def test_bfloat16_is_near_float32(implementation, kernels, name, length, monkeypatch):
  if kernels:
    small_tiles(monkeypatch, kernels, 16, 8)
  *qkv, params = random_inputs(PAPER[name], length=length, head_dim=32)
  f = attention(implementation, PAPER[name])
  assert error_of(f, PAPER[name], *low(qkv), params) < BFLOAT16
  assert jax.eval_shape(f, *low(qkv), params).dtype == jnp.bfloat16


@pytest.mark.parametrize(
  'kernels, components',
  [
    ('tpu', dict(similarity='Sigmoid()', normalizer='Unnormalized()', mask=Strictly())),
    ('cuda', dict(similarity=Cube(), normalizer='AbsFloor()')),
    ('cuda', dict(mask=Strictly())),
  ],
  ids=str,
)
def test_components_of_a_user(kernels, components, monkeypatch):
  small_tiles(monkeypatch, kernels)
  spec = sj.AttentionSpec(**components)
  q, k, v, _ = random_inputs(spec, length=13, heads=2, head_dim=8)
  assert error_of(attention('pallas', spec), spec, q, k, v) < FLOAT32


MASKS = [sj.Causal(), sj.Window(size=200), sj.Prefix(length=200)]
EXTRA_KEYS = [
  sj.SinkLogit(),
  sj.ZeroSink(),
  sj.KBias(),
  sj.KVBias(),
  sj.PseudoMask(context=300),
  sj.KBias(shared=True, value_norm=2.0, learnable_dims=5),
]
_on_a_cpu = functools.partial(functools.partial, interpret=True)
SPLASH = library_kernels.Library(*map(_on_a_cpu, library_kernels.SPLASH))


def by_library(library, spec):
  """`attend` of a library, for transformed queries and keys: as they are without positions."""
  return lambda q, k, v, params: library_kernels.attend(library, spec, q, k, v, params)


def library_inputs(spec, length, heads=4, kv_heads=2):
  return random_inputs(spec, batch=2, length=length, heads=heads, kv_heads=kv_heads, head_dim=24)


@pytest.fixture
def small_splash(monkeypatch):
  monkeypatch.setattr(library_kernels, '_block', lambda mask, q: 128)
  library_kernels._splash_kernel.cache_clear()


@pytest.mark.parametrize('mask, heads', [*zip(MASKS, [(2, 2), (4, 2), (2, 1)])], ids=str)
def test_splash(small_splash, mask, heads):
  spec = softmax(mask=mask)
  inputs = library_inputs(spec, 384, *heads)
  assert error_of(by_library(SPLASH, spec), spec, *inputs) < FLOAT32


@pytest.mark.parametrize('kv_bias, fused', [(sj.NoBias(), 2), (sj.KVBias(), 0)], ids=str)
def test_splash_in_bfloat16(small_splash, monkeypatch, kv_bias, fused):
  monkeypatch.setattr(library_kernels, '_FUSED', fused)
  spec = softmax(kv_bias=kv_bias)
  *qkv, params = library_inputs(spec, 256)
  assert error_of(by_library(SPLASH, spec), spec, *low(qkv), params) < BFLOAT16


@pytest.mark.parametrize(
  'mask, kv_bias', [*zip(MASKS, ['NoBias()', 'KVBias()', 'NoBias()'])], ids=str
)
def test_splash_of_a_length_that_is_padded(small_splash, mask, kv_bias):
  spec = softmax(mask=mask, kv_bias=kv_bias)
  assert error_of(by_library(SPLASH, spec), spec, *library_inputs(spec, 300)) < FLOAT32


def test_an_extra_key_joins_the_softmax_of_splash(small_splash):
  spec = softmax(kv_bias='KVBias()', mask='Window(size=100)', normalizer='RowSum(scale=0.7)')
  assert error_of(by_library(SPLASH, spec), spec, *library_inputs(spec, 256)) < FLOAT32


@pytest.fixture
def cudnn_by_definition(monkeypatch):
  """cuDNN's calls in JAX: forward reads (q, k, v), backward also the rows and their logarithms."""
  fused = pytest.importorskip('jax._src.cudnn.fused_attention_stablehlo')

  def scores(q, k, scale, mask_type, window):
    assert mask_type == fused.MaskType.CAUSAL
    i, j = np.ogrid[: q.shape[1], : q.shape[1]]
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    s = jnp.einsum('bihd,bjhd->bhij', q, k) * scale
    return jnp.where((j <= i) & (i - j < (window or 10**9)), s, -jnp.inf)

  def rows(weights, v):
    v = jnp.repeat(v, weights.shape[1] // v.shape[2], 2)
    return jnp.einsum('bhij,bjhd->bihd', weights, v)

  def forward(q, k, v, *, scale, mask_type, sliding_window_length, return_residual):
    s = scores(q, k, scale, mask_type, sliding_window_length)
    return rows(jax.nn.softmax(s), v), jax.nn.logsumexp(s, -1)

  def backward(
    q, k, v, *arrays, scale, mask_type, layout, sliding_window_length, dropout_rate, **rest
  ):
    *unused, lse, out, do = arrays
    assert len(unused) == 7 and not any(x.size for x in unused) and not dropout_rate
    assert layout == fused.AttentionLayout.BTNH.value
    read = jnp.einsum('bihd,bihd->bhi', do, out)

    # Its derivative by a score is p (do . v - do . out), as in softmax, for any logarithms.
    def loss(q, k, v):
      weights = jnp.exp(scores(q, k, scale, mask_type, sliding_window_length) - lse[..., None])
      return (do * rows(weights, v)).sum() - (read * weights.sum(-1)).sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)

  monkeypatch.setattr(fused, 'dot_product_attention', forward)
  bound = types.SimpleNamespace(bind=backward)
  monkeypatch.setattr(fused, '_dot_product_attention_bwd_p_wrapper', bound)


@pytest.mark.parametrize(
  'kv_bias, mask',
  [*((key, sj.Window(size=7)) for key in EXTRA_KEYS), (sj.KVBias(), sj.Causal())],
  ids=str,
)
def test_an_extra_key_joins_the_softmax_of_cudnn(cudnn_by_definition, kv_bias, mask):
  spec = softmax(kv_bias=kv_bias, mask=mask)
  inputs = library_inputs(spec, 30)
  assert error_of(by_library(library_kernels.CUDNN, spec), spec, *inputs) < FLOAT32


@pytest.mark.parametrize(
  'mask', [sj.Causal(), *(sj.Window(size=size) for size in (1, 7, 30, 31))], ids=str
)
def test_cudnn_gets_arguments_that_mean_the_definition(monkeypatch, mask):
  """jax's other implementation of the same function defines what the arguments mean."""
  original, asked = jax.nn.dot_product_attention, []

  def xla(*args, implementation, **kwargs):
    asked.append(implementation)
    return original(*args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', xla)
  spec = softmax(mask=mask)
  inputs = library_inputs(spec, 30)
  assert error_of(by_library(library_kernels.CUDNN, spec), spec, *inputs) < FLOAT32
  assert asked == ['cudnn']
