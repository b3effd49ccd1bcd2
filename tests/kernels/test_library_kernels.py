"""Softmax by cuDNN and splash: the programs in which their kernels are called, and with what."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.foreign import standard_promotion
from sink_jax.kernels import library_kernels
from sink_jax.kernels.library_kernels import CUDNN, SPLASH
from sink_jax.models.attention import training_implementation
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import Transformer
from tests.kernels.test_implementations import MASKS, softmax


def shapes(length=2048, heads=8, kv_heads=8, head_dim=96, dtype=jnp.bfloat16):
  of = lambda n: jax.ShapeDtypeStruct((2, length, n, head_dim), dtype)
  return of(heads), of(kv_heads), of(kv_heads)


@pytest.fixture
def cudnn_here(monkeypatch):
  """While tracing, jax asks for the version of cuDNN, which a CPU installation does not have."""
  fused = pytest.importorskip('jax._src.cudnn.fused_attention_stablehlo')
  monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91002)


def lowered(f, inputs, platform):
  traced = jax.jit(f).trace(*inputs)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def gradient(f):
  loss = lambda *inputs: f(*inputs).astype(jnp.float32).sum()
  return jax.grad(loss, argnums=(0, 1, 2))


def test_splash_scales_queries_without_a_common_error(monkeypatch):
  normal = np.random.default_rng(0).standard_normal((2, 128, 1, 48))
  low = jnp.asarray(normal, jnp.bfloat16)
  monkeypatch.setattr(library_kernels, '_splash_kernel', lambda *args: lambda q, k, v: q)
  scaled = library_kernels.splash(softmax(), low, low, low)
  scaled, q = np.asarray(scaled, np.float64), np.asarray(low, np.float64)
  factor = (scaled * q).sum() / (q * q).sum() * math.sqrt(48)
  # 12288 independent roundings of at most 2^-9 leave about 1e-5 in the mean. A factor rounded to
  # bfloat16 would change every score by more than 1e-3.
  assert abs(factor - 1) < 1e-4
  rounded = float(jnp.bfloat16(1 / math.sqrt(48)))
  assert abs(rounded * math.sqrt(48) - 1) > 1e-3


@pytest.mark.parametrize(
  'mask, length, options, block',
  [
    (sj.Causal(), 2048, dict(head_dim=128), 1024),
    (sj.Causal(), 1152, dict(head_dim=64), 384),
    (sj.Causal(), 2048, dict(head_dim=192), 512),
    (sj.Causal(), 2048, dict(head_dim=64, dtype=jnp.float32), 512),
    (sj.Window(size=32), 2048, {}, 256),
    (sj.Window(size=600), 2048, {}, 512),
  ],
  ids=str,
)
def test_splash_tiles_divide_the_length_and_fit(mask, length, options, block):
  assert library_kernels._block(mask, shapes(length, **options)[0]) == block


CALL = r'custom_call @(tpu_custom_call|__cudnn[^(]*)\(.*?backend_config = "(.*?)"[,}]'


@pytest.mark.parametrize(
  'kernels, platform, calls',
  [
    (SPLASH, 'tpu', 3),
    (CUDNN, 'cuda', 2),
  ],
  ids=['splash', 'cudnn'],
)
def test_an_extra_key_lowers_to_the_kernels_of_plain_softmax(cudnn_here, kernels, platform, calls):
  spec = softmax(kv_bias=sj.SinkLogit(), mask=sj.Window(size=256))
  params = {'kv_bias': {'logit': jnp.zeros(8)}}
  with_key = functools.partial(library_kernels.attend, kernels, spec, params=params)
  plain = functools.partial(kernels.rows, softmax(mask=spec.mask))
  programs = []
  for attend in (with_key, plain):
    text = lowered(gradient(attend), shapes(kv_heads=2), platform)
    assert '2048x2048' not in text
    calls_of = re.findall(CALL, text)
    # The configs of splash hold names of its functions.
    programs.append(sorted(calls_of if platform == 'cuda' else [name for name, _ in calls_of]))
  assert programs[0] == programs[1] and len(programs[0]) == calls
  if platform == 'cuda':
    for _, text in programs[0]:
      config = json.loads(text.replace(r'\22', '"'))['cudnn_fmha_backend_config']
      assert (config['mask_type'], config['sliding_window_length']) == ('CAUSAL', 256)
      assert config['fmha_scale'] == pytest.approx(1 / math.sqrt(96))
      assert config['dropout_rate'] == 0


@pytest.mark.parametrize('kernels', [SPLASH, CUDNN], ids=['splash', 'cudnn'])
def test_a_gradient_in_a_program_that_forbids_promotion(cudnn_here, kernels):
  """The gradient of a jitted function calls rules of `custom_vjp` after the function returned."""
  extra = jnp.zeros((8, 96))
  params, spec = {'kv_bias': {'key': extra, 'value': extra}}, softmax(kv_bias=sj.KVBias())
  attend = functools.partial(library_kernels.attend, kernels, spec, params=params)
  attend = standard_promotion()(attend)
  with jax.numpy_rank_promotion('raise'), jax.numpy_dtype_promotion('strict'):
    traced = jax.jit(gradient(jax.jit(attend))).trace(*shapes(kv_heads=2))
  assert len(traced.out_info) == 3


@pytest.mark.parametrize('mask', MASKS, ids=str)
def test_splash_lowers_for_tpus(mask):
  f = functools.partial(library_kernels.splash, softmax(mask=mask))
  inputs = shapes(kv_heads=2)
  assert lowered(f, inputs, 'tpu').count('custom_call @tpu_custom_call') == 1
  text = lowered(gradient(f), inputs, 'tpu')
  # One forward and one backward kernel. A window makes tiles small and numerous, and then backward
  # has two.
  assert text.count('custom_call @tpu_custom_call') == (3 if mask.window else 2)
  assert '2048x2048' not in text  # neither T x T scores nor a T x T mask


def test_a_model_on_tpus_trains_by_splash_wherever_it_is_traced():
  """A plan compiles for TPU devices, although this machine has none."""
  device = jax.sharding.AbstractDevice(device_kind='TPU v5e', num_cores=1, platform='tpu')
  mesh = jax.sharding.AbstractMesh(
    (1,), ('data',), (jax.sharding.AxisType.Auto,), abstract_device=device
  )
  config = sj.sized('tiny', vocab_size=11)
  library_kernels._splash_kernel.cache_clear()

  def loss(params, tokens):
    with jax.sharding.use_abstract_mesh(mesh):
      assert training_implementation(config, 256) == 'splash'
      return Transformer(config).apply({'params': params}, tokens).sum()

  arguments = parameter_shapes(config), jax.ShapeDtypeStruct((2, 256), jnp.int32)
  text = lowered(jax.grad(loss), arguments, 'tpu')
  assert text.count('custom_call @tpu_custom_call') == 2
  assert training_implementation(config, 256) == 'chunked'  # on this machine
