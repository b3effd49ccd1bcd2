"""A planted mark of the first token is found, an untrained model has none, and NumPy agrees."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses.card import Card
from sink_jax.evaluate.activations import key_cosines
from sink_jax.evaluate.sinks import random_targets
from sink_jax.models.additions import record_without, streams_and_additions
from sink_jax.models.config import Layer
from sink_jax.models.record import queries_keys, states
from sink_jax.models.transformer import init_params
from tests.analyses.small import HYBRID, maps, small_run, tokens
from tests.models import numpy_model

OPTIONS = sj.RecordOptions(hidden=states)
NOPE = dict(attention=sj.AttentionSpec(position=sj.Nope()), kv_heads=4)
# channels
FIRST = 3
CONSTANT = 14
MARK = 5


def part(rows, name):
  return [row for row in rows if row['part'] == name]


@pytest.fixture(scope='module')
def planted():
  """Position 1 has channel 3, of which block 2 makes channel 5, and blocks 3 and 4 read that."""
  run = small_run(layers=4, attention=sj.AttentionSpec(position=sj.Learned(max_length=32)))
  params = jax.tree.map(np.array, run.params)
  blocks = params['blocks']
  for norm in ('norm1', 'norm2'):
    blocks[norm]['gain'][:] = 1
  params['embed'][:, [FIRST, CONSTANT, MARK]] = 0, 1, 0
  params['positions'][:] = 0
  params['positions'][0, FIRST] = 2

  query, key, out = (blocks['attention'][name]['kernel'] for name in ('query', 'key', 'out'))
  query[:] = 0
  key[:] = 0
  query[:, CONSTANT, 0] = 8  # of the first head
  key[2:, MARK, 0] = 2
  out *= 0.01

  w1, w2, w_out = (blocks['ffn'][name]['kernel'] for name in ('w1', 'w2', 'w_out'))
  w_out *= 0.01
  channels = np.arange(16)
  w1[1, :, 0] = 4 * (channels == FIRST)
  w2[1, :, 0] = 4 * (channels == FIRST)
  w_out[1, 0] = 5 * (channels == MARK)
  return dataclasses.replace(run, params=params)


def test_the_planted_sub_layer_is_found(planted):
  ids = tokens(6, 24)
  result = sj.analyse('marking', planted, ids, controls=5)
  [mark] = [row for row in result.rows if row.get('marks')]
  sinks_NxSxH = maps(planted, ids)[..., 0].mean(-1) > 0.3

  assert mark['block'] == 2
  assert mark['what'] == 'feed-forward network'
  assert sinks_NxSxH[2:, :, 0].all()
  assert mark['sink_1'] == pytest.approx(100 * sinks_NxSxH.mean()) == 12.5
  assert mark['left'] == 0
  assert mark['control_low'] == 12.5
  assert mark['control_high'] == 12.5

  # The direction is that of the channel: all that block 2 adds to the first token lies along it.
  assert mark['along'] == pytest.approx(mark['norm'], rel=0.02)
  assert mark['along'] > 20
  assert mark['along_random'] < 1

  [sentence] = Card('planted', {'marking': result}).sentences

  assert sentence.startswith("Block 2's feed-forward network marks the first token: without")

  state = part(result.rows, 'state')

  assert [row['appears'] for row in state] == [False, False, True, False, False]
  assert state[2]['cosine'] > 0.98
  assert state[2]['cosine_random'] < 0.9

  keys = part(result.rows, 'key')

  assert [row['heads'] for row in keys] == [0, 0, 1, 1]
  assert keys[0]['cosine'] is None
  assert keys[2]['cosine'] == pytest.approx(1, abs=1e-5)


def test_an_untrained_model_is_said_nothing_of():
  run = small_run(layers=3, d_model=32)

  for seed in range(3):
    fresh = dataclasses.replace(run, params=init_params(run.config, seed))
    for bos in ('none', 'force'):
      result = sj.analyse('marking', fresh, inputs='random', bos=bos, sequences=4, length=24)
      assert not Card('fresh', {'marking': result}).sentences


def test_texts_that_begin_with_one_token_have_no_cosine():
  ids = tokens(3, 8)
  ids[:, 0] = 7
  rows = sj.analyse('marking', small_run(pattern=HYBRID), ids).rows

  assert all(row['cosine'] is None for row in part(rows, 'state'))

  of_block_1 = [row['what'] for row in part(rows, 'addition')[:2]]

  assert of_block_1 == ['Mamba mixer', 'feed-forward network']

  with pytest.raises(ValueError, match='--controls=0'):
    sj.analyse('marking', small_run(), tokens(2, 8), controls=0)


def forward(run, ids, left_out):
  """Streams (M + 1, B, T, D), additions (M, 2, B, T, D) and maps (M, H, B, T, T), in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), run.params)
  sub_layers = {'attention': numpy_model._attention, 'ffn': numpy_model._feed_forward}
  h = params['embed'][ids]
  streams = [h]
  added = []
  for m in range(run.config.layers):
    own = jax.tree.map(lambda x, m=m: x[m], params['blocks'])
    for i, (name, sub_layer) in enumerate(sub_layers.items()):
      x = numpy_model._norm(run.config, h, own[f'norm{i + 1}'])
      addition = sub_layer(run.config, x, own[name])
      addition[:, left_out[m, i]] = 0
      added.append(addition)
      h = h + addition
    streams.append(h)
  shape = (-1, 2, *h.shape)
  return np.array(streams), np.array(added).reshape(shape)


