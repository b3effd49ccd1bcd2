"""The Pallas kernels for TPUs and for GPUs, interpreted: statistics, vmap, races, imports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

import sink_jax as sj
from sink_jax.attention.reference import safe_power, scores
from sink_jax.attention.spec import transform_qk
from sink_jax.kernels import flash, flash_tpu
from sink_jax.kernels.epilogue import PartialAttention
from tests.attention_checks import with_gradients, worst_error
from tests.attention_specs import random_inputs
from tests.kernels.test_implementations import FLOAT32, small_tiles
from tests.train.runs import run_python


def plain_rows(spec, q, k, v):
  """PartialAttention written as formulas, for automatic differentiation."""
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
  i = jnp.arange(q.shape[1])
  s, power = scores(spec, q, k, i, i), spec.normalizer.power
  keep = spec.mask.keep(i[:, None], i[None, :])
  if spec.similarity.kind == 'exponential':
    s = jnp.where(keep, s, -jnp.inf)
    stat, power_stat = (jax.nn.logsumexp(p * s, -1) for p in (1, power))
    f = jnp.exp(s - stat[..., None])
  else:
    f = jnp.where(keep, spec.similarity(s), 0)
    total = 0 * f if power is None else f
    if power not in (None, 1):
      total = jnp.where(keep, safe_power(f, power), 0)
    stat = power_stat = total.sum(-1)
  return PartialAttention(jnp.einsum('bhlt,bthd->blhd', f, v), stat, power_stat)


# One row for each path through a tile: powers, caps, biases, and what is summed. Components that
# act outside the tile make no difference.
@pytest.mark.parametrize(
  'kernels, components',
  [
    ('tpu', dict(similarity='CappedExp(cap=1.5)', normalizer='PNorm(p=2.0)')),
    ('tpu', dict(similarity='Linear()', normalizer='AbsFloor()')),
    ('cuda', dict(similarity='CappedExp(cap=1.5)', position='Alibi()')),
    ('cuda', dict(similarity='Sigmoid()', normalizer='PNorm(p=0.5)')),
  ],
  ids=str,
)
def test_rows_and_all_cotangents(kernels, components, monkeypatch):
  """Rows, statistics and all cotangents, against formulas on T x T arrays."""
  small_tiles(monkeypatch, kernels)
  spec = sj.AttentionSpec(**components)
  q, k, v, _ = random_inputs(spec, batch=2, length=19, heads=4, kv_heads=2, head_dim=24)

  @jax.jit
  def both(*inputs):
    parts = (functools.partial(rows, spec) for rows in (flash.rows, plain_rows))
    return [with_gradients(rows, *inputs) for rows in parts]

  assert worst_error(*both(*transform_qk(spec, q, k, {}), v)) < FLOAT32


def test_vmap_is_a_larger_batch(monkeypatch):
  small_tiles(monkeypatch, 'cuda')
  spec = sj.AttentionSpec(position=sj.Alibi(), kv_bias=sj.KBias())
  sizes = dict(batch=2, length=9, heads=2, kv_heads=1, head_dim=8)
  q, k, v, params = random_inputs(spec, **sizes)
  other_q, _, other_v, _ = random_inputs(spec, seed=1, **sizes)

  def loss(q, k, v):
    out = sj.attend(spec, q, k, v, params, implementation='pallas')
    return (out**2).sum()

  slope = jax.grad(loss)
  expected = jax.jit(slope)(q, k, v), jax.jit(slope)(other_q, k, other_v)
  # One array is not mapped, as model parameters would not be.
  mapped = jax.jit(jax.vmap(slope, (0, None, 1), 2))
  found = mapped(np.stack([q, other_q]), k, np.stack([v, other_v], 1))
  np.testing.assert_allclose(found, np.stack(expected, 2), rtol=1e-6)


def test_tpu_kernels_neither_race_nor_read_what_nobody_wrote(monkeypatch):
  small_tiles(monkeypatch, 'tpu')
  mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')
  softmax = sj.AttentionSpec(mask='Window(size=6)')
  sums = sj.AttentionSpec('Linear()', 'AbsFloor()')
  q, k, v, _ = random_inputs(softmax, length=17, heads=2, kv_heads=1, head_dim=8)

  def run(kernels, spec, *inputs):
    program = functools.partial(kernels, spec, jnp.zeros(2), interpret=mode)
    return jax.jit(program)(*inputs)

  for spec in (softmax, sums):
    out, stat, _ = run(flash_tpu.forward, spec, q, k, v)
    expected = jax.jit(functools.partial(plain_rows, spec))(q, k, v)
    np.testing.assert_allclose(out, expected.out_BxTxHxDh, rtol=1e-4, atol=1e-5)
    if spec == softmax:
      results = run(flash_tpu.backward, spec, q, k, v, q, stat, 0 * stat)
      assert all(np.isfinite(x).all() for x in results)
    assert not interpreter.races.races_found


def test_with_an_older_jax_no_kernel_runs_and_it_is_said_once(monkeypatch, caplog):
  x = jax.ShapeDtypeStruct((1, 8, 2, 64), 'bfloat16')
  attend = lambda *x, **options: sj.attend(sj.AttentionSpec(), *x, **options)
  monkeypatch.setattr('sink_jax.kernels.dispatch.platform', lambda: 'cuda')
  monkeypatch.setattr(jax, '__version_info__', (0, 7, 2))
  for _ in range(2):
    jax.eval_shape(lambda *x: attend(*x), x, x, x)
  [record] = caplog.records
  assert record.levelname == 'WARNING'
  assert 'chunked on cuda; not cudnn: it needs jax' in record.message
  for name in ('pallas', 'mosaic', 'cudnn', 'splash'):
    with pytest.raises(NotImplementedError, match='it needs jax 0.10'):
      jax.eval_shape(functools.partial(attend, implementation=name), x, x, x)


# jax may drop Triton, so only a program for a GPU may need it. The same holds for the TPU compilers
# and TPU programs.
BLOCKED = """
import sys
for name in ('', '.triton', '.tpu', '.mosaic_gpu', '.ops.tpu.splash_attention'):
  assert f'jax.experimental.pallas{name}' not in sys.modules
  sys.modules[f'jax.experimental.pallas{name}'] = None
import jax, numpy as np, sink_jax as sj
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import Transformer
x = np.ones((1, 9, 2, 8), np.float32)
spec, config = sj.AttentionSpec(), sj.sized('tiny', vocab_size=11)
loss = lambda p: Transformer(config).apply({'params': p}, np.zeros((1, 9), np.int32)).sum()
jax.jit(lambda x: sj.attend(spec, x, x, x)).lower(x)
jax.jit(lambda x: sj.streaming_importance(spec, x, x)).lower(x)
jax.jit(jax.grad(loss)).lower(parameter_shapes(config))
try:
  jax.jit(lambda x: sj.attend(spec, x, x, x, implementation='pallas')).lower(x)
except ImportError:
  print('only the kernels need it')
"""


def test_nothing_but_its_own_program_needs_a_kernel_compiler():
  assert run_python('-c', BLOCKED) == 'only the kernels need it\n'
