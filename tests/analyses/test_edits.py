"""Causal edits against a decoder in NumPy, and their controls on a model with a planted sink."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import sink_jax as sj
from sink_jax.analyses import edits
from sink_jax.evaluate.bootstrap import bootstrap
from sink_jax.models.config import Layer
from sink_jax.models.edits import edit_tree, edited_logits
from tests.analyses.numpy_decoder import forward, losses
from tests.analyses.small import HYBRID, importance, small_run, tokens

LOCAL = Layer(mask=sj.Window(size=3), position=sj.Rope(base=100.0))
GEMMA_3 = (LOCAL,) * 5 + (Layer(position=sj.Rope(base=1e6)),)
SIGMOID = sj.AttentionSpec('Sigmoid()', 'Unnormalized()', kv_bias='KVBias()')


def edited(run, ids, **changes):
  batch, length = ids.shape
  tree = edit_tree(
    run.config,
    batch=batch,
    length=length + run.config.sink_tokens,
    **changes,
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

  assert_array_equal(edited(run, ids), run.logits(ids))

  kept = np.arange(11 + run.config.sink_tokens) != 1
  for edit in (
    {'keep_NxBxHxT': kept},
    {'values_NxBxT': kept},
    {'heads_NxH': False},
    {'caps_MxD': 0.5},
  ):
    assert np.abs(edited(run, ids, **edit) - run.logits(ids)).max() > 1e-3


@pytest.mark.parametrize('layers, pattern', [(2, (Layer(),)), (4, (LOCAL, Layer())), (12, GEMMA_3)])
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
  every = {
    'keep_NxBxHxT': draw(3, 4, 9),
    'values_NxBxT': draw(3, 9),
    'heads_NxH': draw(4),
    'caps_MxD': caps,
  }

  for chosen in (
    {},
    *({name: x} for name, x in every.items()),
    every,
  ):
    expected = forward(run, ids, **chosen)[0]
    # Every block adds a few float32 roundings of 6e-8 each, and sharp queries multiply them.
    error = np.abs(edited(run, ids, **chosen) - expected).max()
    assert error < 5e-6 * layers * np.abs(expected).max()


def test_blocks_without_attention_are_only_capped():
  heads = np.eye(4, dtype=bool)
  config = small_run(layers=8, pattern=HYBRID).config
  caps = np.arange(8)[:, None]
  tree = edit_tree(
    config,
    batch=2,
    length=5,
    heads_NxH=heads,
    caps_MxD=caps,
  )['blocks']

  assert list(tree['layer0']) == ['caps']
  assert tree['layer0']['caps'][:, 0].tolist() == [0, 2, 4, 6]
  assert_array_equal(tree['layer1']['attention']['heads'], heads)


@pytest.fixture(scope='module')
def planted():
  """Token 0 has the massive channel 5, which heads 1 and 2 read; block 2 has small values."""
  run = small_run()
  params = jax.tree.map(np.array, run.params)
  params['embed'][:, [5, 14]], params['embed'][0, 5] = (0, 1), 400
  attention = params['blocks']['attention']
  attention['query']['kernel'][:, :, :8] = 0
  attention['query']['kernel'][:, 14, [1, 5]] = 2  # channel that rotates slowly
  attention['key']['kernel'][:, :, 1] = 2 * (np.arange(16) == 5)
  params['blocks']['norm1']['gain'][:] = 1
  attention['value']['kernel'][1, :, :4] *= 0.05
  return dataclasses.replace(run, params=params)


@pytest.fixture(scope='module')
def measured(planted):
  """(result, tokens, edits); an edit is a list of (tokens, arrays), first its targets."""
  spy = mock.Mock(wraps=edits._losses)
  with mock.patch.object(edits, '_losses', spy):
    result = sj.analyse(
      'edits', planted, controls=3, inputs='random', bos='force', sequences=5, length=24
    )
  asked = [(call.args[1], call.kwargs) for call in spy.call_args_list]
  ids = asked[0][0]
  with_controls = [asked[1 + 4 * i : 5 + 4 * i] for i in range(5)]
  return result, ids, [*with_controls, asked[21:]]


def test_rows_of_a_planted_sink_and_its_controls(planted, measured):
  result, ids, groups = measured
  rows = {row['edit']: row for row in result.rows}
  sink_heads = importance(planted, ids)[..., 0].mean(1) > 0.3

  assert sink_heads[:, :2].all()
  assert {edit: row['targets'] for edit, row in rows.items()} == {
    'drop the key': 'position 1',
    'drop the key in sink heads': f'position 1 in {sink_heads.sum()} heads',
    'zero the value': 'position 1',
    'cap the massive channels': '1 channel',
    'remove the dormant heads': '2 heads',
    'leave out BOS': 'BOS',
  }

  # Every number is computed again from the edits that were asked for.
  base = losses(planted, ids)[:, 1:].mean(1)
  for row, group in zip(rows.values(), groups, strict=True):
    part = slice(-1) if row['edit'] == 'leave out BOS' else slice(1, None)
    found = [losses(planted, inputs, **changes)[:, part].mean(1) for inputs, changes in group]
    change, *control = [(x - base).mean() for x in found]
    low, high = bootstrap(found[0] - base)
    expected = {
      'loss': found[0].mean(),
      'change': change,
      'low': low,
      'high': high,
      'controls': len(control),
      'control': np.mean(control),
      'control_low': min(control),
      'control_high': max(control),
    }
    measured_now = {name: row[name] for name in expected}
    assert measured_now == pytest.approx(expected, abs=1e-5)  # losses are about 6
    assert row['beyond'] is bool(row['low'] > row['control_high'])

  assert len(result.plot().axes) == 1


def test_the_targets_are_the_planted_ones_and_the_controls_are_others(planted, measured):
  result, ids, groups = measured
  sink_heads = importance(planted, ids)[..., 0].mean(1) > 0.3
  arrays = [[next(iter(changes.values())) for _, changes in group] for group in groups[:5]]
  keys, in_heads, values, caps, heads = arrays
  places = [np.flatnonzero(~kept_T).tolist() for kept_T in keys]

  assert places == [np.flatnonzero(~kept_T).tolist() for kept_T in values]
  assert places[0] == [0]
  assert len(set(map(tuple, places))) > 2
  for place in places[1:]:
    assert len(place) == 1
    assert 4 <= place[0] < 12
  for kept, kept_T in zip(in_heads, keys):
    assert_array_equal(kept[:, 0], ~sink_heads[..., None] | kept_T)

  _, hidden, norms = forward(planted, ids)
  largest_M = np.abs(np.delete(hidden, 5, -1)).max((1, 2, 3))
  expected = np.where(np.arange(16) == 5, largest_M[:, None], np.inf)
  assert_allclose(caps[0], expected, rtol=1e-5)
  [row] = [row for row in result.rows if row['edit'] == 'cap the massive channels']
  assert row['cap'] == pytest.approx(np.median(largest_M))
  for control in caps[1:]:
    assert np.count_nonzero(control == 0) == 1
    assert np.isinf(control[control != 0]).all()
    assert control[5] > 0

  shares = norms.mean((1, 2)) / norms.mean((1, 2, 3))[:, None]
  assert_array_equal(heads[0], shares >= 0.25)
  for control in heads[1:]:  # in block 2, as the dormant ones
    assert (~control).sum(1).tolist() == [0, 2]
    assert (control | heads[0]).all()

  for k, (moved, _) in enumerate(groups[5]):  # without BOS, then without the second token
    assert_array_equal(moved[:, :-1], np.delete(ids, k, 1))


def test_a_key_that_nobody_sees_is_a_text_without_its_token():
  run = small_run(sharp=2.0, implementation='reference')
  ids = tokens(3, 9)
  found = edited(run, ids, keep_NxBxHxT=np.arange(9) > 0)[:, 1:]

  # Rotary positions are relative.
  assert_allclose(found, run.logits(ids[:, 1:]), atol=2e-5)


def test_edits_without_targets_or_controls_have_no_numbers():
  rows = sj.analyse('edits', small_run(pattern=HYBRID), tokens(2, 8), controls=1).rows
  assert not any('change' in row for row in rows)  # 8 tokens are too few for a control position
  assert rows[0]['targets'].startswith('position')
  assert [row['targets'] for row in rows[3:]] == ['none'] * 3

  change = np.full(3, 0.3)  # beyond one control but not beyond the other
  assert not edits._changes(0 * change, [change, change / 3, 2 * change])['beyond']
  assert edits._changes(0 * change, [change, change / 3, change / 2])['beyond']

  with pytest.raises(ValueError, match='--controls=0'):
    sj.analyse('edits', small_run(), tokens(2, 8), controls=0)
