"""Quantised activations and caches against NumPy, and a planted massive channel."""

import dataclasses

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import sink_jax as sj
from sink_jax.analyses import quantisation
from sink_jax.models.config import Layer
from tests.analyses.numpy_decoder import losses, next_nats
from tests.analyses.small import HYBRID, importance, model, small_run, tokens


def quantised_losses(run, ids, on, spared=False, bits=4, per_token=False):
  """Losses (S,); on: says of a block and a layer if it is quantised."""
  spared_SxT = np.broadcast_to(spared, ids.shape)
  prepared = model(run, ids, dtype=run.config.dtype)
  return quantisation._losses(prepared, ids, on, spared_SxT, bits, per_token)


@pytest.mark.parametrize('shape, bits', [((3,), 8), ((2, 5), 8), ((3,), 4)])
@pytest.mark.parametrize('per_token', [False, True])
def test_values_are_rounded_as_numpy_does(shape, bits, per_token):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 6, *shape)).astype(np.float32)
  levels = 2 ** (bits - 1) - 1
  x[0, 0] *= 1000
  x[1, 2] = 0  # a token of zeros has no scale
  spared = np.isin(np.arange(12), (0, 3)).reshape(2, 6)
  got = np.asarray(quantisation.quantised(x, levels, per_token, spared))

  for s in range(2):
    for t in range(6):
      left = [t] if per_token else [i for i in range(6) if not spared[s, i]]
      scale = abs(x[s, left].astype(np.float64)).max() / levels
      want = x[s, t]
      if scale and not spared[s, t]:
        want = np.round(want / scale) * scale
      # The scale is rounded to float32.
      assert_allclose(
        got[s, t],
        want,
        rtol=3e-7,
        atol=0,
      )

  assert np.array_equal(got[spared], x[spared])

  ties = np.array([[[7, 2.5, 3.5, -0.5]]], np.float32)
  even = quantisation.quantised(ties, 7, per_token, np.array([[False]]))
  assert even.tolist() == [[[7, 2, 4, 0]]]


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
  measure = lambda on: quantised_losses(run, ids, on)
  base = measure(lambda block, layer: False)

  assert_allclose(base, next_nats(run.logits(ids), ids).mean(1), rtol=1e-6)

  # Quantising each block changes the loss, and by a different amount. Blocks count from 1.
  in_block = lambda n: measure(lambda block, layer: block == n and layer != 'cache')
  blocks = [in_block(n) for n in range(1 + run.config.layers)]
  assert np.array_equal(blocks[0], base)
  assert len({float(x.sum()) for x in blocks}) == len(blocks)
  assert not np.array_equal(measure(lambda block, layer: layer == 'cache'), base)


def test_one_quantised_layer_is_the_layer_of_quantised_inputs():
  run = small_run(layers=1, attention=sj.AttentionSpec(position=sj.Nope()))
  ids = tokens()
  unchanged = losses(run, ids).mean(1)

  def rounded(x, axes):
    scale = abs(x).max(axes, keepdims=True) / 7
    return np.round(x / scale) * scale

  per_tensor = lambda name, x: rounded(x, (1, 2)) if name == 'query' else x
  per_token = lambda x: rounded(x, (2, 3))
  for layer, scale_per_token, changes in (
    ('query', False, {'read': per_tensor}),
    ('cache', True, {'cached': per_token}),
  ):
    on = lambda _, name: name == layer
    found = quantised_losses(run, ids, on, per_token=scale_per_token)
    assert_allclose(found, losses(run, ids, **changes).mean(1), rtol=1e-5)  # float32
    assert abs(found - unchanged).max() > 1e-3


@pytest.fixture(scope='module')
def planted():
  """Token 0 at position 1 has a massive channel that no layer of a block reads."""
  run = small_run(norm='none', sharp=3.0)
  ids = tokens(4, 2) * [0, 1]
  params = jax.tree.map(np.array, run.params)
  params['embed'][:, 0] = params['embed'][0] = 0
  params['embed'][0, 0] = 3000
  for part, names in (('attention', ('query', 'key', 'value')), ('ffn', ('w1', 'w2'))):
    for name in names:
      params['blocks'][part][name]['kernel'][:, 0] = 0
  params['unembed']['kernel'][0] = 0
  run = dataclasses.replace(run, params=params)
  # The text goes on with the likeliest tokens, so that noise raises the loss.
  return run, np.concatenate([ids, run.generate(ids, 14)], 1)


def test_a_massive_token_is_the_risk_of_a_scale_per_tensor(planted):
  run, ids = planted
  rows = sj.analyse('quantisation', run, ids, first=1).rows
  table = {
    (row['what'], row['bits'], row['scale'], row['spared']): row
    for row in rows
    if row['part'] == 'all'
  }
  none = table['activations', 8, 'per tensor', 'none']
  first = table['activations', 8, 'per tensor', 'first 1']
  random = table['activations', 8, 'per tensor', 'random']

  assert none['destroyed']
  assert none['change'] > 20 * abs(first['change'])
  assert first['recovered'] == pytest.approx(none['change'] - first['change'])
  assert first['recovered_low'] > 0

  # Sparing the token is exact: the loss equals that of a token without the channel.
  activations = lambda _, layer: layer != 'cache'
  spare = lambda run: quantised_losses(run, ids, activations, np.arange(16) == 0, bits=8)
  params = jax.tree.map(np.array, run.params)
  params['embed'][0, 0] = 0

  assert np.array_equal(spare(run), spare(dataclasses.replace(run, params=params)))
  # Random tokens lack the channel, so sparing them keeps the scale. A scale per token needs no
  # spared token.
  assert abs(random['recovered']) < abs(first['recovered']) / 2
  assert random['least'] < random['most']
  assert abs(table['activations', 8, 'per token', 'none']['change']) < none['change'] / 20
  assert len({row['module'] for row in rows if row['part'] == 'module'}) == 7
  assert [row['block'] for row in rows if row['part'] == 'block'] == [1, 2]

  alpha_SxNxHxT = importance(run, ids).swapaxes(0, 1)
  rates_T = (alpha_SxNxHxT > 0.3).mean((0, 1, 2))[:8]
  sinks = 1 + np.flatnonzero(rates_T >= rates_T.max() / 2)
  named = ', '.join(map(str, sinks))

  assert all(row['positions'] == named for row in table.values() if row['spared'] == 'sinks')


def test_random_tokens_are_neither_sinks_nor_among_the_first():
  spared = quantisation._spared((3, 12), 4, np.array([0, 6]))
  shapes = {name: mask.shape for name, mask in spared.items()}
  one = 1, 3, 12
  assert shapes == {
    'none': one,
    'first 4': one,
    'sinks': one,
    'random': (8, 3, 12),
  }
  assert not spared['none'].any()
  assert np.flatnonzero(spared['sinks'][0, 2]).tolist() == [0, 6]
  assert (spared['random'].sum(2) == 2).all()
  assert not spared['random'][..., [0, 1, 2, 3, 6]].any()

  with pytest.raises(ValueError, match='--first'):
    sj.analyse('quantisation', small_run(), tokens(), first=12)
