"""Causal edits against a decoder in NumPy float64, and controls on a model with a planted sink."""

import dataclasses
import itertools
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
  length = ids.shape[1] + run.config.sink_tokens
  tree = edit_tree(run.config, batch=len(ids), length=length, **changes)
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
  logits = run.logits(ids)

  np.testing.assert_array_equal(edited(run, ids), logits)

  kept = np.arange(11 + run.config.sink_tokens) != 1

  for edit in (
    {'keep_NxBxHxT': kept},
    {'values_NxBxT': kept},
    {'heads_NxH': False},
    {'caps_MxD': 0.5},
  ):
    assert np.abs(edited(run, ids, **edit) - logits).max() > 1e-3


@pytest.mark.parametrize('layers, pattern', [(2, (Layer(),)), (4, (LOCAL, Layer())), (12, GEMMA_3)])
def test_each_edit_is_that_of_numpy(layers, pattern):
  run = small_run(sharp=2.0, layers=layers, pattern=pattern, implementation='chunked')
  ids = tokens(3, 9)
  rng = np.random.default_rng(1)
  draw = lambda *shape: rng.random((layers, *shape)) < 0.6
  caps = {'caps_MxD': rng.uniform(0.1, 2, (layers, 16))}
  later = caps | {'capped_T': np.arange(9) > 2}
  keep = {'keep_NxBxHxT': draw(3, 4, 9)}
  values = {'values_NxBxT': draw(3, 9)}
  heads = {'heads_NxH': draw(4)}
  every = keep | values | heads | later

  for chosen in ({}, keep, values, heads, caps, later, every):
    expected = forward(run, ids, **chosen)[0]
    # Every block adds a few float32 roundings of 6e-8 each, and sharp queries multiply them.
    error = np.abs(edited(run, ids, **chosen) - expected).max()
    assert error < 5e-6 * layers * np.abs(expected).max()


def test_blocks_without_attention_are_only_capped():
  config = small_run(layers=8, pattern=HYBRID).config
  heads = np.eye(4, dtype=bool)
  caps = np.arange(8)[:, None]
  tree = edit_tree(config, batch=2, length=5, heads_NxH=heads, caps_MxD=caps)
  mamba, attention = tree['blocks']['layer0'], tree['blocks']['layer1']

  assert list(mamba) == ['caps', 'capped']
  assert mamba['caps'][:, 0].tolist() == [0, 2, 4, 6]
  np.testing.assert_array_equal(attention['attention']['heads'], heads)


@pytest.fixture(scope='module')
def planted():
  """Token 0 has the massive channel 5, which key heads 1 and 2 read, with small values."""
  run = small_run()
  params = jax.tree.map(np.array, run.params)
  params['embed'][:, [5, 14]] = 0, 1
  params['embed'][0, 5] = 400
  attention = params['blocks']['attention']
  attention['query']['kernel'][:, :, :8] = 0
  attention['query']['kernel'][:, 14, [1, 5]] = 2  # channel that rotates slowly
  attention['key']['kernel'][:, :, 1] = 2 * (np.arange(16) == 5)
  params['blocks']['norm1']['gain'][:] = 1
  attention['value']['kernel'][1, :, :4] *= 0.05
  return dataclasses.replace(run, params=params)


EDITS = [
  'drop the key',
  'drop the key in sink heads',
  'zero the value',
  'cap the massive channels',
  'cap the massive channels of sinks',
  'cap the massive channels of others',
  'remove the dormant heads',
  'leave out BOS',
]
# Losses that each asks for: of its targets, of three controls, and of targets of the same size.
ASKED = dict(zip(EDITS, [4, 5, 4, 5, 5, 5, 4, 2]))


