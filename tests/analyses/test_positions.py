"""Table 7 on a model whose sink is known, and on records of edited parameters."""

import dataclasses

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import positions
from tests.analyses.small import (
  VOCABULARY,
  check_png,
  check_rows,
  drawn,
  lines,
  options,
  random_inputs,
  repeated_inputs,
  small_run,
)

LEARNED = sj.AttentionSpec(position=sj.Learned(max_length=16))


def sink_at(first, length=16):
  """One head without norms: every query looks for what the vector of one position holds."""
  config = sj.ModelConfig(layers=1, d_model=4, heads=1, ffn_hidden=4, ffn='none', norm='none',
                          vocab_size=VOCABULARY, dtype='float32',
                          attention=sj.AttentionSpec(position=sj.Learned(max_length=length)))
  eye, zero = np.eye(4, dtype=np.float32), np.zeros((4, 4), np.float32)
  look = zero.copy()
  look[0, 1] = 1  # what is in every token, sought in channel 1
  table = np.zeros((length, 4), np.float32)
  table[first - 1, 1] = 50
  kernel = lambda x: {'kernel': x[None]}
  params = {'embed': np.tile(eye[:1], (VOCABULARY, 1)), 'positions': table,
            'unembed': {'kernel': np.zeros((4, VOCABULARY), np.float32)},
            'blocks': {'attention': {'query': kernel(look), 'key': kernel(eye),
                                     'value': kernel(zero), 'out': kernel(zero)}}}
  return sj.Run(config, params, 'one sink')


def test_the_sink_goes_with_the_first_vector():
  run, inputs = sink_at(1), repeated_inputs(length=16)
  found = positions.measure(run, inputs, options(positions=(5, 9), epsilons=(0.9,)))
  rows = {(row['change'], row['position']): row for row in found['rows']}
  assert found['epsilon'] == 0.9 and len(rows) == 5 and 'paper' not in rows['no', None]
  assert rows['no', None]['sink_1'] == 100 and rows['no', None]['sink_t'] is None
  for t in (5, 9):
    assert rows['replaced', t]['sink_1'] == rows['replaced', t]['sink_t'] == 0
    assert rows['swapped', t]['sink_t'] == 100
  # Before the sink the rows are uniform: (1 + 1/2 + ...) / 16.
  assert rows['swapped', 5]['sink_1'] == 0
  alpha = sj.importance(np.asarray(positions.swapped(run, 5).record(
      inputs.tokens, sj.RecordOptions(maps=True)).layers.maps_BxHxTxT))[0, 0, 0]
  assert alpha[0] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 16, abs=1e-6)


def test_one_array_changes_and_nothing_else():
  run = small_run(attention=LEARNED)
  table = np.asarray(run.params['positions'])
  for change, rows in ((positions.replaced, {0: 3}), (positions.swapped, {0: 3, 3: 0})):
    edited = change(run, 4)
    expected = table.copy()
    for to, of in rows.items():
      expected[to] = table[of]
    np.testing.assert_array_equal(edited.params['positions'], expected)
    assert (edited.config, edited.name) == (run.config, run.name)
    assert edited.params.keys() == run.params.keys()
    assert all(edited.params[name] is own for name, own in run.params.items()
               if name != 'positions')
  np.testing.assert_array_equal(run.params['positions'], table)


def test_rates_are_those_of_the_edited_maps():
  run, inputs = small_run(attention=LEARNED), random_inputs()
  rows = positions.sink_rates(run, inputs.tokens, (3, 9), 0.2, batch_size=2)
  for row in rows:
    table = np.array(run.params['positions'])
    if row['change'] != 'no':
      first = table[0].copy()
      table[0] = table[row['position'] - 1]
      if row['change'] == 'swapped':
        table[row['position'] - 1] = first
    edited = dataclasses.replace(run, params=run.params | {'positions': table})
    layers = edited.record(inputs.tokens, sj.RecordOptions(maps=True)).layers
    maps = np.asarray(layers.maps_BxHxTxT, float)
    alpha = maps.sum(-2) / np.arange(9, 0, -1)
    rate = 100 * (alpha > 0.2).mean((0, 1, 2))
    assert row['sink_1'] == pytest.approx(rate[0], abs=1e-4)
    if row['position']:
      assert row['sink_t'] == pytest.approx(rate[row['position'] - 1], abs=1e-4)
  assert len({row['sink_1'] for row in rows}) > 1  # the edits can be told apart


