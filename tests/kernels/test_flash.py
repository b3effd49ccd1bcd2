"""The Pallas kernels for TPUs and for GPUs, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

import sink_jax as sj
from sink_jax.attention.reference import safe_power, scores
from sink_jax.attention.spec import transform_qk
from sink_jax.kernels import flash, flash_gpu, flash_tpu
from sink_jax.kernels.epilogue import PartialAttention
from tests.attention_checks import check_at_once
from tests.attention_specs import PAPER, pairwise_specs, random_inputs
from tests.train.runs import run_python

KERNELS = ['tpu', 'cuda']
RUNS = {name: spec for name, spec in PAPER.items() if name != 'softpick'}


def use(name, monkeypatch, block=8, other=4):
  """Makes tiles so small that a few tokens need many of them."""
  monkeypatch.setattr(flash, '_INTERPRETED', name)
  monkeypatch.setattr(flash_tpu, '_BLOCK', block)
  monkeypatch.setattr(flash_tpu, '_LANES', block)
  monkeypatch.setattr(flash_gpu, '_FLOAT32', flash_gpu.Blocks(block, other, 4, 1))
  jax.clear_caches()  # an eager call would reuse a program with other tiles


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
  """Prepares each of the two families of kernels."""
  use(request.param, monkeypatch)
  return request.param


def value_and_grad(implementation, spec, *inputs):
  weight = np.random.default_rng(2).standard_normal(inputs[0].shape)
  f = lambda *x: jnp.sum(sj.attend(spec, *x, implementation=implementation) * weight)
  return jax.tree.leaves(jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*inputs))


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


# One spec for each path through a tile. Components that act outside the tile make no difference here.
@pytest.mark.every(4)
@pytest.mark.parametrize('name', [
    'softmax', 'p-norm softmax 1/2 (Figure 29)', 'sigmoid (Table 15)', 'alibi (Table 3)',
    'normalized sigmoid (Table 15)', 'p-norm sigmoid 2 (Figure 29)',
    'normalized identity (Table 15)'])
def test_rows_and_all_cotangents(kernels, name):
  """Rows, statistics and all cotangents, against the T x T definition."""
  spec = PAPER[name]
  q, k, v, params = random_inputs(spec, batch=2, length=19, heads=4, kv_heads=2, head_dim=24)
  q, k = transform_qk(spec, q, k, params)
  rng = np.random.default_rng(1)
  cotangents = PartialAttention(rng.standard_normal(q.shape), *rng.standard_normal((2, 2, 4, 19)))
  cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), cotangents)

  def rows_and_cotangents(rows):
    result, pull = jax.vjp(lambda *inputs: rows(spec, *inputs), q, k, v)
    return result, pull(cotangents)

  actual, expected = (jax.jit(rows_and_cotangents, static_argnums=0)(rows)
                      for rows in (flash.rows, plain_rows))
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    # Sums of up to 19 products of float32 numbers, which may cancel.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()) + 1e-7)


def with_kernels(specs, monkeypatch, request):
  """Each spec with one family of kernels, alternately. Under --full each spec with both."""
  for number, spec in enumerate(specs):
    for n, name in enumerate(KERNELS):
      if number % 2 == n or request.config.getoption('--full'):
        use(name, monkeypatch)
        yield spec


@pytest.mark.every(6)
@pytest.mark.parametrize('part', range(6))
def test_paper_variants(part, monkeypatch, request):
  for spec in with_kernels(list(RUNS.values())[part::6], monkeypatch, request):
    check_at_once(spec, 'pallas', length=11, heads=2, kv_heads=1, head_dim=8)
  check_at_once(sj.AttentionSpec(kv_bias=sj.KVBias()), 'pallas', length=1, head_dim=8)


@pytest.mark.full
@pytest.mark.parametrize('part', range(6))
def test_every_pair_of_slot_values(part, monkeypatch, request):
  specs = [spec for spec in pairwise_specs()[0]
           if not isinstance(spec.normalizer, sj.Clipped) and spec.similarity.kind != 'rectified']
  assert len(specs) >= 20
  for spec in with_kernels(specs[part::6], monkeypatch, request):
    check_at_once(spec, 'pallas', length=9, heads=2, head_dim=8)


@pytest.mark.every(3)
@pytest.mark.parametrize('mask', [
    sj.Causal(), sj.Window(size=1), sj.Window(size=5), sj.Prefix(length=6),
    *(pytest.param(mask, marks=pytest.mark.full) for mask in (
        sj.Window(size=99), sj.Prefix(length=1), sj.Prefix(length=99)))], ids=repr)
def test_tiles_and_padding_change_nothing(kernels, mask, monkeypatch):
  spec = sj.AttentionSpec(mask=mask, normalizer=sj.PNorm(p=0.5), position=sj.Alibi())
  q, k, v, _ = random_inputs(spec, length=13, heads=2, head_dim=8)
  expected = value_and_grad('reference', spec, q, k, v)
  for blocks in ((8, 4), (4, 8)):
    use(kernels, monkeypatch, *blocks)
    for a, b in zip(value_and_grad('pallas', spec, q, k, v), expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_vmap_is_a_larger_batch(kernels):
  spec = sj.AttentionSpec(position=sj.Alibi(), kv_bias=sj.KBias())
  q, k, v, params = random_inputs(spec, batch=4, length=9, heads=2, kv_heads=1, head_dim=8)
  split = lambda x: x.reshape(2, 2, *x.shape[1:])
  f = jax.grad(lambda q, k, v: (sj.attend(spec, q, k, v, params, implementation='pallas')**2).sum())
  # One array is not mapped, as model parameters would not be.
  one = jax.vmap(f, (0, None, 1), 2)(split(q), k[:2], jnp.moveaxis(split(v), 0, 1))
  expected = jnp.stack([f(split(q)[n], k[:2], split(v)[n]) for n in range(2)], 2)
  np.testing.assert_allclose(one, expected, rtol=1e-6)


def test_bfloat16_is_rounded_once(kernels, monkeypatch):
  monkeypatch.setattr(flash_gpu, 'BLOCKS', dict.fromkeys(
      flash_gpu.BLOCKS, {256: flash_gpu.Blocks(16, 8, 4, 1)}))
  spec = sj.AttentionSpec('Sigmoid()', 'RowSum(eps=1e-8)')
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in random_inputs(spec, length=40, head_dim=16)[:3])
  exact = sj.attend(spec, *(x.astype(jnp.float32) for x in (q, k, v)), implementation='reference')
  low = sj.attend(spec, q, k, v, implementation='pallas')
  assert low.dtype == jnp.bfloat16
  # q and k are rotated in bfloat16, the weights are rounded before their product with v, and the row is
  # rounded before and after its normalisation: 2^-9 each.
  error = jnp.linalg.norm(low.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
  assert error < 4 * 2**-9


def test_large_scores_stay_exact_and_padding_finite(kernels, monkeypatch):
  """The maximum grows from tile to tile, up to scores whose exponential overflows."""
  spec = sj.AttentionSpec(position=sj.Nope())
  q, k, v, _ = random_inputs(spec, length=21, heads=1, head_dim=8)
  k *= np.linspace(1, 300, 21, dtype=np.float32)[:, None, None]
  for a, b in zip(value_and_grad('pallas', spec, q, k, v), value_and_grad('reference', spec, q, k, v)):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4 * np.abs(b).max())
  # Padding must stay finite under a bias that grows with the position.
  use(kernels, monkeypatch, 64, 64)
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=4.0), position=sj.Relative())
  q, k, v, _ = random_inputs(spec, length=100, heads=1, head_dim=8)
  assert all(np.isfinite(g).all() for g in value_and_grad('pallas', spec, q, k, v))


def test_tpu_kernels_neither_race_nor_read_what_nobody_wrote(monkeypatch):
  use('tpu', monkeypatch)
  mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')
  for spec in (sj.AttentionSpec(mask=sj.Window(size=6)),
               sj.AttentionSpec('Linear()', 'AbsFloor()')):
    q, k, v, _ = random_inputs(spec, length=21, heads=2, kv_heads=1, head_dim=8)
    slopes = jnp.zeros(2)
    out, stat, _ = flash_tpu.forward(spec, slopes, q, k, v, interpret=mode)
    np.testing.assert_allclose(out, plain_rows(spec, q, k, v)[0], rtol=1e-4, atol=1e-5)
    rows = (stat, 0 * stat) if spec.similarity.kind == 'exponential' else (0 * stat,)
    results = flash_tpu.backward(spec, slopes, q, k, v, q, *rows, interpret=mode)
    assert all(np.isfinite(x).all() for x in results)
    assert not interpreter.races.races_found


@pytest.mark.parametrize('spec, platform, shape, dtype, words', [
    ({}, 'cuda', (1, 8, 2, 40), 'bfloat16', 'head_dim = 40 is not a multiple of 16 up to 256'),
    ({}, 'tpu', (1, 8, 2, 264), 'bfloat16', 'head_dim = 264 is not a multiple of 8 up to 256'),
    ({}, 'cuda', (1, 8, 2, 64), 'float16', 'must both be bfloat16 or float32'),
    (dict(normalizer='Clipped()'), 'tpu', (1, 8, 2, 64), 'bfloat16', 'the sum of a row before'),
    (dict(similarity='Softpick()', normalizer='AbsSum()'), 'cuda', (1, 8, 2, 64), 'float32',
     r'Softpick\(\) weighs values'),
])
def test_what_does_not_run_is_refused_with_the_reason(spec, platform, shape, dtype, words,
                                                      monkeypatch):
  spec, x = sj.AttentionSpec(**spec), jnp.zeros(shape, dtype)
  monkeypatch.setattr('sink_jax.kernels.dispatch.platform', lambda: platform)
  with pytest.raises(NotImplementedError, match=f"'pallas': .*{words}.*'chunked' runs every case"):
    sj.attend(spec, x, x, x, implementation='pallas')
  assert flash.unsupported(sj.AttentionSpec(), jnp.zeros((1, 8, 2, 40), 'bfloat16'), x.astype(
      'bfloat16'), 'tpu') is None


def test_a_second_derivative_is_refused():
  q, k, v, _ = random_inputs(sj.AttentionSpec(), length=5, head_dim=8)
  out = lambda q: sj.attend(sj.AttentionSpec(), q, k, v, implementation='pallas').sum()
  with pytest.raises(NotImplementedError, match='second derivative .*chunked'):
    jax.grad(lambda q: jax.grad(out)(q).sum())(q)


@pytest.mark.full
def test_slots_of_a_user_run_everywhere():
  run_python('-m', 'tests.kernels.own_slots')


# jax may drop Triton, so only a program for a GPU may need it. The same holds for the TPU compilers and TPU
# programs.
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
