"""Softmax by cuDNN and splash: numbers if a CPU can compute them, otherwise the lowered program."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Mask
from sink_jax.foreign import standard_promotion
from sink_jax.kernels import library_kernels
from sink_jax.models.attention import training_implementation
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import Transformer

MASKS = [sj.Causal(), sj.Window(size=200), sj.Prefix(length=5), sj.Prefix(length=200)]


def softmax(**slots):
  return sj.AttentionSpec(**{'position': sj.Nope(), **slots})


def random_heads(length, heads, kv_heads, head_dim=24, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  draw = lambda n: jnp.asarray(rng.standard_normal((2, length, n, head_dim)), dtype)
  return draw(heads), draw(kv_heads), draw(kv_heads)


def shapes(length=2048, heads=8, kv_heads=8, head_dim=96, dtype=jnp.bfloat16):
  of = lambda n: jax.ShapeDtypeStruct((2, length, n, head_dim), dtype)
  return of(heads), of(kv_heads), of(kv_heads)


def value_and_grads(f, inputs):
  """The rows, and the gradients for a random cotangent, all as float32."""
  weight = np.random.default_rng(1).standard_normal(inputs[0].shape)

  @jax.jit
  def run(*inputs):
    rows, vjp = jax.vjp(f, *inputs)
    return rows, *vjp(jnp.asarray(weight, rows.dtype))

  return [x.astype(jnp.float32) for x in run(*inputs)]


def worst_error(actual, expected):
  """The largest error, relative to the largest entry of each array."""
  return max(float(jnp.abs(x - y).max() / jnp.abs(y).max())
             for x, y in zip(actual, expected, strict=True))


def by_definition(spec):
  return functools.partial(sj.attend, spec, implementation='reference')


def interpreted(spec):
  return functools.partial(library_kernels.splash, spec, interpret=True)


def gradient(f):
  return jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))


@pytest.mark.parametrize('heads, kv_heads, mask', [
    pytest.param(*heads, mask, id=f'{mask}-{heads[0]}-{heads[1]}',
                 # Every mask, and every way of sharing keys, once. --full tests all combinations.
                 marks=() if heads == (4, 2) or mask == MASKS[0] else pytest.mark.full)
    for mask in MASKS for heads in [(2, 2), (4, 2), (2, 1)]])
def test_splash_equals_the_reference(monkeypatch, mask, heads, kv_heads):
  monkeypatch.setattr(library_kernels, '_block', lambda mask, q: 128)
  spec, inputs = softmax(mask=mask), random_heads(384, heads, kv_heads)
  assert library_kernels.splash_unsupported(spec, *inputs[:2], 'tpu') is None
  ours = value_and_grads(interpreted(spec), inputs)
  # Float32 rounding of sums of 384 terms. The largest measured error was 1e-6.
  assert worst_error(ours, value_and_grads(by_definition(spec), inputs)) < 1e-5


@pytest.mark.parametrize('fused', [0, 2])
def test_splash_in_bfloat16_is_near_float32(monkeypatch, fused):
  monkeypatch.setattr(library_kernels, '_block', lambda mask, q: 128)
  monkeypatch.setattr(library_kernels, '_FUSED', fused)
  library_kernels._splash_kernel.cache_clear()
  spec, inputs = softmax(), random_heads(256, 4, 2, dtype=jnp.bfloat16)
  near = value_and_grads(interpreted(spec), inputs)
  exact = value_and_grads(by_definition(spec), [x.astype(jnp.float32) for x in inputs])
  # Queries, score gradients and results are rounded to 8 bits, 2^-9 relative each. The largest measured was
  # 0.006.
  assert worst_error(near, exact) < 0.015
  assert interpreted(spec)(*inputs).dtype == jnp.bfloat16


def test_splash_scales_queries_without_a_common_error(monkeypatch):
  inputs = random_heads(128, 1, 1, head_dim=48, dtype=jnp.bfloat16)
  monkeypatch.setattr(library_kernels, '_splash_kernel', lambda *args: lambda q, k, v: q)
  scaled = np.asarray(library_kernels.splash(softmax(), *inputs), np.float64)
  q = np.asarray(inputs[0], np.float64)
  factor = (scaled * q).sum() / (q * q).sum() * math.sqrt(48)
  # 12288 independent roundings of at most 2^-9 leave about 1e-5 in the mean. A factor rounded to bfloat16
  # would change every score by more than 1e-3.
  assert abs(factor - 1) < 1e-4
  assert abs(float(jnp.bfloat16(1 / math.sqrt(48))) * math.sqrt(48) - 1) > 1e-3


@pytest.mark.parametrize('mask, length, head_dim, dtype, block', [
    (sj.Causal(), 2048, 128, jnp.bfloat16, 1024), (sj.Causal(), 2048, 192, jnp.bfloat16, 512),
    (sj.Causal(), 2048, 64, jnp.float32, 512), (sj.Causal(), 1152, 64, jnp.bfloat16, 384),
    (sj.Causal(), 2176, 64, jnp.bfloat16, 128), (sj.Window(size=32), 2048, 96, jnp.bfloat16, 256),
    (sj.Window(size=600), 2048, 96, jnp.bfloat16, 512)], ids=str)
def test_splash_tiles_divide_the_length_and_fit(mask, length, head_dim, dtype, block):
  assert library_kernels._block(mask, shapes(length, head_dim=head_dim, dtype=dtype)[0]) == block


EXTRA_KEYS = [sj.SinkLogit(), sj.ZeroSink(), sj.KBias(), sj.KBias(shared=True, value_norm=2.0, learnable_dims=5),
              sj.KVBias(), sj.PseudoMask(context=300)]


def attends(library, spec, length=256, dtype=jnp.float32):
  """The rows and all gradients, including those of parameters, by a library and by the definition."""
  q, k, v = random_heads(length, 4, 2, dtype=dtype)
  rng, shapes = np.random.default_rng(2), spec.params(sj.Dims(4, 2, 24, 96))
  params = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), shapes,
                        is_leaf=lambda p: hasattr(p, 'shape'))
  def run(f, *inputs):
    inputs = *inputs, params
    rows, vjp = jax.vjp(f, *inputs)
    weight = np.random.default_rng(1).standard_normal(rows.shape)
    return jax.tree.leaves((rows, vjp(jnp.asarray(weight, rows.dtype))))
  by_library = lambda q, k, v, params: library_kernels.attend(library, spec, q, k, v, params)
  by_definition = lambda q, k, v, params: sj.attend(spec, q, k, v, params, implementation='reference')
  exact = [x.astype(jnp.float32) for x in (q, k, v)]
  return jax.jit(run, static_argnums=0)(by_library, q, k, v), run(by_definition, *exact)


_on_a_cpu = functools.partial(functools.partial, interpret=True)
INTERPRETED = library_kernels.Library(*map(_on_a_cpu, library_kernels.SPLASH))


@pytest.mark.parametrize('kv_bias', EXTRA_KEYS, ids=str)
def test_an_extra_key_joins_the_softmax_of_splash(kv_bias):
  spec = softmax(kv_bias=kv_bias, mask=sj.Window(size=100), normalizer=sj.RowSum(scale=0.7))
  assert worst_error(*attends(INTERPRETED, spec)) < 1e-5  # float32, as for plain softmax


def test_an_extra_key_in_bfloat16_is_near_float32():
  assert worst_error(*attends(INTERPRETED, softmax(kv_bias=sj.KVBias()), dtype=jnp.bfloat16)) < 0.015


@pytest.fixture
def cudnn_by_definition(monkeypatch):
  """cuDNN's two calls in JAX: forward reads (q, k, v), backward also the rows and their logarithms."""
  fused = pytest.importorskip('jax._src.cudnn.fused_attention_stablehlo')

  def scores(q, k, scale, mask_type, window):
    assert mask_type == fused.MaskType.CAUSAL
    i, j = np.ogrid[:q.shape[1], :q.shape[1]]
    s = jnp.einsum('bihd,bjhd->bhij', q, jnp.repeat(k, q.shape[2] // k.shape[2], 2)) * scale
    return jnp.where((j <= i) & (i - j < (window or 10**9)), s, -jnp.inf)

  def forward(q, k, v, *, scale, mask_type, sliding_window_length, return_residual):
    s = scores(q, k, scale, mask_type, sliding_window_length)
    out = jnp.einsum('bhij,bjhd->bihd', jax.nn.softmax(s), jnp.repeat(v, q.shape[2] // v.shape[2], 2))
    return out, jax.nn.logsumexp(s, -1)

  class Backward:
    @staticmethod
    def bind(q, k, v, *arrays, scale, mask_type, layout, sliding_window_length, dropout_rate, **rest):
      *unused, lse, out, do = arrays
      assert len(unused) == 7 and not any(x.size for x in unused) and not dropout_rate
      assert layout == fused.AttentionLayout.BTNH.value
      groups = q.shape[2] // k.shape[2]
      of, grouped = (lambda x: jnp.repeat(x, groups, 2),
                     lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3))
      p = jnp.exp(scores(q, k, scale, mask_type, sliding_window_length) - lse[..., None])
      read = jnp.einsum('bihd,bihd->bhi', do, out)[..., None]
      ds = p * (jnp.einsum('bihd,bjhd->bhij', do, of(v)) - read) * scale
      return (jnp.einsum('bhij,bjhd->bihd', ds, of(k)), grouped(jnp.einsum('bhij,bihd->bjhd', ds, q)),
              grouped(jnp.einsum('bhij,bihd->bjhd', p, do)))

  monkeypatch.setattr(fused, 'dot_product_attention', forward)
  monkeypatch.setattr(fused, '_dot_product_attention_bwd_p_wrapper', Backward)


@pytest.mark.parametrize('kv_bias', EXTRA_KEYS, ids=str)
@pytest.mark.parametrize('mask', [sj.Causal(), sj.Window(size=7)], ids=str)
def test_an_extra_key_joins_the_softmax_of_cudnn(cudnn_by_definition, kv_bias, mask):
  assert worst_error(*attends(library_kernels.CUDNN, softmax(kv_bias=kv_bias, mask=mask), length=30)) < 1e-5


@pytest.mark.parametrize('kernels, platform, calls', [
    (library_kernels.SPLASH, 'tpu', 3), (library_kernels.CUDNN, 'cuda', 2)], ids=['splash', 'cudnn'])
def test_an_extra_key_lowers_to_the_kernels_of_plain_softmax(monkeypatch, kernels, platform, calls):
  fused = pytest.importorskip('jax._src.cudnn.fused_attention_stablehlo')
  monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91002)
  spec, params = softmax(kv_bias=sj.SinkLogit(), mask=sj.Window(size=256)), {'kv_bias': {'logit': jnp.zeros(8)}}
  programs = []
  for attend in (functools.partial(library_kernels.attend, kernels, spec, params=params),
                 functools.partial(kernels.rows, softmax(mask=spec.mask))):
    text = jax.jit(gradient(attend)).trace(*shapes(kv_heads=2)).lower(lowering_platforms=(platform,)).as_text()
    assert '2048x2048' not in text
    name = 'tpu_custom_call|__cudnn[^(]*'
    found = re.findall(rf'custom_call @({name})\(.*?backend_config = "(.*?)"[,}}]', text)
    programs.append(sorted((name, config if platform == 'cuda' else '') for name, config in found))
  assert programs[0] == programs[1] and len(programs[0]) == calls


@pytest.mark.parametrize('kernels', [library_kernels.SPLASH, library_kernels.CUDNN],
                         ids=['splash', 'cudnn'])
def test_a_gradient_in_a_program_that_forbids_promotion(monkeypatch, kernels):
  """The gradient of a jitted function calls rules of `custom_vjp` after the function returned."""
  fused = pytest.importorskip('jax._src.cudnn.fused_attention_stablehlo')
  monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91002)
  params = {'kv_bias': {name: jnp.zeros((8, 96)) for name in ('key', 'value')}}
  attend = standard_promotion()(functools.partial(
      library_kernels.attend, kernels, softmax(kv_bias=sj.KVBias()), params=params))
  with jax.numpy_rank_promotion('raise'), jax.numpy_dtype_promotion('strict'):
    traced = jax.jit(gradient(jax.jit(attend))).trace(*shapes(kv_heads=2))
  assert len(traced.out_info) == 3


@pytest.mark.parametrize('kv_heads', [8, 2])
@pytest.mark.parametrize('mask', MASKS, ids=str)
def test_splash_lowers_for_tpus(mask, kv_heads):
  f = functools.partial(library_kernels.splash, softmax(mask=mask))
  inputs = shapes(kv_heads=kv_heads)
  lower = lambda f: jax.jit(f).trace(*inputs).lower(lowering_platforms=('tpu',)).as_text()
  assert lower(f).count('custom_call @tpu_custom_call') == 1
  text = lower(gradient(f))
  # One forward and one backward kernel. A window makes tiles small and numerous, and then backward has two.
  assert text.count('custom_call @tpu_custom_call') == (3 if mask.window else 2)
  assert '2048x2048' not in text  # neither T x T scores nor a T x T mask


def test_a_model_on_tpus_trains_by_splash_wherever_it_is_traced():
  """A plan compiles for TPU devices, although this machine has none."""
  device = jax.sharding.AbstractDevice(device_kind='TPU v5e', num_cores=1, platform='tpu')
  mesh = jax.sharding.AbstractMesh((1,), ('data',), (jax.sharding.AxisType.Auto,),
                                   abstract_device=device)
  config = sj.sized('tiny', vocab_size=11)
  library_kernels._splash_kernel.cache_clear()

  def loss(params, tokens):
    with jax.sharding.use_abstract_mesh(mesh):
      assert training_implementation(config, 256) == 'splash'
      return Transformer(config).apply({'params': params}, tokens).sum()

  arguments = parameter_shapes(config), jax.ShapeDtypeStruct((2, 256), jnp.int32)
  text = jax.jit(jax.grad(loss)).trace(*arguments).lower(lowering_platforms=('tpu',)).as_text()
  assert text.count('custom_call @tpu_custom_call') == 2
  assert training_implementation(config, 256) == 'chunked'  # on this machine


@pytest.mark.parametrize('mask, window', [
    (sj.Causal(), 0), (sj.Window(size=256), 256), (sj.Window(size=1), 1), (sj.Window(size=2048), 0)], ids=str)
def test_cudnn_is_called_with_the_mask(monkeypatch, mask, window):
  # While tracing, jax asks for the version of cuDNN, which a CPU installation does not have.
  fused = pytest.importorskip('jax._src.cudnn.fused_attention_stablehlo')
  monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91002)
  f, inputs = functools.partial(library_kernels.cudnn, softmax(mask=mask)), shapes(kv_heads=2)
  text = jax.jit(gradient(f)).trace(*inputs).lower(lowering_platforms=('cuda',)).as_text()
  assert '2048x2048' not in text
  calls = dict(re.findall(r'custom_call @(\S+?)\(.*?backend_config = "(.*?)"[,}]', text))
  assert set(calls) == {'__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'}
  for config in calls.values():
    config = json.loads(config.replace(r'\22', '"'))['cudnn_fmha_backend_config']
    assert (config['mask_type'], config['sliding_window_length']) == ('CAUSAL', window)
    assert config['fmha_scale'] == pytest.approx(1 / math.sqrt(96)) and config['dropout_rate'] == 0