@pytest.mark.parametrize('spec, asked, words', [
    (sj.AttentionSpec(), (5,), 'Rope.*learned vector'),
    (LEARNED, (17,), 'outside 2..16'), (LEARNED, (3, 10), r'outside 2\.\.9, the tokens')])
def test_what_cannot_be_asked(spec, asked, words):
  with pytest.raises(ValueError, match=words):
    positions.measure(small_run(attention=spec), random_inputs(), options(positions=asked))


def test_the_paper_stands_beside_its_own_model():
  run = dataclasses.replace(sink_at(1, 64), name='gpt2-xl')
  inputs, asked = repeated_inputs(length=64), (5, 20, 30, 35)
  found = positions.measure(run, inputs, options(positions=asked))
  published = {(row['change'], row['position']): row['paper'] for row in found['rows']}
  assert published['no', None] == {'sink_1': 62.28, 'sink_t': None}
  assert published['replaced', 20] == {'sink_1': 10.63, 'sink_t': 0}
  assert published['swapped', 5] == {'sink_1': 1.44, 'sink_t': 57.63}
  assert published['swapped', 30] == {'sink_1': 9.73, 'sink_t': 50.22}  # printed as 25 once more
  assert published['swapped', 35] == {'sink_1': None, 'sink_t': None}
  assert positions.rows([found])[4][3:] == [
      '-', '100.00 (57.63)', '100.00 (51.70)', '100.00 (50.22)', '100.00']
  # The paper's repeated tokens have no BOS before them.
  description = inputs.description | {'bos': inputs.description['bos'] | {'protocol': 'force'}}
  forced = dataclasses.replace(inputs, description=description)
  for other, told in ((random_inputs(length=64), {}), (forced, {}),
                      (inputs, dict(epsilons=(0.2,)))):
    rows = positions.measure(run, other, options(positions=(5,), **told))['rows']
    assert not any('paper' in row for row in rows)


def test_picture(tmp_path):
  result = positions.measure(sink_at(1), repeated_inputs(length=16), options(positions=(5, 9, 15)))
  positions.draw([result, result], tmp_path / 'positions.png')
  table = check_rows(positions, [result, result])
  assert table[0][3:] == ['no', 't=5', 't=9', 't=15'] and len(table) == 9
  assert table[4][1:] == ['swapped', 'Sink_t', '-', '100.00', '100.00', '100.00']
  check_png(tmp_path / 'positions.png')


@pytest.mark.parametrize('length, expected', [(16, [5, 10, 15]), (12, [5, 10])])
def test_default_positions_are_those_that_there_are(length, expected):
  found = positions.measure(sink_at(1), repeated_inputs(length=length), options())
  assert [row['position'] for row in found['rows'] if row['change'] == 'swapped'] == expected


def test_default_positions_of_short_inputs():
  with pytest.raises(ValueError, match='--positions: none of .* within 4 tokens'):
    positions.measure(sink_at(1), repeated_inputs(length=4), options())


def test_what_is_drawn_where(monkeypatch):
  result = positions.measure(sink_at(1), repeated_inputs(length=16), options(positions=(5, 9, 15)))
  rows = {(row['change'], row['position']): row for row in result['rows']}
  for i, row in enumerate(result['rows']):
    row |= {'sink_1': 3.0 * i, 'sink_t': 4.0 * i}
  figure = drawn(positions, [result] * 4, monkeypatch)
  assert len({ax.get_position().x0 for ax in figure.axes}) == 3  # then a new row
  ax = figure.axes[0]
  assert list(ax.get_xticks()) == [5, 9, 15]
  found = lines(ax)
  untouched = next(points for name, points in found.items() if 'untouched' in name)
  assert set(untouched[:, 1]) == {rows['no', None]['sink_1']}
  for change, shift in (('replaced', -0.25), ('swapped', 0.25)):
    for key, name in (('sink_1', '_1'), ('sink_t', '_t')):
      [points] = [own for title, own in found.items()
                  if title.endswith(change) and f'Sink}}{name}' in title]
      np.testing.assert_allclose(points, [(t + shift, rows[change, t][key]) for t in (5, 9, 15)])
