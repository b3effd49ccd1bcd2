"""Pictures are images of a sensible size that hold what they are given."""

import dataclasses
import importlib
import io
import json
import struct
import sys
import types

import numpy as np
import pytest
from PIL import Image

import sink_jax as sj
from sink_jax.evaluate import plots
from sink_jax.evaluate.maps import head_maps
from sink_jax.models.transformer import init_params
from sink_jax.report import images

SIGMOID = sj.AttentionSpec('Sigmoid()', 'Unnormalized()')
K_BIAS = sj.AttentionSpec(kv_bias=sj.KBias())
MODELS = {
    'one head and layer': dict(layers=1, heads=1), 'sigmoid': dict(attention=SIGMOID),
    'bias slot': dict(attention=K_BIAS, norm_location='post'), 'sink token': dict(sink_tokens=1),
}


def run(**options):
  config = sj.ModelConfig(**dict(layers=2, d_model=8, heads=2, ffn_hidden=8, vocab_size=11,
                                 dtype='float32') | options)
  return sj.Run(config, init_params(config, 0), name='test', step=7)


def tokens(sequences=3, length=6):
  return np.random.default_rng(0).integers(0, 11, (sequences, length))


def size(path):
  """(width, height) of a PNG, in pixels."""
  data = path.read_bytes()
  assert data[:8] == b'\x89PNG\r\n\x1a\n' and data[-8:-4] == b'IEND'
  return struct.unpack('>II', data[16:24])


def check(path):
  width, height = size(path)
  assert 400 <= width <= 2000 and 300 <= height <= 2000
  assert 2_000 < path.stat().st_size < 400_000


def row(step, **values):
  return dict(kind='probe', step=step, sink_1=10.0 * step, sink_bias_slot=None,
              largest_importance=0.1 * step, mean_importance=0.05 * step) | values


@pytest.fixture(scope='module', params=MODELS)
def probed(request):
  model = run(**MODELS[request.param])
  return request.param, model, sj.probe(model, tokens())


@pytest.mark.every(2)
def test_pictures_of_a_model(probed, tmp_path):
  _, model, report = probed
  report.plot(tmp_path / 'importance.png')
  report.plot_norm_ratios(tmp_path / 'norms.png')
  plots.attention_maps(model, tokens(), tmp_path / 'maps.png')
  for path in tmp_path.iterdir():
    check(path)
  assert 'matplotlib.pyplot' not in sys.modules