@pytest.fixture(scope='module')
def measured(planted):
  """The result, the ids, and by edit the (ids, changes) whose losses were asked for."""
  options = dict(inputs='random', bos='force', sequences=5, length=24)
  with mock.patch.object(edits, '_losses', wraps=edits._losses) as spy:
    result = sj.analyse('edits', planted, controls=3, **options)
  asked = iter([(call.args[1], call.kwargs) for call in spy.call_args_list])
  ids, _ = next(asked)  # of the whole model
  groups = {edit: list(itertools.islice(asked, count)) for edit, count in ASKED.items()}
  assert not list(asked)
  return result, ids, groups


@pytest.fixture(scope='module')
def rows(measured):
  return {row['edit']: row for row in measured[0].rows}


@pytest.fixture(scope='module')
def changes(measured):
  """By edit the argument that its targets, controls and targets of the same size differ in."""
  _, _, groups = measured
  return {
    edit: [next(iter(changes.values())) for _, changes in groups[edit]] for edit in EDITS[:-1]
  }


@pytest.fixture(scope='module')
def sink_heads(planted, measured):
  _, ids, _ = measured
  alpha_NxH = importance(planted, ids)[..., 0].mean(1)
  return alpha_NxH > 0.3


def test_rows_name_the_planted_targets(rows, sink_heads):
  assert sink_heads[:, :2].all()
  assert [(edit, row['targets']) for edit, row in rows.items()] == [
    ('drop the key', 'position 1'),
    ('drop the key in sink heads', f'position 1 in {sink_heads.sum()} heads'),
    ('zero the value', 'position 1'),
    ('cap the massive channels', '1 channel'),
    ('cap the massive channels of sinks', '1 channel'),
    ('cap the massive channels of others', '1 channel'),
    ('remove the dormant heads', '2 heads'),
    ('leave out BOS', 'BOS'),
  ]


@pytest.mark.parametrize('edit', EDITS)
def test_numbers_are_those_of_the_edits_that_were_asked_for(planted, measured, rows, edit):
  _, ids, groups = measured
  row = rows[edit]
  base = losses(planted, ids)[:, 1:].mean(1)
  part = slice(-1) if edit == 'leave out BOS' else slice(1, None)
  found = [losses(planted, inputs, **of)[:, part].mean(1) for inputs, of in groups[edit]]
  change, *control = [(x - base).mean() for x in found]
  matched = {'matched': control.pop()} if len(found) == 5 else {}
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

  shown = {name: row[name] for name in expected}

  assert shown == pytest.approx(expected, abs=1e-5)  # losses are about 6

  beaten = max(*control, *matched.values(), 0.01 * base.mean())

  assert row['beyond'] == (row['low'] > beaten)
  assert isinstance(row['beyond'], bool)


def test_keys_and_values_of_the_sink_are_edited_and_those_of_other_tokens(changes, sink_heads):
  keys, values = changes['drop the key'], changes['zero the value']
  places, again = ([np.flatnonzero(~x).tolist() for x in masks] for masks in (keys, values))
  sink, *controls = places

  assert places == again
  assert sink == [0]
  assert len(set(map(tuple, controls))) > 1
  assert all(len(place) == 1 and 4 <= place[0] < 12 for place in controls)
  for kept, kept_T in zip(changes['drop the key in sink heads'], keys):
    np.testing.assert_array_equal(kept[:, 0], ~sink_heads[..., None] | kept_T)


def test_the_planted_channel_is_capped_at_the_largest_other_one(planted, measured, rows, changes):
  _, ids, _ = measured
  hidden, _ = forward(planted, ids)[1:]
  caps, *controls, matched = changes['cap the massive channels']

  largest_M = np.abs(np.delete(hidden, 5, -1)).max((1, 2, 3))
  expected = np.where(np.arange(16) == 5, largest_M[:, None], np.inf)

  np.testing.assert_allclose(caps, expected, rtol=1e-5)
  assert rows['cap the massive channels']['cap'] == pytest.approx(np.median(largest_M))
  for control in (*controls, matched):
    assert np.count_nonzero(control == 0) == 1
    assert np.isinf(control[control != 0]).all()
    assert control[5] > 0

  # Of the same size: the other channel with the largest entries.
  by_channel = np.abs(hidden).max(2).mean(1).max(0)
  by_channel[5] = 0

  assert np.flatnonzero(matched == 0).tolist() == [by_channel.argmax()]


