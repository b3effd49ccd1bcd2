"""Quantised activations and caches: rounding, and a model with a planted massive channel."""

import dataclasses

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

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


@pytest.mark.parametrize('name', ['q8_0', 'q4_0'])
def test_blocks_are_rounded_as_ggml_does(name):
  x = heads()
  kind = gguf.GGMLQuantizationType[name.upper()]
  expected = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
  for rows in (x, np.float32(1e-3) * x, x[..., :32]):
    expected = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    found = jax.jit(ROWS[f'{name}, not rotated'], static_argnums=1)(rows, True)
    np.testing.assert_array_equal(found, expected)


def test_bits_of_a_value_are_those_of_the_formats():
  bits = {row.name: row.bits_of_value(64) for row in CACHES}
  for name in ('q8_0', 'q4_0'):
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert bits[name] == bits[f'{name}, not rotated'] == 8 * size / values
  assert (bits['fp8'], bits['int8_per_token_head']) == (8, 8 + 32 / 64)
  # The state of a decoder: a cache of 16 bits for 10 tokens, and the number of tokens read.
  for changes in ({}, dict(layers=4, pattern=HYBRID)):
    config = small_run(dtype='bfloat16', **changes).config
    grows = [state_bytes(config, sj.CachePolicy(size), 1) for size in (10, 20)]
    assert 10 * cache_bytes_per_token(config) == grows[1] - grows[0]
    assert cache_bytes_per_token(config, 8.5) == cache_bytes_per_token(config) * 8.5 / 16