def test_maps_are_what_the_probe_measured(probed):
  name, model, report = probed
  maps = head_maps(model, tokens())
  np.testing.assert_allclose(maps.importance, report.head_importance(), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(maps.raw[..., 0].mean(-1), report.raw_importance[..., 0].mean(0),
                             rtol=1e-4, atol=1e-5)
  assert maps.proxy == (name == 'sigmoid')
  assert (maps.extra_key_weight is None) == (name not in ('bias slot', 'sink token'))
  if name == 'bias slot':
    np.testing.assert_allclose(maps.extra_key_weight, report.bias_slot.mean(0), rtol=1e-4)
  assert maps.importance[maps.head(strongest=True)] == maps.importance.max()
  assert maps.importance[maps.head(strongest=False)] == maps.importance.min()


def test_maps_show_the_first_positions(probed, monkeypatch):
  _, model, _ = probed
  monkeypatch.setattr('sink_jax.evaluate.maps._LENGTH', 6)
  longer = np.concatenate([tokens(), tokens()], 1)
  np.testing.assert_allclose(head_maps(model, longer).raw, head_maps(model, tokens()).raw)


@pytest.mark.typed
@pytest.mark.parametrize('scale, shift', [(1, 0), (5, 0), (2, -1)])
def test_weights_of_any_range(scale, shift, tmp_path):
  figure, axes = plots.canvas(4, 4)
  weights = np.tril(scale * np.random.default_rng(0).random((6, 6)) + shift)
  plots.attention_panel(figure, axes[0, 0], weights, 'title', 'raw weights')
  plots.save(figure, tmp_path / 'panel.png')
  check(tmp_path / 'panel.png')
  largest = np.abs(weights).max()
  expected = {0: (0, max(1, largest)), -1: (-largest, largest)}[shift]
  assert axes[0, 0].images[0].get_clim() == pytest.approx(expected)


def test_a_large_model_has_a_map_without_numbers(probed, tmp_path):
  report = probed[2]
  alpha = np.random.default_rng(0).random((2, 22, 32, 6))
  large = dataclasses.replace(report, importance=alpha, raw_importance=alpha, bias_slot=None,
                              bias_slot_released=None, norms={})
  large.plot(tmp_path / 'large.png', epsilon=0.2)
  check(tmp_path / 'large.png')
  width, height = large.plot().get_size_inches()
  assert max(width, height) < 8 and width > height


@pytest.mark.every(4)
def test_a_notebook_shows_tables_frames_and_figures(probed, monkeypatch, tmp_path):
  name, model, report = probed
  figure, axes = plots.canvas(6, 4, columns=2)
  assert report.plot(ax=axes[0, 1]) is figure and report.plot().axes
  np.testing.assert_allclose(axes[0, 1].images[0].get_array(), report.head_importance().T)
  result = sj.analyse('norms', model, tokens()) if name != 'sink token' else None
  monkeypatch.setitem(sys.modules, 'pandas', None)  # as where it is not installed
  with pytest.raises(ImportError, match='pip install pandas'):
    report.to_pandas()
  monkeypatch.setitem(sys.modules, 'pandas', types.SimpleNamespace(DataFrame=dict))
  frame = report.to_pandas()
  layers, heads = report.head_importance().shape
  assert list(zip(frame['block'], frame['head'])) == [
      (block, head) for block in report.blocks for head in range(1, heads + 1)]
  assert frame['importance'][-1] == report.head_importance()[layers - 1, heads - 1]
  evil = dataclasses.replace(report, protocol=report.protocol | {'run': '<b>|'})
  assert '&lt;b&gt;|' in evil._repr_html_() and '<b>' not in evil._repr_html_()
  assert f'{100 * report.sink_rate():.1f} %' in evil._repr_html_()
  if result is not None:
    head, *rows = importlib.import_module('sink_jax.analyses.norms').rows([result])
    assert result.to_pandas() == {key: list(cells) for key, cells in zip(head, zip(*rows))}
    assert result.plot(ax=axes[0, 0]) is figure and len(axes[0, 0].images) == 1
    result.plot(tmp_path / 'norms.png')
    check(tmp_path / 'norms.png')
    assert rows[0][0] in result._repr_html_() and json.loads(json.dumps(result)) == result


def test_a_picture_says_where_its_panels_and_legend_are():
  figure, axes = plots.canvas(8, 3, columns=2)
  for ax, colour in zip(axes[0], ((1, 0, 0), (0, 0, 1))):
    ax.set_facecolor(colour)
    ax.plot([0, 1], [0, 1], color=colour, label='x')
  figure.legend(loc='outside lower center')
  width, parts = images.tiles(images.png(figure))
  assert len(parts) == 3 and width > 900
  for (part, _), red in zip(parts, (True, False)):
    pixels = np.asarray(Image.open(io.BytesIO(part)).convert('RGB'), int)
    share = lambda channel: np.mean(pixels[..., channel] - pixels.sum(-1) / 3 > 50)
    # One panel each, with nothing of the other.
    assert share(0 if red else 2) > 0.4 and share(2 if red else 0) == 0
  one, _ = plots.canvas(4, 3)
  assert [share for _, share in images.tiles(images.png(one))[1]] == [1.0]


@pytest.mark.parametrize('rows', [
    [], [row(0)], [row(0), row(5), row(10, sink_1=0.0)],
    [row(0, sink_bias_slot=0.0), row(5, sink_bias_slot=60.0)],
    [row(0), dict(kind='train', step=1, loss=2.0), dict(kind='train', step=2, loss=float('nan')),
     dict(kind='valid', step=0, valid=3.0, code=2.5, docs=3.5), row(3, mean_importance=0.3)]])
def test_training_curves(rows, tmp_path):
  plots.training_curves(rows, tmp_path / 'curves.png')
  check(tmp_path / 'curves.png')


def test_every_validation_set_has_a_curve_unlike_the_others(monkeypatch):
  sets = {f'domain {i}': 2 + 0.1 * i for i in range(17)}
  figures = []
  monkeypatch.setattr(plots, 'save', lambda figure, path: figures.append(figure))
  plots.training_curves([dict(kind='valid', step=step, valid=2.0, **sets) for step in (0, 5)], '')
  lines = figures[0].axes[0].lines
  assert [line.get_label() for line in lines] == ['valid', *(f'valid: {name}' for name in sets)]
  assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(sets) + 1
