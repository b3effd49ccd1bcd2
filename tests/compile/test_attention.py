"""Our attention kernels, compiled for the devices that they are for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sink_jax as sj
from tests.compile.ptx import ptx_report
from tests.compile.targets import compile_for, lowered_text, memory, struct

SPECS = {
    'softmax': {},
    'sigmoid': dict(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized()),
    'sigmoid-normalized': dict(similarity=sj.Sigmoid(), normalizer=sj.RowSum(eps=1e-8)),
    'relu': dict(similarity=sj.Relu(), normalizer=sj.Count()),
    'p-norm': dict(normalizer=sj.PNorm(p=2.0)),
    'elu': dict(similarity=sj.EluPlusOne(), normalizer=sj.RowSum(eps=1e-8)),
    'identity': dict(similarity=sj.Linear(), normalizer=sj.AbsFloor()),
    'softpick': dict(similarity=sj.Softpick(), normalizer=sj.AbsSum()),
    'capped': dict(similarity=sj.CappedExp()),
    'alibi': dict(position=sj.Alibi()),
    'relative': dict(position=sj.Relative()),
    'window': dict(mask=sj.Window(size=256)),
    'prefix': dict(mask=sj.Prefix(length=5)),
    'k-bias': dict(kv_bias=sj.KBias()),
}
SPECS = {name: sj.AttentionSpec(**components) for name, components in SPECS.items()}


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of queries, keys and values."""

  batch: int
  heads: int
  length: int
  head_dim: int
  kv_heads: int | None = None
  dtype: str = 'bfloat16'

  def arrays(self):
    """q, k and v without their values."""
    one = lambda heads: struct(self.batch, self.length, heads, self.head_dim, dtype=self.dtype)
    return one(self.heads), *(one(self.kv_heads or self.heads),) * 2

  def params(self, spec):
    """The parameters of the components of the spec."""
    dims = sj.Dims(self.heads, self.kv_heads or self.heads, self.head_dim)
    return jax.tree.map(lambda p: struct(*p.shape, dtype=jnp.float32), spec.params(dims),
                        is_leaf=lambda x: isinstance(x, sj.Param))


SHAPES = {
    '60m': Shape(8, 8, 2048, 96),
    '1b': Shape(8, 16, 2048, 128),
    'narrow': Shape(8, 8, 2048, 64),
    'wide': Shape(1, 8, 2048, 256),
    'long': Shape(1, 8, 32768, 128),
    'odd': Shape(2, 8, 1000, 64),
    'grouped': Shape(1, 32, 8192, 128, kv_heads=8),
    'float32': Shape(2, 8, 2048, 64, dtype='float32'),
}

# Every spec at one shape, every shape with one spec; the rest of the product is in --full.
CASES = [pytest.param(SPECS[spec], SHAPES[shape], id=f'{spec}-{shape}',
                      marks=() if spec == 'softmax' or shape == '60m' else pytest.mark.full)
         for spec in SPECS for shape in SHAPES]


def gradients(spec: sj.AttentionSpec) -> Callable[..., Any]:
  """sum(out * w) and its gradients: the forward and the backward kernels."""
  def loss(q, k, v, params, w):
    out = sj.attend(spec, q, k, v, params, implementation='pallas')
    return jnp.sum(out.astype(jnp.float32) * w)

  return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


def importance(spec):
  return lambda q, k, params: sj.streaming_importance(spec, q, k, params, implementation='pallas')


def arguments(spec, shape):
  q, k, v = shape.arrays()
  return q, k, v, shape.params(spec), struct(*q.shape, dtype=jnp.float32)


def importance_arguments(spec, shape):
  q, k, _ = shape.arrays()
  return q, k, shape.params(spec)


def checked(target, note, f, *args):
  """Compiles a function, checks its kernels, and returns the memory that it needs."""
  if target == 'h200':
    compiled, kernels = ptx_report(f, *args)
    ours = [k for k in kernels if k.pallas]
    for kernel in ours:
      note(target=target, **kernel._asdict())
    assert ours and not [k for k in ours if k.serialized or k.spilled_bytes > 16]
    assert all(k.wgmma for k in ours) or args[0].dtype == jnp.float32
  else:
    compiled = compile_for(target, f, *args)
    assert 'tpu_custom_call' in compiled.as_text()
  note(target=target, **memory(compiled)._asdict())
  return memory(compiled)


@pytest.mark.parametrize('spec, shape', CASES)
def test_attention_compiles(target, spec, shape, note):
  checked(target, note, gradients(spec), *arguments(spec, shape))


@pytest.mark.parametrize('spec, shape', CASES)
def test_importance_compiles(target, spec, shape, note):
  checked(target, note, importance(spec), *importance_arguments(spec, shape))


def test_memory_is_linear_in_the_length(target, note):
  spec = SPECS['k-bias']
  for f, args in ((gradients, arguments), (importance, importance_arguments)):
    short, long = (checked(target, note, f(spec), *args(spec, Shape(1, 8, length, 64))).total
                   for length in (32768, 131072))
    # T x T would be 16 times; more than 4 times where a TPU has some of the short one in VMEM.
    assert long < 8 * short, f


@pytest.mark.parametrize('platform, call', [('tpu', 'tpu_custom_call'), ('cuda', 'triton')])
@pytest.mark.parametrize('spec', [
    pytest.param(SPECS[name], id=name, marks=() if name in ('softmax', 'sigmoid', 'k-bias')
                 else pytest.mark.full) for name in SPECS])
def test_attention_lowers(platform, call, spec):
  shape = SHAPES['60m']
  for f, args in ((gradients, arguments), (importance, importance_arguments)):
    assert call in lowered_text(platform, f(spec), *args(spec, shape))
