"""Our attention kernels, compiled for their devices."""

import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sink_jax as sj
import sink_jax.kernels
from tests.compile.targets import compile_for, lowered_text, memory, ptx_report, struct

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason='needs jax 0.11.2')
SPECS = {
  'softmax': {},
  'sigmoid': dict(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized()),
  'sigmoid-normalized': dict(similarity=sj.Sigmoid(), normalizer=sj.RowSum(eps=1e-8)),
  'relu': dict(similarity=sj.Relu(), normalizer=sj.Count()),
  'p-norm': dict(normalizer=sj.PNorm(p=2.0)),
  'elu': dict(similarity=sj.EluPlusOne(), normalizer=sj.RowSum(eps=1e-8)),
  'identity': dict(similarity=sj.Linear(), normalizer=sj.AbsFloor()),
  'capped': dict(similarity=sj.CappedExp()),
  'alibi': dict(position=sj.Alibi()),
  'relative': dict(position=sj.Relative()),
  'window': dict(mask=sj.Window(size=256)),
  'prefix': dict(mask=sj.Prefix(length=5)),
  'k-bias': dict(kv_bias=sj.KBias()),
}
SPECS = {name: sj.AttentionSpec(**components) for name, components in SPECS.items()}


def arguments(spec, batch, heads, length, head_dim, kv_heads=None, dtype='bfloat16'):
  """q, k, v, the parameters of the spec's components, and a weight for the output."""
  kv_heads = kv_heads or heads
  q, kv = (struct(batch, length, n, head_dim, dtype=dtype) for n in (heads, kv_heads))
  params = jax.tree.map(
    lambda p: struct(*p.shape, dtype=jnp.float32),
    spec.params(sj.Dims(heads, kv_heads, head_dim)),
    is_leaf=lambda x: isinstance(x, sj.Param),
  )
  return q, kv, kv, params, struct(*q.shape, dtype=jnp.float32)


SHAPES = {  # B, H, T, Dh
  '60m': (8, 8, 2048, 96),
  '1b': (8, 16, 2048, 128),
  'narrow': (8, 8, 2048, 64),
  'wide': (1, 8, 2048, 256),
  'long': (1, 8, 32768, 128),
  'odd': (2, 8, 1000, 64),
  'grouped': (1, 32, 8192, 128, 8),
  'float32': (2, 8, 2048, 64, 8, 'float32'),
}

# Every spec at one shape, and every shape with one spec. --full runs the rest of the product.
CASES = [
  pytest.param(
    SPECS[spec],
    SHAPES[shape],
    id=f'{spec}-{shape}',
    marks=() if spec == 'softmax' or shape == '60m' else pytest.mark.full,
  )
  for spec in SPECS
  for shape in SHAPES
]


def gradients(spec: sj.AttentionSpec, implementation: str = 'pallas') -> Callable[..., Any]:
  """sum(out * w) and its gradients, which need the forward and the backward kernels."""

  def loss(q, k, v, params, w):
    out = sj.attend(spec, q, k, v, params, implementation=implementation)
    return jnp.sum(out.astype(jnp.float32) * w)

  return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


def checked(target, f, *args):
  """Compiles a function, checks its kernels, and returns the memory that it needs."""
  if target == 'h200':
    compiled, kernels = ptx_report(f, *args)
    ours = [k for k in kernels if k.pallas]
    assert ours and not [k for k in ours if k.serialized or k.spilled_bytes > 16]
    assert all(k.wgmma for k in ours) or args[0].dtype == jnp.float32
  else:
    compiled = compile_for(target, f, *args)
    assert 'tpu_custom_call' in compiled.as_text()
  return memory(compiled)


@pytest.mark.parametrize('spec, shape', CASES)
def test_attention_compiles(target, spec, shape):
  checked(target, gradients(spec), *arguments(spec, *shape))


# A process compiles equal kernels only once, and the extra key acts outside them: k-bias is left
# out.
MOSAIC = [
  case
  for case in CASES
  if case.values[1] not in (SHAPES['wide'], SHAPES['float32'])
  and case.values[0] not in (SPECS['relative'], SPECS['k-bias'])
]


@needs_mosaic
@pytest.mark.parametrize('spec, shape', MOSAIC)
def test_mosaic_kernels_compile(h200, spec, shape, monkeypatch):
  monkeypatch.setattr('sink_jax.kernels.dispatch.platform', lambda: 'cuda')
  _, kernels = ptx_report(gradients(spec, 'mosaic'), *arguments(spec, *shape))
  ours = [k for k in kernels if k.pallas]
  assert len(ours) == 3 and all(k.wgmma and not k.serialized for k in ours)
  # At 128 channels the sums of dk and dv take half of the registers. 96 channels are padded to 128.
  limits = {k.name: 128 if 'dkv' in k.name and shape[3] > 64 else 16 for k in ours}
  assert not [k for k in ours if k.spilled_bytes > limits[k.name]]


@pytest.mark.parametrize('kv_bias', [sj.NoBias(), sj.KBias(), sj.KVBias(), sj.SinkLogit()], ids=str)
def test_splash_compiles_with_an_extra_key(target, kv_bias, monkeypatch):
  if target == 'h200':
    pytest.skip('splash is for TPUs')
  monkeypatch.setattr('sink_jax.kernels.dispatch.platform', lambda: 'tpu')
  spec = sj.AttentionSpec(kv_bias=kv_bias)
  checked(target, gradients(spec, 'splash'), *arguments(spec, *SHAPES['60m']))


def test_memory_is_linear_in_the_length(target):
  short, long = (
    checked(target, gradients(SPECS['k-bias']), *arguments(SPECS['k-bias'], 1, 8, length, 64)).total
    for length in (32768, 131072)
  )
  # T x T memory would grow 16 times. On a TPU a growth above 4 means that some of the short one is
  # in VMEM.
  assert long < 8 * short


@pytest.mark.parametrize(
  'platform, call, implementation',
  [
    ('tpu', 'tpu_custom_call', 'pallas'),
    ('cuda', 'triton', 'pallas'),
    pytest.param('cuda', 'mosaic_gpu', 'mosaic', marks=needs_mosaic),
  ],
)
@pytest.mark.parametrize(
  'spec',
  [
    pytest.param(
      SPECS[name],
      id=name,
      marks=() if name in ('softmax', 'sigmoid', 'k-bias') else pytest.mark.full,
    )
    for name in SPECS
  ],
)
def test_attention_lowers(platform, call, implementation, spec, monkeypatch):
  if implementation == 'mosaic' and spec == SPECS['relative']:
    pytest.skip('Mosaic GPU has no floor function')
  monkeypatch.setattr('sink_jax.kernels.dispatch.platform', lambda: platform)
  text = lowered_text(platform, gradients(spec, implementation), *arguments(spec, *SHAPES['60m']))
  assert len(re.findall(f'custom_call @.*{call}', text)) == 3  # forward, dq, dk with dv


@pytest.mark.parametrize('platform, others', [('tpu', 'flash_gpu'), ('cuda', 'flash_tpu')])
def test_no_other_platform_is_traced(platform, others, monkeypatch):
  monkeypatch.setitem(sys.modules, f'sink_jax.kernels.{others}', None)
  monkeypatch.delattr(sink_jax.kernels, others, raising=False)
  lowered_text(platform, gradients(SPECS['softmax']), *arguments(SPECS['softmax'], *SHAPES['60m']))
