"""Quantised activations and caches: rounding against NumPy, and a model with a planted massive channel."""

import dataclasses

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import quantisation
from sink_jax.models.config import Layer
from tests.analyses.small import HYBRID, importance, model, small_run, tokens


@pytest.mark.parametrize('shape, bits', [((3,), 8), ((2, 5), 8), ((3,), 4)])
@pytest.mark.parametrize('per_token', [False, True])
def test_values_are_rounded_as_numpy_does(shape, bits, per_token):
  rng = np.random.default_rng(0)
  x, levels = rng.standard_normal((2, 6, *shape)).astype(np.float32), 2 ** (bits - 1) - 1
  x[0, 0] *= 1000
  x[1, 2] = 0  # a token of zeros has no scale
  spared = np.isin(np.arange(12), (0, 3)).reshape(2, 6)
  got = np.asarray(quantisation.quantised(x, levels, per_token, spared))
  for s in range(2):
    for t in range(6):
      left = [t] if per_token else [i for i in range(6) if not spared[s, i]]
      scale = abs(x[s, left].astype(np.float64)).max() / levels
      want = x[s, t] if spared[s, t] or not scale else np.round(x[s, t] / scale) * scale
      np.testing.assert_allclose(
        got[s, t], want, rtol=3e-7, atol=0
      )  # the scale is rounded to float32
  assert np.array_equal(got[spared], x[spared])
  ties = np.array([[[7, 2.5, 3.5, -0.5]]], np.float32)
  assert quantisation.quantised(ties, 7, per_token, np.array([[False]])).tolist() == [
    [[7, 2, 4, 0]]
  ]


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
  run, ids = small_run(**changes), tokens()
  measure = lambda on: quantisation._losses(
    model(run, ids, dtype=run.config.dtype), ids, on, np.zeros(ids.shape, bool), 4, False
  )
  base = measure(lambda block, layer: False)
  x = np.asarray(run.logits(ids), np.float64)[:, :-1]
  expected = (np.log(np.exp(x).sum(-1)) - np.take_along_axis(x, ids[:, 1:, None], -1)[..., 0]).mean(
    1
  )
  np.testing.assert_allclose(base, expected, rtol=1e-6)
  # Quantising each block changes the loss, and by a different amount. Blocks count from 1.
  blocks = [
    measure(lambda b, layer: b == n and layer != 'cache') for n in range(1 + run.config.layers)
  ]
  assert np.array_equal(blocks[0], base) and len({float(x.sum()) for x in blocks}) == len(blocks)
  assert not np.array_equal(measure(lambda block, layer: layer == 'cache'), base)


def test_one_quantised_layer_is_the_layer_of_quantised_inputs():
  run, ids = small_run(layers=1, attention=sj.AttentionSpec(position=sj.Nope())), tokens()
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), run.params)
  block = jax.tree.map(lambda x: x[0], p['blocks'])
  norm = lambda x, gain: (
    x / np.sqrt((x * x).mean(-1, keepdims=True) + run.config.norm_eps) * gain['gain']
  )
  rounded = lambda x, scale: np.round(x / scale) * scale

  def forward(queries, cache):
    x = norm(h := p['embed'][ids], block['norm1'])
    read = rounded(x, abs(x).max((1, 2), keepdims=True) / 7) if queries else x
    q, k, v = (
      np.reshape(y @ block['attention'][name]['kernel'], (*ids.shape, -1, 4))
      for name, y in (('query', read), ('key', x), ('value', x))
    )
    if cache:
      k, v = (rounded(y, abs(y).max((2, 3), keepdims=True) / 7) for y in (k, v))
    k, v = (np.repeat(y, 2, 2) for y in (k, v))
    scores = np.where(np.tri(ids.shape[1]), np.einsum('bihd,bjhd->bhij', q, k) / 2, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    h = (
      h
      + np.einsum('bhij,bjhd->bihd', weights, v).reshape(h.shape)
      @ block['attention']['out']['kernel']
    )
    a, b = (norm(h, block['norm2']) @ block['ffn'][name]['kernel'] for name in ('w1', 'w2'))
    h = h + a / (1 + np.exp(-a)) * b @ block['ffn']['w_out']['kernel']
    logits = (norm(h, p['final_norm']) @ p['unembed']['kernel'])[:, :-1]
    return (
      np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    ).mean(1)

  for layer, per_token, queries, cache in (
    ('query', False, True, False),
    ('cache', True, False, True),
  ):
    got = quantisation._losses(
      model(run, ids), ids, lambda _, name: name == layer, np.zeros(ids.shape, bool), 4, per_token
    )
    np.testing.assert_allclose(got, forward(queries, cache), rtol=1e-5)  # float32
    assert abs(got - forward(False, False)).max() > 1e-3


@pytest.fixture(scope='module')
def planted():
  """Token 0 at position 1 has a massive channel that no layer of a block reads."""
  run, ids = small_run(norm='none', sharp=3.0), tokens(4, 2) * [0, 1]
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
    tuple(row[name] for name in ('what', 'bits', 'scale', 'spared')): row
    for row in rows
    if row['part'] == 'all'
  }
  none, first, random = (
    table['activations', 8, 'per tensor', x] for x in ('none', 'first 1', 'random')
  )
  assert none['destroyed'] and none['change'] > 20 * abs(first['change'])
  assert (
    first['recovered'] == pytest.approx(none['change'] - first['change'])
    and first['recovered_low'] > 0
  )
  # Sparing the token is exact: the loss equals that of a token without the channel.
  spare = lambda run: quantisation._losses(
    model(run, ids),
    ids,
    lambda _, layer: layer != 'cache',
    np.arange(16) + np.zeros((4, 1)) == 0,
    8,
    False,
  )
  params = jax.tree.map(np.array, run.params)
  params['embed'][0, 0] = 0
  assert np.array_equal(spare(run), spare(dataclasses.replace(run, params=params)))
  # Random tokens lack the channel, so sparing them keeps the scale. A scale per token needs no
  # spared token.
  assert abs(random['recovered']) < abs(first['recovered']) / 2 and random['least'] < random['most']
  assert abs(table['activations', 8, 'per token', 'none']['change']) < none['change'] / 20
  assert len({row['module'] for row in rows if row['part'] == 'module'}) == 7
  assert [row['block'] for row in rows if row['part'] == 'block'] == [1, 2]
  alpha_SxNxHxT = importance(run, ids).swapaxes(0, 1)
  rates_T = (alpha_SxNxHxT > 0.3).mean((0, 1, 2))[:8]
  named = ', '.join(map(str, 1 + np.flatnonzero(rates_T >= rates_T.max() / 2)))
  assert all(row['positions'] == named for row in table.values() if row['spared'] == 'sinks')


def test_random_tokens_are_neither_sinks_nor_among_the_first():
  spared = quantisation._spared((3, 12), 4, np.array([0, 6]))
  assert {name: mask.shape for name, mask in spared.items()} == {
    'none': (1, 3, 12),
    'first 4': (1, 3, 12),
    'sinks': (1, 3, 12),
    'random': (8, 3, 12),
  }
  assert not spared['none'].any() and np.flatnonzero(spared['sinks'][0, 2]).tolist() == [0, 6]
  assert (spared['random'].sum(2) == 2).all() and not spared['random'][..., [0, 1, 2, 3, 6]].any()
  with pytest.raises(ValueError, match='--first'):
    sj.analyse('quantisation', small_run(), tokens(), first=12)
