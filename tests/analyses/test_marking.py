"""A planted mark of the first token is found, an untrained model has none, and NumPy agrees."""

import dataclasses

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses.card import Card
from sink_jax.evaluate.activations import key_cosines
from sink_jax.evaluate.sinks import random_targets
from sink_jax.models.additions import record_without, streams_and_additions
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


@pytest.fixture(scope='module')
def planted():
  """Position 1 has channel 3, block 2 makes channel 5 of it, and keys of blocks 3 and 4 read that."""
  run = small_run(layers=4, attention=sj.AttentionSpec(position=sj.Learned(max_length=32)))
  params = jax.tree.map(np.array, run.params)
  params['embed'][:, [FIRST, CONSTANT, MARK]] = 0, 1, 0
  params['positions'][:] = 0
  params['positions'][0, FIRST] = 2
  attention = params['blocks']['attention']
  ffn = params['blocks']['ffn']
  attention['out']['kernel'] *= 0.01
  attention['query']['kernel'][:] = attention['key']['kernel'][:] = 0
  attention['query']['kernel'][:, CONSTANT, 0] = 8  # of the first head
  attention['key']['kernel'][2:, MARK, 0] = 2
  ffn['w_out']['kernel'] *= 0.01
  for name in ('w1', 'w2'):
    ffn[name]['kernel'][1, :, 0] = 4 * (np.arange(16) == FIRST)
  ffn['w_out']['kernel'][1, 0] = 5 * (np.arange(16) == MARK)
  for norm in ('norm1', 'norm2'):
    params['blocks'][norm]['gain'][:] = 1
  return dataclasses.replace(run, params=params)


def test_the_planted_sub_layer_is_found(planted):
  ids = tokens(6, 24)
  result = sj.analyse('marking', planted, ids, controls=5)
  rows = result.rows
  marks = [row for row in rows if row.get('marks')]
  assert [(row['block'], row['what']) for row in marks] == [(2, 'feed-forward network')]
  heads = maps(planted, ids)[..., 0].mean(-1) > 0.3  # (N, S, H), the first head of blocks 3 and 4
  assert heads[2:, :, 0].all()
  assert marks[0]['sink_1'] == pytest.approx(100 * heads.mean()) == 12.5
  assert marks[0]['left'] == 0
  assert marks[0]['control_low'] == marks[0]['control_high'] == 12.5
  # The direction is that of the channel: all that block 2 adds to the first token lies along it.
  assert marks[0]['along'] == pytest.approx(marks[0]['norm'], rel=0.02)
  assert marks[0]['along'] > 20
  assert marks[0]['along_random'] < 1
  [sentence] = Card('planted', {'marking': result}).sentences
  assert sentence.startswith("Block 2's feed-forward network marks the first token: it adds")
  state = [row for row in rows if row['part'] == 'state']
  assert [row['appears'] for row in state] == [False, False, True, False, False]
  assert state[2]['cosine'] > 0.98 > 0.9 > state[2]['cosine_random']
  keys = [row for row in rows if row['part'] == 'key']
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
  assert all(row['cosine'] is None for row in rows if row['part'] == 'state')
  assert {row['what'] for row in rows if row['part'] == 'addition' and row['block'] == 1} == {
    'Mamba mixer',
    'feed-forward network',
  }
  with pytest.raises(ValueError, match='--controls=0'):
    sj.analyse('marking', small_run(), tokens(2, 8), controls=0)


