"""Attention of the last query against whole maps."""

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import last_query
from tests.analyses.small import check_png, check_rows, drawn, options, random_inputs, small_run

WINDOW = sj.AttentionSpec(mask='Window(size=4)')


@pytest.mark.parametrize('changes', [
    {}, dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()'), kv_heads=4),
    dict(attention=sj.AttentionSpec(kv_bias='SinkLogit()')), dict(attention=WINDOW)],
    ids=['softmax', 'sigmoid', 'sink logit', 'window'])
def test_numbers(changes):
  run, inputs = small_run(**changes), random_inputs()
  found = last_query.measure(run, inputs, options())
  layers = run.record(inputs.tokens, sj.RecordOptions(maps=True)).layers
  maps = np.asarray(layers.proxy_maps_BxHxTxT, np.float64)
  heads = maps[:, :, :, -1, 0].mean(1)  # (N, H)
  np.testing.assert_allclose(found['heads'], heads, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(found['mean'], heads.mean(1), rtol=1e-4, atol=1e-6)
  deviation = np.sqrt(((heads - heads.mean(1, keepdims=True)) ** 2).mean(1))
  np.testing.assert_allclose(found['deviation'], deviation, rtol=1e-4, atol=1e-6)
  assert (found['sequences'], found['length'], found['uniform']) == (3, 9, 1 / 9)
  assert (heads == 0).all() == (changes.get('attention') == WINDOW)


def test_chosen_layers_and_heads():
  run, inputs = small_run(), random_inputs()
  whole = last_query.measure(run, inputs, options())
  found = last_query.measure(run, inputs, options(layers=(1,), heads=(3, 0)))
  assert found['layers'] == [1]
  assert found['heads'] == [[whole['heads'][1][3], whole['heads'][1][0]]]
  for asked, words in ((dict(layers=(2,)), '--layers=3: .* in 1,2'),
                       (dict(heads=(4,)), '--heads=5: .* 1 to 4')):
    with pytest.raises(ValueError, match=words):
      last_query.measure(run, inputs, options(**asked))


def test_picture(tmp_path):
  result = last_query.measure(small_run(layers=4), random_inputs(), options())
  assert len(check_rows(last_query, [result])) == 5
  last_query.draw([result, result | {'model': 'other'}], tmp_path / 'last.png')
  check_png(tmp_path / 'last.png')


def test_what_is_drawn_where(monkeypatch):
  run = small_run(layers=3)
  result = last_query.measure(run, random_inputs(), options(layers=(0, 2)))
  other = result | {'model': 'other', 'mean': [0.2, 1.0], 'deviation': [0.5, 0.4]}
  figure = drawn(last_query, [result, other], monkeypatch)
  [ax] = figure.axes
  for bars, own, shift in zip(ax.containers, (result, other), (-0.075, 0.075)):
    points = bars.lines[0].get_xydata()
    np.testing.assert_allclose(points, np.transpose([[1 + shift, 3 + shift], own['mean']]))
    ends = np.array([path.get_segments() for path in bars.lines[2]])[0, :, :, 1]
    np.testing.assert_allclose(ends[:, 1] - ends[:, 0], 2 * np.array(own['deviation']))
  low, high = ax.get_ylim()
  assert low < 0.2 - 0.5 and high > 1.0 + 0.4
  figure.draw_without_rendering()
  assert ax.get_legend().get_window_extent().x0 >= ax.get_window_extent().x1
