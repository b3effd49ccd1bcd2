"""Every implementation against the definition: output and all gradients, by one comparison.

A CPU interprets the kernels, with tiles so small that a few tokens need many of them. cuDNN's calls
are replaced by what they mean.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels import chunked, flash, flash_gpu, flash_tpu, library_kernels
from tests.attention_checks import check_at_once, error_of
from tests.attention_specs import PAPER, pairwise_specs, random_inputs

# Float32 rounding of sums of up to a few hundred terms in another order.
FLOAT32 = 1e-5
# Queries, weights, cotangents of scores and results are rounded to 8 bits, 2^-9 each.
BFLOAT16 = 0.015
KERNELS = ['tpu', 'cuda']


def small_tiles(monkeypatch, kernels, block=8, other=4):
  """Makes 'pallas' interpret the kernels of a platform with small tiles."""
  blocks = flash_gpu.TritonBlocks(block, other, 4, 1)
  monkeypatch.setattr(flash, '_INTERPRETED', kernels)
  monkeypatch.setattr(flash_tpu, '_BLOCK', block)
  monkeypatch.setattr(flash_tpu, '_LANES', block)
  monkeypatch.setattr(flash_gpu, '_FLOAT32', blocks)
  monkeypatch.setattr(flash_gpu, 'BLOCKS', dict.fromkeys(flash_gpu.BLOCKS, {256: blocks}))
  jax.clear_caches()  # an eager call would reuse a program with other tiles


def attention(implementation, spec):
  return functools.partial(sj.attend, spec, implementation=implementation)


def softmax(**components):
  return sj.AttentionSpec(**{'position': sj.Nope(), **components})


def low(inputs):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), inputs)


@pytest.mark.parametrize(
  'mask, block, spans, length',
  [
    (sj.Window(size=5), 4, 3, 23),
    *(
      pytest.param(*case, marks=pytest.mark.full)
      for case in (
        (sj.Prefix(length=9), 4, 8, 16),
        (sj.Causal(), 4, 3, 23),
        (sj.Window(size=1), 4, 3, 23),
        (sj.Prefix(length=9), 4, 3, 23),
        (sj.Causal(), 4, 1, 11),
        (sj.Window(size=5), 8, 2, 7),
      )
    ),
  ],
)
def test_blocks_and_spans_change_nothing(monkeypatch, mask, block, spans, length):
  monkeypatch.setattr(chunked, 'BLOCK', block)
  monkeypatch.setattr(chunked, '_SPANS', spans)
  for components in (
    dict(similarity=sj.Sigmoid(), normalizer=sj.RowSum(eps=1e-8)),
    dict(normalizer=sj.PNorm(p=0.5), position=sj.Alibi(), kv_bias=sj.KVBias()),
    dict(normalizer=sj.Clipped(low=-0.05), kv_bias=sj.KVBias()),
  ):
    spec = sj.AttentionSpec(mask=mask, **components)
    inputs = q, k, _, params = random_inputs(spec, batch=2, length=length, heads=4, kv_heads=2)
    assert error_of(attention('chunked', spec), spec, *inputs) < FLOAT32
    alpha = sj.streaming_importance(spec, q, k, params)
    direct = sj.importance(sj.attention_map(spec, q, k, params), raw=True)
    np.testing.assert_allclose(alpha.raw, direct, rtol=1e-5, atol=1e-6)
    first = sj.streaming_importance(spec, q, k, params, keys=3)
    for few, all_keys in zip(first[:2], alpha[:2]):
      np.testing.assert_allclose(few, all_keys[..., :3], rtol=1e-6)
    if spec.kv_bias.has_extra_key:
      np.testing.assert_allclose(first.extra_key, alpha.extra_key, rtol=1e-6)


@pytest.mark.every(3)
@pytest.mark.parametrize('kernels', KERNELS)
@pytest.mark.parametrize(
  'mask',
  [
    sj.Causal(),
    sj.Window(size=1),
    sj.Window(size=5),
    sj.Prefix(length=6),
    *(
      pytest.param(mask, marks=pytest.mark.full)
      for mask in (sj.Window(size=99), sj.Prefix(length=1), sj.Prefix(length=99))
    ),
  ],
  ids=repr,
)
def test_tiles_and_padding_change_nothing(kernels, mask, monkeypatch):
  spec = sj.AttentionSpec(mask=mask, normalizer=sj.PNorm(p=0.5), position=sj.Alibi())
  inputs = random_inputs(spec, length=13, heads=2, head_dim=8)
  for blocks in ((8, 4), (4, 8)):
    small_tiles(monkeypatch, kernels, *blocks)
    assert error_of(attention('pallas', spec), spec, *inputs) < FLOAT32


def with_kernels(specs, monkeypatch, request):
  """Each spec with one family of kernels, alternately. Under --full each spec with both."""
  for number, spec in enumerate(specs):
    for n, kernels in enumerate(KERNELS):
      if number % 2 == n or request.config.getoption('--full'):
        small_tiles(monkeypatch, kernels)
        yield spec


@pytest.mark.every(6)
@pytest.mark.parametrize('part', range(6))
def test_paper_variants_by_our_kernels(part, monkeypatch, request):
  specs = [spec for name, spec in PAPER.items() if name != 'softpick']
  for spec in with_kernels(specs[part::6], monkeypatch, request):
    check_at_once(spec, 'pallas', length=11, heads=2, kv_heads=1, head_dim=8)
  check_at_once(sj.AttentionSpec(kv_bias=sj.KVBias()), 'pallas', length=1, head_dim=8)


@pytest.mark.full
@pytest.mark.parametrize('part', range(6))
def test_every_pair_of_components_by_our_kernels(part, monkeypatch, request):
  specs = [
    spec
    for spec in pairwise_specs()[0]
    if not isinstance(spec.normalizer, sj.Clipped) and spec.similarity.kind != 'rectified'
  ]
  assert len(specs) >= 20
  for spec in with_kernels(specs[part::6], monkeypatch, request):
    check_at_once(spec, 'pallas', length=9, heads=2, head_dim=8)


@pytest.mark.parametrize('kernels', KERNELS)
def test_large_scores_stay_exact_and_padding_finite(kernels, monkeypatch):
  """The maximum grows from tile to tile, up to scores whose exponential overflows."""
  small_tiles(monkeypatch, kernels)
  q, k, v, _ = random_inputs(softmax(), length=21, heads=1, head_dim=8)
  k *= np.linspace(1, 300, 21, dtype=np.float32)[:, None, None]
  # Scores of some hundreds are rounded to 2^-24 of themselves, and weights by as much.
  assert error_of(attention('pallas', softmax()), softmax(), q, k, v) < 1e-4
  # Padding must stay finite under a bias that grows with the position.
  small_tiles(monkeypatch, kernels, 64, 64)
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=4.0), position=sj.Relative())
  inputs = random_inputs(spec, length=100, heads=1, head_dim=8)
  assert np.isfinite(error_of(attention('pallas', spec), spec, *inputs))


@pytest.mark.parametrize(
  'implementation, kernels',
  [
    ('chunked', None),
    ('pallas', 'tpu'),
    ('pallas', 'cuda'),
  ],
)
@pytest.mark.parametrize('name', ['softmax', 'normalized sigmoid (Table 15)'])
def test_bfloat16_is_near_float32(implementation, kernels, name, monkeypatch):
  if kernels:
    small_tiles(monkeypatch, kernels, 16, 8)
  *qkv, params = random_inputs(PAPER[name], length=40 if kernels else 300, head_dim=32)
  f = attention(implementation, PAPER[name])
  assert error_of(f, PAPER[name], *low(qkv), params) < BFLOAT16
  assert f(*low(qkv), params).dtype == jnp.bfloat16


MASKS = [sj.Causal(), sj.Window(size=200), sj.Prefix(length=5), sj.Prefix(length=200)]
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


@pytest.mark.parametrize(
  'heads, kv_heads, mask',
  [
    pytest.param(
      *heads,
      mask,
      id=f'{mask}-{heads[0]}-{heads[1]}',
      # Every mask, and every way of sharing keys, once. --full tests all combinations.
      marks=() if heads == (4, 2) or mask == MASKS[0] else pytest.mark.full,
    )
    for mask in MASKS
    for heads in [(2, 2), (4, 2), (2, 1)]
  ],
)
def test_splash(small_splash, mask, heads, kv_heads):
  spec = softmax(mask=mask)
  inputs = library_inputs(spec, 384, heads, kv_heads)
  assert error_of(by_library(SPLASH, spec), spec, *inputs) < FLOAT32


@pytest.mark.parametrize('fused', [0, 2])
def test_splash_in_bfloat16(small_splash, monkeypatch, fused):
  monkeypatch.setattr(library_kernels, '_FUSED', fused)
  for spec in (softmax(), softmax(kv_bias=sj.KVBias())):
    *qkv, params = library_inputs(spec, 256)
    assert error_of(by_library(SPLASH, spec), spec, *low(qkv), params) < BFLOAT16


@pytest.mark.parametrize('kv_bias', EXTRA_KEYS, ids=str)
def test_an_extra_key_joins_the_softmax_of_splash(small_splash, kv_bias):
  spec = softmax(kv_bias=kv_bias, mask=sj.Window(size=100), normalizer=sj.RowSum(scale=0.7))
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

  def forward(q, k, v, *, scale, mask_type, sliding_window_length, return_residual):
    s = scores(q, k, scale, mask_type, sliding_window_length)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    return jnp.einsum('bhij,bjhd->bihd', jax.nn.softmax(s), v), jax.nn.logsumexp(s, -1)

  class Backward:
    @staticmethod
    def bind(
      q, k, v, *arrays, scale, mask_type, layout, sliding_window_length, dropout_rate, **rest
    ):
      *unused, lse, out, do = arrays
      assert len(unused) == 7 and not any(x.size for x in unused) and not dropout_rate
      assert layout == fused.AttentionLayout.BTNH.value
      groups = q.shape[2] // k.shape[2]
      repeated = lambda x: jnp.repeat(x, groups, 2)
      grouped = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)
      p = jnp.exp(scores(q, k, scale, mask_type, sliding_window_length) - lse[..., None])
      read = jnp.einsum('bihd,bihd->bhi', do, out)[..., None]
      ds = p * (jnp.einsum('bihd,bjhd->bhij', do, repeated(v)) - read) * scale
      return (
        jnp.einsum('bhij,bjhd->bihd', ds, repeated(k)),
        grouped(jnp.einsum('bhij,bihd->bjhd', ds, q)),
        grouped(jnp.einsum('bhij,bihd->bjhd', p, do)),
      )

  monkeypatch.setattr(fused, 'dot_product_attention', forward)
  monkeypatch.setattr(fused, '_dot_product_attention_bwd_p_wrapper', Backward)


@pytest.mark.parametrize('kv_bias', EXTRA_KEYS, ids=str)
@pytest.mark.parametrize('mask', [sj.Causal(), sj.Window(size=7)], ids=str)
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