@pytest.mark.parametrize('mask', [sj.Causal(), sj.Window(size=1), sj.Window(size=7),
                                  sj.Window(size=30), sj.Window(size=31)], ids=str)
def test_cudnn_gets_arguments_that_mean_the_reference(monkeypatch, mask):
  """jax's other implementation of the same function defines what the arguments mean."""
  original, asked = jax.nn.dot_product_attention, []

  def xla(*args, implementation, **kwargs):
    asked.append(implementation)
    return original(*args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', xla)
  spec, inputs = softmax(mask=mask), random_heads(30, 4, 2)
  ours = value_and_grads(functools.partial(library_kernels.cudnn, spec), inputs)
  expected = value_and_grads(by_definition(spec), inputs)
  assert asked == ['cudnn']
  for x, y in zip(ours, expected, strict=True):  # float32 rounding; some gradients vanish
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


CUDNN = (library_kernels.cudnn_unsupported, 'cuda'),
SPLASH = (library_kernels.splash_unsupported, 'tpu'),
BOTH = CUDNN + SPLASH
CPU = tuple((unsupported, 'cpu') for unsupported, _ in BOTH)


@pytest.mark.parametrize('kernels, slots, sizes, reason', [
    (BOTH, dict(similarity=sj.CappedExp()), {}, r'similarity must be Exp\(\), not CappedExp\(cap=50.0\)'),
    (BOTH, dict(normalizer=sj.PNorm(p=2.0)), {}, r'normalizer must be RowSum\(\), not PNorm\(p=2.0\)'),
    (BOTH, dict(position=sj.Alibi()), {}, r'takes no bias on the scores, and Alibi\(\) adds'),
    (CUDNN, dict(mask=sj.Prefix(length=3)), {},
     r'the masks Causal\(\) and Window\(\), not Prefix\(length=3\)'),
    (CUDNN, {}, dict(dtype=jnp.float32),
     'all in bfloat16 or all in float16, not float32 with float32'),
    (CUDNN, {}, dict(head_dim=136), 'a multiple of 8 up to 128, not 136'),
    (CUDNN, {}, dict(length=1), 'refuses a mask for a single token'),
    (SPLASH, {}, dict(dtype=jnp.float16),
     'all in bfloat16 or all in float32, not float16 with float16'),
    (SPLASH, {}, dict(head_dim=264), 'a head dimension up to 256, not 264'),
    (SPLASH, {}, dict(length=2000), 'a length that is a multiple of 128, not 2000'),
    (BOTH, dict(mask=Mask()), {}, r'Causal\(\).* not Mask\('), (CPU, {}, {}, 'not cpu'),
    # Components that act before or after the softmax are allowed.
    (BOTH, dict(position=sj.Rope(), normalizer=sj.RowSum(scale=0.2)), {}, None),
    (BOTH, dict(kv_bias=sj.SinkLogit()), {}, None),
    (BOTH, dict(kv_bias=sj.VBias(), feature_map=sj.Mlp(), qk_norm=sj.QKNorm()), {}, None),
    (BOTH, dict(mask=sj.Window(size=3)), {}, None), (CUDNN, {}, dict(length=333, dtype=jnp.float16), None),
    (SPLASH, {}, dict(length=128, head_dim=100, dtype=jnp.float32), None)])
def test_what_is_refused_says_why(kernels, slots, sizes, reason):
  for unsupported, platform in kernels:
    told = unsupported(softmax(**slots), *shapes(kv_heads=2, **sizes)[:2], platform)
    assert told is None if reason is None else re.search(reason, told or ''), told