def test_the_edit_is_that_of_numpy():
  run = small_run(sharp=2.0, layers=3, **NOPE)
  ids = tokens(3, 9)
  rng = np.random.default_rng(1)
  left_out = rng.random((3, 2, 9)) < 0.3
  record = record_without(run.config, OPTIONS, run.params, left_out, ids)

  # Three blocks add a few float32 roundings of 6e-8 each, and sharp queries multiply them.
  for found, expected in zip(streams_and_additions(record), forward(run, ids, left_out)):
    expected = np.moveaxis(expected, -3, 0)
    error = np.abs(found - expected).max()
    assert error < 2e-5 * np.abs(expected).max()


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.fixture(scope='module')
def measured():
  """Rows, and of NumPy the streams, the additions, the direction and the random positions."""
  run = small_run(sharp=2.0, layers=3, **NOPE)
  ids = tokens(4, 9)
  ids[1, 0] = ids[0, 0]
  rows = sj.analyse('marking', run, ids).rows
  streams, added = forward(run, ids, np.zeros((3, 2, 9), bool))
  first = unit(streams[2][:, 0])
  direction = unit(first.mean(0))
  drawn = random_targets(np.full(4, 9))[:100]
  return rows, streams, added, direction, drawn


def close(expected):
  return pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_rows_of_states_are_those_of_numpy(measured):
  rows, streams, _, direction, drawn = measured
  # Texts 1 and 2 begin with the same token.
  pairs = [pair for pair in itertools.permutations(range(4), 2) if sum(pair) != 1]

  for h, row in zip(streams, part(rows, 'state'), strict=True):
    u = unit(h)
    cosine = lambda at: np.mean([u[s, at[s]] @ u[t, at[t]] for s, t in pairs])
    random = [cosine(at) for at in drawn]
    along = h[:, 0] @ direction
    assert row['along'] == close(along.mean())
    assert row['cosine'] == close(cosine([0] * 4))
    assert row['cosine_random'] == close(np.percentile(random, 99))


def test_rows_of_additions_are_those_of_numpy(measured):
  rows, _, added, direction, drawn = measured
  additions = added.reshape(6, 4, 9, 16)

  for x, row in zip(additions, part(rows, 'addition'), strict=True):
    norms = np.linalg.norm(x, axis=-1)
    along = x @ direction
    random = [np.percentile(along[s, drawn[:, s]], 99) for s in range(4)]
    assert row['norm_others'] == close(norms[:, 1:].mean())
    assert row['along_random'] == close(max(random))
    assert row['exceeds'] == all(along[:, 0] > random)


def test_cosines_of_keys_are_those_of_numpy():
  run = small_run()
  ids = tokens(3, 7)
  record = lambda part: run.record(ids, sj.RecordOptions(attention=part)).layers.attention
  found = record(key_cosines)
  q, k = (np.asarray(x) for x in record(queries_keys))

  for n, s, h, j in np.ndindex(2, 3, 4, 7):
    query = q[n, s, 1:, h].mean(0)
    key = k[n, s, j, h // 2]
    cosine = unit(query) @ unit(key)
    assert found[n, s, h, j] == pytest.approx(cosine, abs=1e-5)


def without(run, ids, left_out):
  return record_without(run.config, OPTIONS, run.params, left_out, ids).layers


# Not with norms after the residual sum, which act on what is left too, and not with learned sink
# tokens, which keep their additions.
LEAVING_NOTHING = [
  {},
  dict(norm_location='sandwich', implementation='chunked'),
  dict(norm_location='protected', norm='none', attention=sj.AttentionSpec(qk_norm=sj.QKNorm())),
  dict(parallel_residual=True),
  dict(pattern=(Layer(), Layer(mask=sj.Window(size=3)))),
]


@pytest.mark.parametrize(
  'changes',
  [
    *LEAVING_NOTHING,
    dict(norm_location='post'),
    dict(sink_tokens=2),
  ],
)
def test_nothing_left_out_is_the_model(changes):
  run = small_run(**changes)
  ids = tokens(2, 7)
  plain = run.record(ids, OPTIONS).layers
  same = without(run, ids, np.zeros((2, 2, 7), bool))

  np.testing.assert_array_equal(plain.importance.normalized, same.importance.normalized)
  np.testing.assert_array_equal(plain.hidden, same.hidden[:, 1])


@pytest.mark.parametrize('changes', LEAVING_NOTHING)
@pytest.mark.parametrize('sub_layer, kernel', [('attention', 'out'), ('ffn', 'w_out')])
def test_left_out_everywhere_is_a_kernel_of_zero(changes, sub_layer, kernel):
  run = small_run(**changes)
  ids = tokens(2, 7)
  left_out = np.zeros((2, 2, 7), bool)
  left_out[1, int(sub_layer == 'ffn')] = True
  found = without(run, ids, left_out)

  params = jax.tree.map(np.array, run.params)
  if 'pattern' in changes:
    params['blocks']['layer1'][sub_layer][kernel]['kernel'][0] = 0
  else:
    params['blocks'][sub_layer][kernel]['kernel'][1] = 0
  zeroed = dataclasses.replace(run, params=params)
  expected = zeroed.record(ids, OPTIONS).layers

  np.testing.assert_allclose(found.hidden[:, 1], expected.hidden, atol=1e-6)