def forward(run, ids, left_out):
  """Streams (M + 1, B, T, D), additions (M, 2, B, T, D) and maps (M, H, B, T, T), in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), run.params)
  h = params['embed'][ids]
  streams = [h]
  added = []
  for m in range(run.config.layers):
    own = jax.tree.map(lambda x, m=m: x[m], params['blocks'])
    for i, (name, f) in enumerate(
      (('attention', numpy_model._attention), ('ffn', numpy_model._feed_forward))
    ):
      x = numpy_model._norm(run.config, h, own[f'norm{i + 1}'])
      added.append(np.where(left_out[m, i, :, None], 0, f(run.config, x, own[name])))
      h = h + added[-1]
    streams.append(h)
  return np.array(streams), np.array(added).reshape(-1, 2, *h.shape)


def test_the_edit_is_that_of_numpy():
  run = small_run(sharp=2.0, layers=3, **NOPE)
  ids = tokens(3, 9)
  left_out = np.random.default_rng(1).random((3, 2, 9)) < 0.3
  record = record_without(run.config, OPTIONS, run.params, left_out, ids)
  # Three blocks add a few float32 roundings of 6e-8 each, and sharp queries multiply them.
  for found, expected in zip(streams_and_additions(record), forward(run, ids, left_out)):
    expected = np.moveaxis(expected, -3, 0)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_rows_are_those_of_numpy():
  run = small_run(sharp=2.0, layers=3, **NOPE)
  ids = tokens(4, 9)
  ids[1, 0] = ids[0, 0]
  rows = sj.analyse('marking', run, ids).rows
  streams, added = forward(run, ids, np.zeros((3, 2, 9), bool))
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  direction = unit(unit(streams[2][:, 0]).mean(0))
  drawn = random_targets(np.full(4, 9))[:100]
  close = lambda expected: pytest.approx(expected, rel=1e-4, abs=1e-4)
  pairs = [(s, t) for s in range(4) for t in range(4) if ids[s, 0] != ids[t, 0]]
  for m, row in enumerate(row for row in rows if row['part'] == 'state'):
    h = unit(streams[m])
    cosine = lambda at: np.mean([h[s, at[s]] @ h[t, at[t]] for s, t in pairs])
    assert row['along'] == close((streams[m][:, 0] @ direction).mean())
    assert row['cosine'] == close(cosine([0] * 4))
    assert row['cosine_random'] == close(np.percentile([cosine(at) for at in drawn], 99))
  for n, row in enumerate(row for row in rows if row['part'] == 'addition'):
    x = added[n // 2, n % 2]
    random = [np.percentile([x[s, at[s]] @ direction for at in drawn], 99) for s in range(4)]
    assert row['norm_others'] == close(np.linalg.norm(x[:, 1:], axis=-1).mean())
    assert row['along_random'] == close(max(random))
    assert row['exceeds'] == all(x[s, 0] @ direction > random[s] for s in range(4))


def test_cosines_of_keys_are_those_of_numpy():
  run = small_run()
  ids = tokens(3, 7)
  found = run.record(ids, sj.RecordOptions(attention=key_cosines)).layers.attention
  recorded = run.record(ids, sj.RecordOptions(attention=queries_keys)).layers.attention
  found, q, k = (np.asarray(x) for x in (found, *recorded))
  for n, s, h, j in np.ndindex(2, 3, 4, 7):
    mean = np.mean(q[n, s, 1:, h], 0)
    key = k[n, s, j, h // 2]
    cosine = mean @ key / np.linalg.norm(mean) / np.linalg.norm(key)
    assert found[n, s, h, j] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize(
  'changes',
  [
    {},
    dict(norm_location='sandwich', implementation='chunked'),
    dict(norm_location='post'),
    dict(norm_location='protected', norm='none', attention=sj.AttentionSpec(qk_norm=sj.QKNorm())),
    dict(parallel_residual=True),
    dict(pattern=(sj.models.config.Layer(), sj.models.config.Layer(mask=sj.Window(size=3)))),
    dict(sink_tokens=2),
  ],
)
def test_left_out_everywhere_is_a_kernel_of_zero(changes):
  run = small_run(**changes)
  ids = tokens(2, 7)
  whole = np.zeros((2, 2, 7), bool)
  record = lambda run, left_out: record_without(run.config, OPTIONS, run.params, left_out, ids)
  plain = run.record(ids, OPTIONS)
  same = record(run, whole)
  np.testing.assert_array_equal(
    plain.layers.importance.normalized, same.layers.importance.normalized
  )
  np.testing.assert_array_equal(plain.layers.hidden, same.layers.hidden[:, 1])
  if changes.get('norm_location') == 'post' or 'sink_tokens' in changes:
    return  # the norm of what is left acts too, and learned sink tokens keep their additions
  params = jax.tree.map(np.array, run.params)
  blocks = params['blocks'] if 'pattern' not in changes else params['blocks']['layer1']
  at = 0 if 'pattern' in changes else 1
  for i, name in enumerate(('attention', 'ffn')):
    zeroed = jax.tree.map(np.array, params)
    place = zeroed['blocks'] if 'pattern' not in changes else zeroed['blocks']['layer1']
    place[name]['out' if name == 'attention' else 'w_out']['kernel'][at] = 0
    left_out = whole.copy()
    left_out[1, i] = True
    expected = dataclasses.replace(run, params=zeroed).record(ids, OPTIONS).layers
    found = record(run, left_out).layers
    np.testing.assert_allclose(found.hidden[:, 1], expected.hidden, atol=1e-6)
