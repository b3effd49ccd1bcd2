"""The Pallas kernels, interpreted: those for TPUs and those for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

import sink_jax as sj
from sink_jax.attention.reference import safe_power, scores
from sink_jax.attention.similarity import exp_less_one
from sink_jax.attention.spec import repeat_heads, transform_qk
from sink_jax.kernels import flash, flash_gpu, flash_tpu, gpu_layout, tpu_layout
from sink_jax.kernels.epilogue import PartialAttention
from tests.attention_checks import check_at_once
from tests.attention_specs import PAPER, pairwise_specs, random_inputs

KERNELS = {'tpu': flash_tpu, 'gpu': flash_gpu}


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
  """Both families in turn, with tiles so small that a few tokens need many of them."""
  use(request.param, monkeypatch)
  return request.param


def use(name, monkeypatch, block=8, other=4):
  monkeypatch.setattr(flash, '_INTERPRETED', KERNELS[name])
  monkeypatch.setattr(tpu_layout, '_BLOCK', block)
  monkeypatch.setattr(tpu_layout, '_LANES', block)
  monkeypatch.setattr(gpu_layout, '_FLOAT32', gpu_layout.Blocks(block, other, 4, 1))


def plain_rows(spec, q, k, v):
  """PartialAttention by the formulas, for automatic differentiation."""
  k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
  i = jnp.arange(q.shape[1])
  s, power = scores(spec, q, k, i, i), spec.normalizer.power
  keep = spec.mask.keep(i[:, None], i[None, :])
  if spec.similarity.kind == 'exponential':
    s = jnp.where(keep, s, -jnp.inf)
    stat, power_stat = (jax.nn.logsumexp(p * s, -1) for p in (1, power))
    f = jnp.exp(s - stat[..., None])
  elif spec.similarity.kind == 'rectified':
    s = jnp.where(keep, s, 0)
    power_stat = jax.lax.stop_gradient(jnp.maximum(s.max(-1), 0))
    f = exp_less_one(s, power_stat[..., None])
    stat = power_stat + jnp.log(jnp.abs(f).sum(-1) + spec.normalizer.eps)
    f = jax.nn.relu(f) * jnp.exp(power_stat - stat)[..., None]
  else:
    f = jnp.where(keep, spec.similarity(s), 0)
    total = 0 * f if power is None else f
    if power not in (None, 1):
      total = jnp.where(keep, safe_power(f, power), 0)
    stat = power_stat = total.sum(-1)
  return PartialAttention(jnp.einsum('bhlt,bthd->blhd', f, v), stat, power_stat)


# One of each way through a tile; what acts outside it makes no difference here.
TILES = ['softmax', 'p-norm softmax 1/2 (Figure 29)', 'sigmoid (Table 15)', 'alibi (Table 3)',
         'normalized sigmoid (Table 15)', 'p-norm sigmoid 2 (Figure 29)',
         'normalized identity (Table 15)', 'softpick']


@pytest.mark.every(4)
@pytest.mark.parametrize('name', TILES)
def test_rows_and_all_cotangents(kernels, name):
  check_rows(PAPER[name], atol=1e-5, batch=2, length=19, heads=4, kv_heads=2, head_dim=24)


def check_rows(spec, atol, scale=1, **sizes):
  """Rows and all cotangents of the kernels against the T x T definition.

  atol: of sums of up to 19 products of float32 numbers, which may cancel, relative to the largest.
  scale: of the queries, so of the scores.
  """
  q, k, v, params = random_inputs(spec, **sizes)
  q, k = transform_qk(spec, q, k, params)
  q = scale * q
  rng = np.random.default_rng(1)
  cotangents = PartialAttention(rng.standard_normal(q.shape),
                                *rng.standard_normal(
                                    (2, sizes['batch'], sizes['heads'], sizes['length'])))
  cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), cotangents)

  def rows_and_cotangents(rows):
    result, pull = jax.vjp(lambda *inputs: rows(spec, *inputs), q, k, v)
    return result, pull(cotangents)

  actual, expected = (jax.jit(rows_and_cotangents, static_argnums=0)(rows)
                      for rows in (flash.rows, plain_rows))
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol * float(jnp.abs(b).max()) + 1e-7)


def with_kernels(specs, monkeypatch, request):
  """Each spec with one family of kernels prepared, in turn; with both under --full."""
  for number, spec in enumerate(specs):
    for n, name in enumerate(KERNELS):
      if number % 2 == n or request.config.getoption('--full'):
        use(name, monkeypatch)
        yield spec


# All of them run in the chunked implementation too, which shares the code outside the tiles.
@pytest.mark.parametrize('part', [
    part if part < 1 else pytest.param(part, marks=pytest.mark.full) for part in range(6)])
def test_paper_variants(part, monkeypatch, request):
  for spec in with_kernels(list(PAPER.values())[part::6], monkeypatch, request):
    check_at_once(spec, 'pallas', length=11, heads=2, kv_heads=1, head_dim=8)


# The values that differ inside a tile. The rest acts before or after it, and is the same code
# for the chunked implementation, which test_oracle.py takes through all pairs.
IN_TILES = dict(
    similarity=[sj.Exp(), sj.Sigmoid(bias=-2.0), sj.EluPlusOne(), sj.Linear(), sj.Relu()],
    normalizer=[sj.RowSum(), sj.PNorm(p=0.5), sj.PNorm(p=2.0), sj.Unnormalized(), sj.AbsFloor(),
                sj.Count()],
    position=[sj.Rope(), sj.Alibi(), sj.Relative(decreasing=True, buckets=4, max_distance=5)],
    mask=[sj.Causal(), sj.Window(size=1), sj.Window(size=3), sj.Prefix(length=3)])


@pytest.mark.full
@pytest.mark.parametrize('part', [
    part if part < 1 else pytest.param(part, marks=pytest.mark.full) for part in range(6)])
def test_every_pair_of_slot_values(part, monkeypatch, request):
  """Pairs of what differs inside a tile; pairs of all slots under --full."""
  values = None if request.config.getoption('--full') else IN_TILES
  specs = [spec for spec in pairwise_specs(values)[0] if not spec.normalizer.clips]  # see below
  assert len(specs) >= 20
  for spec in with_kernels(specs[part::6], monkeypatch, request):
    check_at_once(spec, 'pallas', length=9, heads=2, head_dim=8)


def test_clipped_rows_are_refused_with_the_reason():
  spec = sj.AttentionSpec(normalizer='Clipped()')
  q, k, v, _ = random_inputs(spec, head_dim=16)
  for refused in (lambda: sj.attend(spec, q, k, v, implementation='pallas'),
                  lambda: sj.streaming_importance(spec, q, k, implementation='pallas')):
    with pytest.raises(NotImplementedError, match="the sum of a row .* 'chunked' runs every case"):
      refused()


MASKS = [sj.Causal(), sj.Window(size=1), sj.Window(size=5), sj.Prefix(length=6)]
EDGES = [sj.Window(size=99), sj.Prefix(length=1), sj.Prefix(length=99)]


@pytest.mark.every(3)
@pytest.mark.parametrize('mask', [
    *MASKS, *(pytest.param(mask, marks=pytest.mark.full) for mask in EDGES)], ids=repr)
def test_tiles_and_padding_change_nothing(kernels, mask, monkeypatch):
  spec = sj.AttentionSpec(mask=mask, normalizer=sj.PNorm(p=0.5), position=sj.Alibi())
  q, k, v, _ = random_inputs(spec, length=13, heads=2, head_dim=8)
  weight = np.random.default_rng(2).standard_normal(q.shape)

  def value_and_grad(implementation):
    f = lambda *x: jnp.sum(sj.attend(spec, *x, implementation=implementation) * weight)
    return jax.tree.leaves(jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v))

  expected = value_and_grad('reference')
  for blocks in ((8, 4), (4, 8)):
    use(kernels, monkeypatch, *blocks)
    for a, b in zip(value_and_grad('pallas'), expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_one_token(kernels):
  check_at_once(sj.AttentionSpec(kv_bias=sj.KVBias()), 'pallas', length=1, head_dim=8)


@pytest.mark.every(2)
def test_the_first_keys_alone(kernels):
  for spec in (sj.AttentionSpec(kv_bias=sj.KBias()), sj.AttentionSpec('Linear()', 'AbsFloor()'),
               sj.AttentionSpec(mask=sj.Window(size=3))):
    q, k, _, params = random_inputs(spec, length=40, heads=2, head_dim=8)
    whole = sj.streaming_importance(spec, q, k, params, implementation='chunked')
    for implementation in ('chunked', 'pallas'):
      first = sj.streaming_importance(spec, q, k, params, keys=3, implementation=implementation)
      np.testing.assert_allclose(first.raw, whole.raw[..., :3], rtol=1e-5, atol=1e-6)
      np.testing.assert_allclose(first.normalized, whole.normalized[..., :3], rtol=1e-5, atol=1e-6)
      if whole.bias_slot is not None:
        np.testing.assert_allclose(first.bias_slot, whole.bias_slot, rtol=1e-5)


@pytest.mark.full
def test_few_columns_are_summed_in_parts(monkeypatch):
  use('gpu', monkeypatch)
  q, k, _, params = random_inputs(sj.AttentionSpec(), length=200, heads=1, head_dim=8)
  program = gpu_layout.KernelLayout('columns', sj.AttentionSpec(), q, k, None, True)
  program.only(4)
  assert program.parts > 1
  parts = sj.streaming_importance(sj.AttentionSpec(), q, k, keys=4, implementation='pallas')
  whole = sj.streaming_importance(sj.AttentionSpec(), q, k, implementation='chunked')
  np.testing.assert_allclose(parts.raw, whole.raw[..., :4], rtol=1e-5)


def test_no_token_sees_its_future(kernels):
  for spec in (sj.AttentionSpec(), sj.AttentionSpec('Sigmoid()', 'RowSum(eps=1e-8)')):
    q, k, v, _ = random_inputs(spec, length=13, head_dim=8)
    before = np.asarray(sj.attend(spec, q, k, v, implementation='pallas'))
    for x in (q, k, v):
      x[:, 6:] += 1.0
    after = np.asarray(sj.attend(spec, q, k, v, implementation='pallas'))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max() > 1e-3


@pytest.mark.every(2)
def test_importance_is_the_gradient_of_the_values(kernels):
  q, k, v, _ = random_inputs(sj.AttentionSpec(), length=12, head_dim=8)
  channel = lambda v: sj.attend(sj.AttentionSpec(), q, k, v, implementation='pallas')[..., 0].sum()
  sums_HxT = np.asarray(jax.grad(channel)(v))[0, :, :, 0].T
  alpha = sj.streaming_importance(sj.AttentionSpec(), q, k, implementation='pallas').raw[0]
  np.testing.assert_allclose(sums_HxT / (12 - np.arange(12)), alpha, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose((alpha * (12 - np.arange(12))).sum(-1), 12, rtol=1e-5)


def test_bfloat16_is_rounded_once(kernels, monkeypatch):
  monkeypatch.setattr(gpu_layout, 'BLOCKS', dict.fromkeys(
      gpu_layout.BLOCKS, {256: gpu_layout.Blocks(16, 8, 4, 1)}))
  spec = sj.AttentionSpec('Sigmoid()', 'RowSum(eps=1e-8)')
  q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) if x is not None else x for x in (
      *random_inputs(spec, length=40, head_dim=16)[:3], None))
  exact = sj.attend(spec, *(x.astype(jnp.float32) for x in (q, k, v)), implementation='reference')
  low = sj.attend(spec, q, k, v, implementation='pallas')
  assert low.dtype == jnp.bfloat16
  # q and k are rotated in bfloat16, the weights are rounded for their product with v, and
  # the row is rounded before and after its normalisation: 2^-9 each.
  error = jnp.linalg.norm(low.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
  assert error < 4 * 2**-9


def test_padding_stays_finite_under_a_growing_bias(kernels, monkeypatch):
  use(kernels, monkeypatch, 64, 64)
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=4.0), position=sj.Relative())
  q, k, v, _ = random_inputs(spec, length=100, heads=1, head_dim=8)
  loss = lambda *x: sj.attend(spec, *x, implementation='pallas').sum()
  grads = jax.grad(loss, (0, 1, 2))(q, k, v)
  assert all(np.isfinite(g).all() for g in grads)


def test_tpu_kernels_neither_race_nor_read_what_nobody_wrote(monkeypatch):
  use('tpu', monkeypatch)
  mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')
  for spec in (sj.AttentionSpec(mask=sj.Window(size=6)),
               sj.AttentionSpec('Linear()', 'AbsFloor()')):
    q, k, v, _ = random_inputs(spec, length=21, heads=2, kv_heads=1, head_dim=8)
    out, stat, _ = flash_tpu.forward(spec, q, k, v, interpret=mode)
    np.testing.assert_allclose(out, plain_rows(spec, q, k, v)[0], rtol=1e-4, atol=1e-5)
    rows = (stat, 0 * stat) if spec.similarity.kind == 'exponential' else (0 * stat,)
    results = (*flash_tpu.backward(spec, q, k, v, q, *rows, interpret=mode),
               *flash_tpu.statistics(spec, q, k, interpret=mode),
               *flash_tpu.column_sums(spec, 21, q, k, stat, stat, stat, interpret=mode))
    assert all(np.isfinite(x).all() for x in results)
    assert not interpreter.races.races_found


def test_the_platform_is_told_what_does_not_run():
  q = jax.ShapeDtypeStruct((1, 8, 2, 40), jnp.bfloat16)
  assert flash.unsupported('tpu', q, q) is None
  assert 'multiple of 16' in flash.unsupported('cuda', q, q)
  half = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float16)
  assert 'bfloat16 or float32' in flash.unsupported('cuda', half, half)
  x = np.zeros((1, 4, 2, 4), np.float32)
  with pytest.raises(NotImplementedError, match="head_dim = 4 .* 'chunked' runs every case"):
    sj.attend(sj.AttentionSpec(), x, x, x, implementation='pallas')


@pytest.mark.parametrize('capability, lines', [('9.0', 0), ('8.0', 1)])
def test_a_gpu_of_another_kind_costs_one_line(capability, lines, monkeypatch, caplog):
  gpu = dict(platform='gpu', device_kind='NVIDIA A100', compute_capability=capability)
  device = type('Device', (), gpu)()
  monkeypatch.setattr(gpu_layout.jax, 'devices', lambda *_: [device])
  blocks = [gpu_layout.choose_blocks(kernel, jnp.bfloat16, 96) for kernel in ('forward', 'dq')]
  assert blocks == [gpu_layout.BLOCKS[kernel][128] for kernel in ('forward', 'dq')]
  assert len(caplog.messages) == lines
  assert all('NVIDIA A100 has 8.0' in x and 'benchmark' in x for x in caplog.messages)


def test_columns_where_heads_and_padding_agree(monkeypatch):
  use('gpu', monkeypatch, 8, 8)
  q, k, _, _ = random_inputs(sj.AttentionSpec(), length=5, heads=8, head_dim=8)  # padded to 8
  pallas, chunked = (sj.streaming_importance(sj.AttentionSpec(), q, k, implementation=name).raw
                     for name in ('pallas', 'chunked'))
  np.testing.assert_allclose(pallas, chunked, rtol=1e-5)


def test_sixty_four_bit_mode_changes_nothing(kernels):
  q, k, v, _ = random_inputs(sj.AttentionSpec(), length=11, head_dim=8)
  out = lambda: sj.attend(sj.AttentionSpec(), q, k, v, implementation='pallas')
  expected = np.asarray(out())
  with jax.enable_x64(True):
    actual = out()
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_what_has_no_gradient_says_so():
  q, k, v, _ = random_inputs(sj.AttentionSpec(), length=5, head_dim=8)
  alpha = lambda q: sj.streaming_importance(sj.AttentionSpec(), q, k, implementation='pallas')
  with pytest.raises(NotImplementedError, match='importance has no gradient .*chunked'):
    jax.grad(lambda q: alpha(q).raw.sum())(q)
  out = lambda q: sj.attend(sj.AttentionSpec(), q, k, v, implementation='pallas').sum()
  with pytest.raises(NotImplementedError, match='second derivative'):
    jax.grad(lambda q: jax.grad(out)(q).sum())(q)


def test_dtypes_must_agree():
  q, k, v, _ = random_inputs(sj.AttentionSpec(), length=5, head_dim=8)
  with pytest.raises(ValueError, match='one floating-point dtype, not bfloat16, float32'):
    sj.attend(sj.AttentionSpec(), q, k, jnp.asarray(v, jnp.bfloat16))
