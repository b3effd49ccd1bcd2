"""The Pallas kernels for TPUs and for GPUs, interpreted: statistics, vmap, races, imports."""

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
from tests.attention_specs import PAPER, random_inputs
from tests.kernels.test_implementations import FLOAT32, KERNELS, small_tiles
from tests.train.runs import run_python


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
  """Prepares each of the two families of kernels."""
  small_tiles(monkeypatch, request.param)


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


CAPPED = {
  'capped p-norm': sj.AttentionSpec('CappedExp(cap=1.5)', 'PNorm(p=2.0)'),
  'capped': sj.AttentionSpec('CappedExp(cap=1.5)', position='Alibi()'),
}


# One spec for each path through a tile. Components that act outside the tile make no difference.
@pytest.mark.every(4)
@pytest.mark.parametrize(
  'name',
  [
    'softmax',
    'p-norm softmax 1/2 (Figure 29)',
    'sigmoid (Table 15)',
    'alibi (Table 3)',
    'normalized sigmoid (Table 15)',
    'p-norm sigmoid 2 (Figure 29)',
    'normalized identity (Table 15)',
    *CAPPED,
  ],
)
def test_rows_and_all_cotangents(kernels, name):
  """Rows, statistics and all cotangents, against formulas on T x T arrays."""
  spec = (PAPER | CAPPED)[name]
  q, k, v, params = random_inputs(spec, batch=2, length=19, heads=4, kv_heads=2, head_dim=24)
  inputs = *transform_qk(spec, q, k, params), v
  found, expected = (
    with_gradients(lambda *x, rows=rows: rows(spec, *x), *inputs)
    for rows in (flash.rows, plain_rows)
  )
  assert worst_error(found, expected) < FLOAT32


def test_vmap_is_a_larger_batch(kernels):
  spec = sj.AttentionSpec(position=sj.Alibi(), kv_bias=sj.KBias())
  q, k, v, params = random_inputs(spec, batch=4, length=9, heads=2, kv_heads=1, head_dim=8)
  split = lambda x: x.reshape(2, 2, *x.shape[1:])
  f = jax.grad(
    lambda q, k, v: (sj.attend(spec, q, k, v, params, implementation='pallas') ** 2).sum()
  )
  # One array is not mapped, as model parameters would not be.
  one = jax.vmap(f, (0, None, 1), 2)(split(q), k[:2], jnp.moveaxis(split(v), 0, 1))
  expected = jnp.stack([f(split(q)[n], k[:2], split(v)[n]) for n in range(2)], 2)
  np.testing.assert_allclose(one, expected, rtol=1e-6)


def test_tpu_kernels_neither_race_nor_read_what_nobody_wrote(monkeypatch):
  small_tiles(monkeypatch, 'tpu')
  mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')
  for spec in (
    sj.AttentionSpec(mask=sj.Window(size=6)),
    sj.AttentionSpec('Linear()', 'AbsFloor()'),
  ):
    q, k, v, _ = random_inputs(spec, length=21, heads=2, kv_heads=1, head_dim=8)
    slopes = jnp.zeros(2)
    out, stat, _ = flash_tpu.forward(spec, slopes, q, k, v, interpret=mode)
    np.testing.assert_allclose(out, plain_rows(spec, q, k, v)[0], rtol=1e-4, atol=1e-5)
    rows = (stat, 0 * stat) if spec.similarity.kind == 'exponential' else (0 * stat,)
    results = flash_tpu.backward(spec, slopes, q, k, v, q, *rows, interpret=mode)
    assert all(np.isfinite(x).all() for x in results)
    assert not interpreter.races.races_found


def test_with_an_older_jax_no_kernel_runs_and_it_is_said_once(monkeypatch, caplog):
  x = jnp.zeros((1, 8, 2, 64), 'bfloat16')
  monkeypatch.setattr('sink_jax.kernels.dispatch.platform', lambda: 'cuda')
  monkeypatch.setattr(jax, '__version_info__', (0, 7, 2))
  for _ in range(2):
    sj.attend(sj.AttentionSpec(), x, x, x)
  [record] = caplog.records
  assert (
    record.levelname == 'WARNING' and 'chunked on cuda; not cudnn: it needs jax' in record.message
  )
  for name in ('pallas', 'mosaic', 'cudnn', 'splash'):
    with pytest.raises(NotImplementedError, match='it needs jax 0.10'):
      sj.attend(sj.AttentionSpec(), x, x, x, implementation=name)


@pytest.mark.full
def test_slots_of_a_user_run_everywhere():
  run_python('-m', 'tests.kernels.own_slots')


# jax may drop Triton, so only a program for a GPU may need it. The same holds for the TPU compilers
# and TPU programs.
BLOCKED = """
import sys
for name in ('', '.triton', '.tpu', '.mosaic_gpu', '.ops.tpu.splash_attention'):
  assert f'jax.experimental.pallas{name}' not in sys.modules
  sys.modules[f'jax.experimental.pallas{name}'] = None
import jax, numpy as np, sink_jax as sj
from sink_jax.models.transformer import Transformer, init_params
x = np.ones((1, 9, 2, 8), np.float32)
sj.attend(sj.AttentionSpec(), x, x, x)
sj.streaming_importance(sj.AttentionSpec(), x, x)
config = sj.sized('tiny', vocab_size=11)
loss = lambda p: Transformer(config).apply({'params': p}, np.zeros((1, 9), np.int32)).sum()
assert np.isfinite(jax.jit(jax.grad(loss))(init_params(config, 0))['embed']).all()
try:
  sj.attend(sj.AttentionSpec(), x, x, x, implementation='pallas')
except ImportError:
  print('only the kernels need it')
"""


def test_nothing_but_its_own_program_needs_a_kernel_compiler():
  assert run_python('-c', BLOCKED) == 'only the kernels need it\n'