@pytest.mark.parametrize(
  'channels, of_key',
  [
    (64, 64),
    (128, 128),
    (192, 64),
    (256, 256),
    (96, 0),
  ],
)
def test_heads_are_rotated_as_llama_cpp_does(channels, of_key):
  """PR 21038: K with the largest power of 2 that divides a head, V by 64, neither at 96."""
  x = heads(channels)[:, 2:]
  for is_key, size in ((True, of_key), (False, 64 if of_key else 0)):
    rotated = x.astype(np.float64)
    ones = np.vectorize(lambda i, j: (i & j).bit_count())
    turn = 1
    if size:
      parity = np.fromfunction(ones, (size, size), dtype=int)
      hadamard = (-1.0) ** parity / np.sqrt(size)
      turn = np.kron(np.eye(channels // size), hadamard)
      rotated = x @ turn
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(np.float32(rotated), kind)
    stored = gguf.quants.dequantize(blocks, kind)
    expected = stored @ turn if size else stored
    found = ROWS['q8_0'](x, is_key)
    plain = ROWS['q8_0, not rotated'](x, is_key)
    # Rounding takes a few numbers near a tie to the other side, another rotation takes all.
    error = np.abs(found - expected).mean()
    assert error < 1e-2 * np.abs(plain - expected).mean() if size else error == 0


def test_caches_of_vllm():
  x = heads()
  expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  np.testing.assert_array_equal(ROWS['fp8'](x, True), expected)
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
  assert len(result.plot().axes) == 2
  reasons = {row['quantiser']: row['reason'] for row in result.rows if 'reason' in row}
  assert set(reasons) == {'q8_0', 'q4_0', 'q8_0, not rotated', 'q4_0, not rotated'}
  assert reasons['q4_0'] == 'heads have 4 channels, and llama.cpp rounds blocks of 32'


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
  measured = model(run, ids, dtype=run.config.dtype)
  none = np.zeros(ids.shape, bool)
  measure = lambda on: quantisation._losses(measured, ids, on, none, 0)
  base = measure(lambda block, layer: 0)
  expected = next_nats(run.logits(ids), ids).mean(1)
  np.testing.assert_allclose(base, expected, rtol=2e-6)  # the noise is 1e-6
  # Quantising each block changes the loss, and by a different amount. Blocks count from 1.
  blocks = []
  for n in range(1 + run.config.layers):
    of_block = lambda block, layer: int(block == n and layer != 'cache')
    blocks.append(measure(of_block))
  assert np.array_equal(blocks[0], base)
  assert len({float(x.sum()) for x in blocks}) == len(blocks)
  worst = len(CACHES)
  assert not np.array_equal(measure(lambda block, layer: worst * (layer == 'cache')), base)


def test_one_quantised_layer_is_the_layer_of_quantised_inputs():
  run = small_run(layers=1, attention=sj.AttentionSpec(position=sj.Nope()))
  ids = tokens()
  rounded = lambda x, scale: np.round(x / scale) * scale

  def of_queries(name, x):
    largest = abs(x).max((1, 2), keepdims=True)
    return rounded(x, largest / 127) if name == 'query' else x

  def of_cache(x):
    largest = abs(x).max((1, 2, 3), keepdims=True)
    return rounded(x, largest / 7)

  plain = losses(run, ids).mean(1)
  worst = len(CACHES)

  for layer, number, change in (
    ('query', 1, {'read': of_queries}),
    ('cache', worst, {'cached': of_cache}),
  ):
    chosen = lambda _, name: number * (name == layer)
    none = np.zeros(ids.shape, bool)
    found = quantisation._losses(model(run, ids), ids, chosen, none, 0)
    expected = losses(run, ids, **change).mean(1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32, and noise of 1e-6
    assert abs(found - plain).max() > 20 * abs(found - expected).max()


def test_noise_is_relative_and_that_of_its_seed():
  run = small_run()
  ids = tokens()
  none = np.zeros(ids.shape, bool)
  nothing = lambda block, layer: 0
  measure = lambda seed: quantisation._losses(model(run, ids), ids, nothing, none, seed)
  first, again, other = (measure(seed) for seed in (0, 0, 1))
  assert np.array_equal(first, again)
  assert 0 < abs(first - other).max() < 1e-5 * first.max()


@pytest.fixture(scope='module')
def planted():
  """Token 0 at position 1 has a massive channel that no layer of a block reads."""
  run = small_run(norm='none', sharp=3.0)
  ids = tokens(4, 2) * [0, 1]
  params = jax.tree.map(np.array, run.params)
  params['embed'][:, 0] = params['embed'][0] = 0
  params['embed'][0, 0] = 3000
  readers = {
    'attention': ('query', 'key', 'value'),
    'ffn': ('w1', 'w2'),
  }
  for part, names in readers.items():
    for name in names:
      params['blocks'][part][name]['kernel'][:, 0] = 0
  params['unembed']['kernel'][0] = 0
  run = dataclasses.replace(run, params=params)
  # The text goes on with the likeliest tokens, so that noise raises the loss.
  return run, np.concatenate([ids, run.generate(ids, 14)], 1)


def test_a_massive_token_is_the_risk_of_a_scale_per_tensor(planted):
  run, ids = planted
  rows = sj.analyse('quantisation', run, ids).rows
  of_all = [row for row in rows if row['part'] == 'all']
  table = {(row['quantiser'], row['spared']): row for row in of_all}
  none, sinks, random = (table['int8 per tensor', x] for x in ('none', 'sinks', 'random'))
  assert none['runs'] == 4
  assert none['least'] <= none['change'] <= none['most']
  assert none['destroyed']
  assert sinks['recovered'] == pytest.approx(none['change'] - sinks['change'])
  # A token at position 1 that is spared leaves the loss of a token without the channel.
  spare = lambda run: quantisation._losses(
    model(run, ids),
    ids,
    lambda _, layer: int(layer != 'cache'),
    np.arange(16) + np.zeros((4, 1)) == 0,
    0,
  )
  params = jax.tree.map(np.array, run.params)
  params['embed'][0, 0] = 0
  assert np.array_equal(spare(run), spare(dataclasses.replace(run, params=params)))
  left = spare(run).mean() - (none['loss'] - none['change'])
  assert none['change'] > 20 * abs(left)
  # Random tokens lack the channel, so sparing them keeps the scale. A scale per token needs no
  # spared token.
  assert random['recovered_least'] < random['recovered_most']
  per_token = table['int8 per token', 'none']
  assert abs(per_token['change']) < none['change'] / 20
  single = table['int8 per tensor, zero point', 'none']
  assert (single['runs'], single['least'], single['most']) == (1, None, None)
  assert len({row['module'] for row in rows if row['part'] == 'module'}) == 7
  assert [row['block'] for row in rows if row['part'] == 'block'] == [1, 2]
  baseline = next_nats(run.logits(ids), ids).mean()
  assert none['baseline'] == pytest.approx(baseline, abs=1e-4)  # nats; the noise is 1e-6
  alpha_SxNxHxT = importance(run, ids).swapaxes(0, 1)
  rates_T = (alpha_SxNxHxT > 0.3).mean((0, 1, 2))[:8]
  positions = 1 + np.flatnonzero(rates_T >= rates_T.max() / 2)
  named = ', '.join(map(str, positions))
  assert all(row['positions'] == named for row in table.values() if row['spared'] == 'sinks')


def test_random_tokens_are_not_sinks():
  spared = quantisation._spared((3, 12), np.array([0, 6]))
  assert all(mask.shape == (4, 3, 12) for mask in spared.values())
  assert not spared['none'].any()
  assert np.flatnonzero(spared['sinks'][0, 2]).tolist() == [0, 6]
  assert (spared['random'].sum(2) == 2).all()
  assert not spared['random'][..., [0, 6]].any()
  assert len({mask.tobytes() for mask in spared['random']}) == 4
