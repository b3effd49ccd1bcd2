"""Quantised activations and caches: rounding, and a model with a planted massive channel."""

import dataclasses

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg

import sink_jax as sj
from sink_jax.analyses import quantisation, quantisers
from sink_jax.analyses.quantisers import ACTIVATIONS, CACHES
from sink_jax.models.config import Layer
from sink_jax.models.decode import state_bytes
from sink_jax.models.sizes import cache_bytes_per_token
from tests.analyses.numpy_decoder import losses, next_nats
from tests.analyses.small import HYBRID, importance, model, small_run, tokens


ROWS = {row.name: row.function for row in (*ACTIVATIONS, *CACHES)}


def heads(channels=64):
  """Keys (2, 5, 3, channels) with outliers, a token of zeros, ties, and numbers beyond 448."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 5, 3, channels)).astype(np.float32)
  x[..., 3] *= 30
  x[0, 1] = 0
  x[1, 2, 0, :4] = 900, -0.5, 0.5, 1.5
  x[1, 3, 0, :32] = np.arange(32) - 15.2
  return x


def of_ggml(x, name):
  """Rounded and read again."""
  kind = gguf.GGMLQuantizationType[name.upper()]
  stored = gguf.quants.quantize(np.float32(x), kind)
  return gguf.quants.dequantize(stored, kind)


@pytest.mark.parametrize('name', ['q8_0', 'q4_0'])
def test_blocks_are_rounded_as_ggml_does(name):
  x = heads()
  rounded = jax.jit(ROWS[f'{name}, not rotated'], static_argnums=1)
  for rows in (x, np.float32(1e-3) * x, x[..., :32]):
    np.testing.assert_array_equal(rounded(rows, True), of_ggml(rows, name))


def test_bits_of_a_value_are_those_of_the_formats():
  bits = {row.name: row.bits_of_value(64) for row in CACHES}
  for name in ('q8_0', 'q4_0'):
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert bits[name] == bits[f'{name}, not rotated'] == 8 * size / values
  assert bits['fp8'] == 8
  assert bits['int8_per_token_head'] == 8 + 32 / 64


@pytest.mark.parametrize('changes', [{}, dict(layers=4, pattern=HYBRID)])
def test_bytes_of_a_cache_are_those_of_the_state_of_a_decoder(changes):
  config = small_run(dtype='bfloat16', **changes).config
  less, more = (state_bytes(config, sj.CachePolicy(size), 1) for size in (10, 20))
  per_token = cache_bytes_per_token(config)
  assert 10 * per_token == more - less
  assert cache_bytes_per_token(config, 8.5) == per_token * 8.5 / 16


@pytest.mark.parametrize(
  'channels, is_key, size',
  [
    (64, True, 64),
    (128, True, 128),
    (192, True, 64),
    (256, True, 256),
    (128, False, 64),
    (192, False, 64),
  ],
)
def test_heads_are_rotated_as_llama_cpp_does(channels, is_key, size):
  """PR 21038: K with the largest power of 2 that divides a head, V by 64."""
  x = heads(channels)[:, 2:]
  hadamard = scipy.linalg.hadamard(size) / np.sqrt(size)
  turn = np.kron(np.eye(channels // size), hadamard)
  expected = of_ggml(x @ turn, 'q8_0') @ turn
  found = ROWS['q8_0'](x, is_key)
  plain = ROWS['q8_0, not rotated'](x, is_key)

  # Rounding takes a few numbers near a tie to the other side, another rotation takes all.
  error = np.abs(found - expected).mean()

  assert error < 1e-2 * np.abs(plain - expected).mean()


@pytest.mark.parametrize('is_key', [True, False])
def test_heads_of_96_channels_are_not_rotated(is_key):
  x = heads(96)
  np.testing.assert_array_equal(ROWS['q8_0'](x, is_key), of_ggml(x, 'q8_0'))


def test_caches_of_vllm():
  x = heads()
  stored = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)

  np.testing.assert_array_equal(ROWS['fp8'](x, True), stored.astype(np.float32))

  largest = np.abs(x).max(-1, keepdims=True)
  scale = np.maximum(largest / np.float32(127), np.float32(1e-6))
  whole = (x * (1 / scale)).astype(np.int8)  # as a store of the kernel: towards zero

  np.testing.assert_allclose(ROWS['int8_per_token_head'](x, True), whole * scale, rtol=2e-7)


@pytest.mark.parametrize('strategy, axes', [('tensor', (1, 2)), ('token', (2,))])
def test_activations_are_rounded_as_numpy_does(strategy, axes):
  x = heads()[:, :, 0]
  largest = np.abs(x.astype(np.float64)).max(axes, keepdims=True)
  scale = np.where(largest > 0, largest / 127, 1)
  found = ROWS[f'int8 per {strategy}'](x)

  np.testing.assert_allclose(found, np.round(x / scale) * scale, rtol=3e-7)  # of float32 scales

  low = np.minimum(x.min(axes, keepdims=True), 0)
  high = np.maximum(x.max(axes, keepdims=True), 0)
  scale = np.where(high > low, (high - low) / np.float32(255), 1)
  zero = np.round(-low / scale)
  level = np.clip(np.round(x / scale) + zero, 0, 255)
  found = ROWS[f'int8 per {strategy}, zero point'](x)

  np.testing.assert_allclose(found, (level - zero) * scale, rtol=3e-7)

  # 8 levels on both sides of zero, ties to even.
  ties = np.array([[[7, 2.5, 3.5, -0.5]]], np.float32)

  assert quantisers.symmetric(ties, 7, (2,)).tolist() == [[[7, 2, 4, 0]]]


def test_a_cache_that_does_not_fit_the_heads_is_a_row_with_the_reason():
  result = sj.analyse('quantisation', small_run(), tokens())
  reasons = {row['quantiser']: row['reason'] for row in result.rows if 'reason' in row}

  assert set(reasons) == {'q8_0', 'q4_0', 'q8_0, not rotated', 'q4_0, not rotated'}
  assert reasons['q4_0'] == 'heads have 4 channels, and llama.cpp rounds blocks of 32'
  assert len(result.plot().axes) == 2


WORST = len(CACHES)  # the number of the worst quantiser of a cache


def losses_of(run, ids, chosen, spared=False, seed=0, **options):
  """Losses if `chosen` gives the number of a quantiser for a block and a layer; 0 is none."""
  spared_SxT = np.broadcast_to(spared, ids.shape)
  return quantisation._losses(model(run, ids, **options), ids, chosen, spared_SxT, seed)


@pytest.mark.parametrize(
  'changes',
  [
    {},
    dict(sink_tokens=1),
    dict(layers=4, pattern=(Layer(mask=sj.Window(size=3)), Layer())),
    dict(layers=4, pattern=HYBRID),
    dict(dtype='bfloat16'),
  ],
  ids=str,
)
def test_what_is_not_quantised_is_the_model(changes):
  run = small_run(**changes)
  ids = tokens()
  losses = lambda chosen: losses_of(run, ids, chosen, dtype=run.config.dtype)
  base = losses(lambda block, layer: 0)
  expected = next_nats(run.logits(ids), ids).mean(1)

  np.testing.assert_allclose(base, expected, rtol=2e-6)  # the noise is 1e-6

  # Quantising each block changes the loss, and by a different amount. Blocks count from 1.
  numbers = range(1 + run.config.layers)
  blocks = [losses(lambda block, layer: int(block == n and layer != 'cache')) for n in numbers]

  assert np.array_equal(blocks[0], base)
  assert len({float(x.sum()) for x in blocks}) == len(blocks)

  of_cache = losses(lambda block, layer: WORST * (layer == 'cache'))

  assert not np.array_equal(of_cache, base)


def test_one_quantised_layer_is_the_layer_of_quantised_inputs():
  run = small_run(layers=1, attention=sj.AttentionSpec(position=sj.Nope()))
  ids = tokens()
  plain = losses(run, ids).mean(1)

  def rounded(x, levels, axes):
    scale = abs(x).max(axes, keepdims=True) / levels
    return np.round(x / scale) * scale

  of_queries = lambda name, x: rounded(x, 127, (1, 2)) if name == 'query' else x
  of_cache = lambda x: rounded(x, 7, (1, 2, 3))

  for layer, number, change in (
    ('query', 1, {'read': of_queries}),
    ('cache', WORST, {'cached': of_cache}),
  ):
    found = losses_of(run, ids, lambda _, name: number * (name == layer))
    expected = losses(run, ids, **change).mean(1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32, and noise of 1e-6
    assert abs(found - plain).max() > 20 * abs(found - expected).max()


def test_noise_is_relative_and_that_of_its_seed():
  run = small_run()
  ids = tokens()
  none = lambda block, layer: 0
  first, again, other = (losses_of(run, ids, none, seed=seed) for seed in (0, 0, 1))

  assert np.array_equal(first, again)
  assert 0 < abs(first - other).max() < 1e-5 * first.max()


@pytest.fixture(scope='module')
def planted():
  """Token 0 at position 1 has a massive channel that no layer of a block reads."""
  run = small_run(norm='none', sharp=3.0)
  ids = tokens(4, 2) * [0, 1]
  params = jax.tree.map(np.array, run.params)
  params['embed'][:, 0] = 0
  params['embed'][0] = 0
  params['embed'][0, 0] = 3000
  attention, ffn = params['blocks']['attention'], params['blocks']['ffn']
  readers = [attention['query'], attention['key'], attention['value'], ffn['w1'], ffn['w2']]
  for layer in readers:
    layer['kernel'][:, 0] = 0
  params['unembed']['kernel'][0] = 0
  run = dataclasses.replace(run, params=params)
  # The text goes on with the likeliest tokens, so that noise raises the loss.
  return run, np.concatenate([ids, run.generate(ids, 14)], 1)


@pytest.fixture(scope='module')
def rows(planted):
  return sj.analyse('quantisation', *planted).rows


def of_all(rows, quantiser, spared):
  """The row of all modules."""
  wanted = 'all', quantiser, spared
  [found] = [
    row for row in rows if (row['part'], row.get('quantiser'), row.get('spared')) == wanted
  ]
  return found


def test_a_massive_token_is_the_risk_of_a_scale_per_tensor(planted, rows):
  none, sinks, random = (
    of_all(rows, 'int8 per tensor', spared) for spared in ('none', 'sinks', 'random')
  )

  assert none['runs'] == 4
  assert none['least'] <= none['change'] <= none['most']
  assert none['verdict'] == 'destroyed'
  assert sinks['recovered'] == pytest.approx(none['change'] - sinks['change'])

  # Random tokens lack the channel, so sparing them keeps the scale. A scale per token needs no
  # spared token.
  assert random['recovered_least'] < random['recovered_most']

  per_token = of_all(rows, 'int8 per token', 'none')

  assert abs(per_token['change']) < none['change'] / 20

  single = of_all(rows, 'int8 per tensor, zero point', 'none')

  assert single['runs'] == 1
  assert single['least'] is None
  assert single['most'] is None
  run, ids = planted
  baseline = next_nats(run.logits(ids), ids).mean()
  assert none['baseline'] == pytest.approx(baseline, abs=1e-4)  # nats; the noise is 1e-6


def test_a_spared_token_leaves_the_loss_of_a_token_without_the_channel(planted, rows):
  run, ids = planted
  params = jax.tree.map(np.array, run.params)
  params['embed'][0, 0] = 0
  harmless = dataclasses.replace(run, params=params)
  everything = lambda _, layer: int(layer != 'cache')
  found, expected = (
    losses_of(of, ids, everything, spared=np.arange(16) == 0) for of in (run, harmless)
  )

  assert np.array_equal(found, expected)

  none = of_all(rows, 'int8 per tensor', 'none')
  base = none['loss'] - none['change']

  assert none['change'] > 20 * abs(found.mean() - base)


def test_rows_name_modules_blocks_and_sinks(planted, rows):
  modules = {row['module'] for row in rows if row['part'] == 'module'}

  assert len(modules) == 7
  assert [row['block'] for row in rows if row['part'] == 'block'] == [1, 2]

  alpha_NxSxHxT = importance(*planted)
  rates_T = (alpha_NxSxHxT > 0.3).mean((0, 1, 2))[:8]
  sinks = 1 + np.flatnonzero(rates_T >= rates_T.max() / 2)
  named = ', '.join(map(str, sinks))
  of_sinks = [row for row in rows if row.get('spared') == 'sinks']

  assert of_sinks
  assert {row['positions'] for row in of_sinks} == {named}


def test_random_tokens_are_not_sinks():
  spared = quantisation._spared((3, 12), np.array([0, 6]))

  assert all(mask.shape == (4, 3, 12) for mask in spared.values())
  assert not spared['none'].any()
  assert np.flatnonzero(spared['sinks'][0, 2]).tolist() == [0, 6]
  assert (spared['random'].sum(2) == 2).all()
  assert not spared['random'][..., [0, 6]].any()
  assert len({mask.tobytes() for mask in spared['random']}) == 4
