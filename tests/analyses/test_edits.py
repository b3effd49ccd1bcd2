"""Causal edits against a decoder in NumPy float64, and controls on a model with a planted sink."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import edits
from sink_jax.evaluate.intervals import t_interval
from sink_jax.models.config import Layer
from sink_jax.models.edits import edit_tree, edited_logits
from tests.analyses.numpy_decoder import forward, losses
from tests.analyses.small import HYBRID, importance, small_run, tokens

LOCAL = Layer(mask=sj.Window(size=3), position=sj.Rope(base=100.0))
GEMMA_3 = (LOCAL,) * 5 + (Layer(position=sj.Rope(base=1e6)),)
SIGMOID = sj.AttentionSpec('Sigmoid()', 'Unnormalized()', kv_bias='KVBias()')


def edited(run, ids, **changes):
  tree = edit_tree(
    run.config, batch=len(ids), length=ids.shape[1] + run.config.sink_tokens, **changes
  )
  return np.asarray(edited_logits(run.config, None, run.params, tree, ids))


@pytest.mark.parametrize(
  'changes',
  [
    {},
    dict(pattern=(LOCAL, Layer())),
    dict(pattern=HYBRID),
    dict(sink_tokens=2, combine_heads='add'),
    dict(attention=SIGMOID, norm_location='post', remat='blocks'),
  ],
)
def test_without_an_edit_the_logits_are_those_of_the_model(changes):
  run = small_run(implementation='chunked', **changes)
  ids = tokens(3, 11)
  np.testing.assert_array_equal(edited(run, ids), run.logits(ids))
  kept = np.arange(11 + run.config.sink_tokens) != 1
  for edit in (
    {'keep_NxBxHxT': kept},
    {'values_NxBxT': kept},
    {'heads_NxH': False},
    {'caps_MxD': 0.5},
  ):
    assert np.abs(edited(run, ids, **edit) - run.logits(ids)).max() > 1e-3


@pytest.mark.parametrize(
  'layers, pattern',
  [
    (2, (Layer(),)),
    (4, (LOCAL, Layer())),
    (12, GEMMA_3),
  ],
)
def test_each_edit_is_that_of_numpy(layers, pattern):
  run = small_run(
    sharp=2.0,
    layers=layers,
    pattern=pattern,
    implementation='chunked',
  )
  ids = tokens(3, 9)
  rng = np.random.default_rng(1)
  draw = lambda *shape: rng.random((layers, *shape)) < 0.6
  caps = rng.uniform(0.1, 2, (layers, 16))
  every = dict(
    keep_NxBxHxT=draw(3, 4, 9),
    values_NxBxT=draw(3, 9),
    heads_NxH=draw(4),
    caps_MxD=caps,
  )
  some = {'caps_MxD': caps, 'capped_T': np.arange(9) > 2}
  for chosen in (
    {},
    *({name: x} for name, x in every.items()),
    some,
    every | some,
  ):
    expected = forward(run, ids, **chosen)[0]
    # Every block adds a few float32 roundings of 6e-8 each, and sharp queries multiply them.
    error = np.abs(edited(run, ids, **chosen) - expected).max()
    assert error < 5e-6 * layers * np.abs(expected).max()


def test_blocks_without_attention_are_only_capped():
  heads = np.eye(4, dtype=bool)
  config = small_run(layers=8, pattern=HYBRID).config
  tree = edit_tree(
    config,
    batch=2,
    length=5,
    heads_NxH=heads,
    caps_MxD=np.arange(8)[:, None],
  )['blocks']
  assert list(tree['layer0']) == ['caps', 'capped']
  assert tree['layer0']['caps'][:, 0].tolist() == [
    0,
    2,
    4,
    6,
  ]
  np.testing.assert_array_equal(tree['layer1']['attention']['heads'], heads)


@pytest.fixture(scope='module')
def planted():
  """Token 0 has the massive channel 5, which key heads 1 and 2 read, with small values."""
  run = small_run()
  params = jax.tree.map(np.array, run.params)
  params['embed'][:, 5] = 0
  params['embed'][:, 14] = 1
  params['embed'][0, 5] = 400
  attention = params['blocks']['attention']
  attention['query']['kernel'][:, :, :8] = 0
  attention['query']['kernel'][:, 14, [1, 5]] = 2  # channel that rotates slowly
  attention['key']['kernel'][:, :, 1] = 2 * (np.arange(16) == 5)
  params['blocks']['norm1']['gain'][:] = 1
  attention['value']['kernel'][1, :, :4] *= 0.05
  return dataclasses.replace(run, params=params)


def test_rows_of_a_planted_sink_and_its_controls(planted, monkeypatch):
  spy = mock.Mock(wraps=edits._losses)
  monkeypatch.setattr(edits, '_losses', spy)
  result = sj.analyse(
    'edits', planted, controls=3, inputs='random', bos='force', sequences=5, length=24
  )
  asked = [(call.args[1], call.kwargs) for call in spy.call_args_list]
  rows = {row['edit']: row for row in result.rows}
  ids = asked[0][0]
  sink_heads = importance(planted, ids)[..., 0].mean(1) > 0.3
  assert sink_heads[:, :2].all()
  assert {edit: row['targets'] for edit, row in rows.items()} == {
    'drop the key': 'position 1',
    'drop the key in sink heads': f'position 1 in {sink_heads.sum()} heads',
    'zero the value': 'position 1',
    'cap the massive channels': '1 channel',
    'cap the massive channels of sinks': '1 channel',
    'cap the massive channels of others': '1 channel',
    'remove the dormant heads': '2 heads',
    'leave out BOS': 'BOS',
  }
  # Recompute every number from the edits that were requested: first the targets, then three
  # controls, and in four rows the targets of the same size.
  base = losses(planted, ids)[:, 1:].mean(1)
  ends = np.cumsum([1, 4, 5, 4, 5, 5, 5, 4, 2])
  groups = [asked[start:end] for start, end in zip(ends[:-1], ends[1:])]
  assert len(asked) == ends[-1]
  for row, group in zip(rows.values(), groups, strict=True):
    part = slice(-1) if row['edit'] == 'leave out BOS' else slice(1, None)
    found = []
    for inputs, changes in group:
      found.append(losses(planted, inputs, **changes)[:, part].mean(1))
    change, *control = [(x - base).mean() for x in found]
    matched = {'matched': control.pop()} if len(group) == 5 else {}
    low, high = t_interval(found[0] - base)
    expected = matched | dict(
      loss=found[0].mean(),
      change=change,
      low=low,
      high=high,
      controls=len(control),
      control=np.mean(control),
      control_low=min(control),
      control_high=max(control),
    )
    assert {name: row[name] for name in expected} == pytest.approx(
      expected, abs=1e-5
    )  # losses are about 6
    beaten = max(*control, *matched.values(), 0.01 * base.mean())
    assert row['beyond'] == (row['low'] > beaten)
    assert isinstance(row['beyond'], bool)
  # The targets are the planted ones, and the controls are different ones.
  keys, in_heads, values, caps, _, _, heads = (
    [next(iter(changes.values())) for _, changes in group] for group in groups[:7]
  )
  places, again = ([np.flatnonzero(~x).tolist() for x in masks] for masks in (keys, values))
  assert places == again
  assert places[0] == [0]
  assert len(set(map(tuple, places))) > 2
  for [place] in places[1:]:
    assert 4 <= place < 12
  for kept, kept_T in zip(in_heads, keys):
    np.testing.assert_array_equal(kept[:, 0], ~sink_heads[..., None] | kept_T)
  hidden, norms = forward(planted, ids)[1:]
  largest_M = np.abs(np.delete(hidden, 5, -1)).max((1, 2, 3))
  np.testing.assert_allclose(
    caps[0], np.where(np.arange(16) == 5, largest_M[:, None], np.inf), rtol=1e-5
  )
  assert rows['cap the massive channels']['cap'] == pytest.approx(np.median(largest_M))
  for x in caps[1:]:
    assert np.count_nonzero(x == 0) == 1
    assert np.isinf(x[x != 0]).all()
    assert x[5] > 0
  # Of the same size: the other channel with the largest entries.
  by_channel = np.abs(hidden).max(2).mean(1).max(0)
  by_channel[5] = 0
  assert np.flatnonzero(caps[4] == 0).tolist() == [by_channel.argmax()]
  # The caps of the sink, and of all others, have these tokens.
  sides = [[changes['capped_T'].tolist() for _, changes in group] for group in groups[3:6]]
  first = [True] + [False] * 23
  assert [side[0] for side in sides] == [[True] * 24, first, [not x for x in first]]
  assert all(mask == side[0] for side in sides for mask in side)
  shares = norms.mean((1, 2)) / norms.mean((1, 2, 3))[:, None]
  np.testing.assert_array_equal(heads[0], shares >= 0.25)
  # The controls are in block 2.
  for x in heads[1:]:
    assert (~x).sum(1).tolist() == [0, 2]
    assert (x | heads[0]).all()
  for k, (moved, _) in enumerate(groups[7]):  # without BOS, then without the second token
    np.testing.assert_array_equal(moved[:, :-1], np.delete(ids, k, 1))
  assert len(result.plot().axes) == 1
  # Rotary positions are relative: without its key the text begins at the second token.
  dropped = rows['drop the key']
  after = sj.probe(planted, ids[:, 1:]).sink_rates()[:11]
  assert dropped['moved_rate'] == pytest.approx(after.max())
  assert after[dropped['moved_to'] - 2] == after.max()
  before = sj.probe(planted, ids).sink_rates()[dropped['moved_to'] - 1]
  assert dropped['rate_before'] == pytest.approx(before)


def test_as_much_attention_is_hidden_elsewhere():
  """In a head that gives a sink half of its attention, the other half; with less, the largest."""
  alpha = np.zeros((1, 3, 6))
  mass = np.array(
    [
      [3, 1, 2, 0, 0, 0],
      [1, 2, 1.5, 1, 0.5, 0],
      [0, 6, 0, 0, 0, 0],
    ]
  )
  alpha[0] = mass / np.arange(6, 0, -1)  # a mean over the queries from the key on
  no_sink = np.array([[False, False, True]])
  shares, kept = edits._elsewhere(alpha, np.array([0]), no_sink)
  assert [np.flatnonzero(~x).tolist() for x in kept[0]] == [
    [1, 2],
    [1],
    [],
  ]
  assert shares == pytest.approx({'share': 4 / 12, 'matched_share': 5 / 12})


def test_a_key_that_nobody_sees_is_a_text_without_its_token():
  run = small_run(sharp=2.0, implementation='reference')
  ids = tokens(3, 9)
  found = edited(run, ids, keep_NxBxHxT=np.arange(9) > 0)[:, 1:]
  np.testing.assert_allclose(
    found, run.logits(ids[:, 1:]), atol=2e-5
  )  # rotary positions are relative


def test_edits_without_targets_or_controls_have_no_numbers():
  rows = sj.analyse('edits', small_run(pattern=HYBRID), tokens(2, 8), controls=1).rows
  assert not any('change' in row for row in rows)  # 8 tokens are too few for a control position
  assert rows[0]['targets'].startswith('position')
  assert [row['targets'] for row in rows[3:]] == ['none'] * 3
  change = np.full(3, 0.3)  # beyond one control but not beyond the other
  assert not edits._changes(0 * change, change, [change / 3, 2 * change])['beyond']
  assert edits._changes(0 * change, change, [change / 3, change / 2])['beyond']
  assert not edits._changes(0 * change, change, [change / 3], 2 * change)['beyond']
  with pytest.raises(ValueError, match='--controls=0'):
    sj.analyse('edits', small_run(), tokens(2, 8), controls=0)