def test_caps_hold_for_all_tokens_for_sinks_or_for_others(measured):
  _, _, groups = measured
  first = [True] + [False] * 23
  others = [False] + [True] * 23
  for edit, expected in zip(EDITS[3:6], ([True] * 24, first, others)):
    assert [of['capped_T'].tolist() for _, of in groups[edit]] == [expected] * 5


def test_dormant_heads_are_removed_and_as_many_in_their_block(planted, measured, changes):
  _, ids, _ = measured
  _, norms = forward(planted, ids)[1:]
  dormant, *controls = changes['remove the dormant heads']

  shares = norms.mean((1, 2)) / norms.mean((1, 2, 3))[:, None]

  np.testing.assert_array_equal(dormant, shares >= 0.25)
  for heads in controls:
    assert (~heads).sum(1).tolist() == [0, 2]
    assert (heads | dormant).all()


def test_texts_without_bos_and_without_the_second_token(measured):
  result, ids, groups = measured
  for k, (moved, _) in enumerate(groups['leave out BOS']):
    np.testing.assert_array_equal(moved[:, :-1], np.delete(ids, k, 1))
  assert len(result.plot().axes) == 1


def test_where_the_sink_moves_to(planted, measured, rows):
  """Rotary positions are relative: without its key the text begins at the second token."""
  _, ids, _ = measured
  dropped = rows['drop the key']
  after = sj.probe(planted, ids[:, 1:]).sink_rates()[:11]
  before = sj.probe(planted, ids).sink_rates()

  assert dropped['moved_rate'] == pytest.approx(after.max())
  assert after[dropped['moved_to'] - 2] == after.max()
  assert dropped['rate_before'] == pytest.approx(before[dropped['moved_to'] - 1])


def test_as_much_attention_is_hidden_elsewhere():
  """In a head that gives a sink half of its attention, the other half; with less, the largest."""
  mass_HxT = np.array([[3, 1, 2, 0, 0, 0], [1, 2, 1.5, 1, 0.5, 0], [0, 6, 0, 0, 0, 0]])
  alpha_HxT = mass_HxT / np.arange(6, 0, -1)  # a mean over the queries from the key on
  without_sink = np.array([[False, False, True]])
  shares, kept = edits._elsewhere(alpha_HxT[None], np.array([0]), without_sink)

  assert [np.flatnonzero(~x).tolist() for x in kept[0]] == [[1, 2], [1], []]
  assert shares == pytest.approx({'share': 4 / 12, 'matched_share': 5 / 12})


def test_edits_without_targets_or_controls_have_no_numbers():
  rows = sj.analyse('edits', small_run(pattern=HYBRID), tokens(2, 8), controls=1).rows

  assert not any('change' in row for row in rows)  # 8 tokens are too few for a control position
  assert rows[0]['targets'].startswith('position')
  assert [row['targets'] for row in rows[3:]] == ['none'] * 3

  with pytest.raises(ValueError, match='--controls=0'):
    sj.analyse('edits', small_run(), tokens(2, 8), controls=0)


@pytest.mark.parametrize(
  'controls, matched, beyond',
  [
    ([0.1, 0.15], None, True),
    ([0.1, 0.6], None, False),  # beyond one control but not beyond the other
    ([0.1], 0.6, False),
  ],
)
def test_beyond_is_beyond_every_control(controls, matched, beyond):
  change = np.full(3, 0.3)
  of_controls = [np.full(3, control) for control in controls]
  of_same_size = () if matched is None else (np.full(3, matched),)
  found = edits._changes(np.zeros(3), change, of_controls, *of_same_size)
  assert found['beyond'] == beyond
