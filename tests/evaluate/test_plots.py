"""Pictures are images of a sensible size that show the given data."""

import functools
import struct
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose

import sink_jax as sj
from sink_jax.evaluate.head_maps import head_maps, strongest_and_weakest
from sink_jax.pictures import maps as pictures
from sink_jax.pictures.style import canvas, png
from tests.random_params import random_tokens, tiny

MODELS = {
  'sigmoid': dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()')),
  'bias slot': dict(attention=sj.AttentionSpec(kv_bias=sj.KBias()), norm_location='post'),
  'sink token': dict(sink_tokens=1, layers=1, heads=1),
}
TOKENS = random_tokens(3, 6)


def check(path):
  """Checks that a file is a PNG of a sensible size, in pixels and bytes."""
  data = path.read_bytes()
  assert data[:8] == b'\x89PNG\r\n\x1a\n'
  assert data[-8:-4] == b'IEND'
  assert 2_000 < len(data) < 400_000
  width, height = struct.unpack('>II', data[16:24])
  assert 400 <= width <= 2400
  assert 300 <= height <= 2600


@pytest.fixture(scope='module', params=MODELS)
def probed(request):
  model = tiny(**MODELS[request.param])
  return request.param, model, sj.probe(model, TOKENS)


def test_maps_are_what_the_probe_measured(probed, tmp_path):
  name, model, report = probed
  maps = head_maps(model, TOKENS)
  close = functools.partial(assert_allclose, rtol=1e-4, atol=1e-5)
  close(maps.importance, report.head_importance())
  first_NxH = report.raw_importance[..., 0].mean(0)
  close(maps.raw[..., 0].mean(-1), first_NxH)

  assert maps.proxy == (name == 'sigmoid')
  if name != 'sigmoid':  # rows sum to one without the extra key's share
    seen_NxHxT = maps.normalized.sum(-1)
    close(1 - seen_NxHxT.mean(-1), report.extra_key.mean(0))
  heads = strongest_and_weakest(maps.importance)
  assert maps.importance[heads[0]] == maps.importance.max()
  assert maps.importance[heads[-1]] == maps.importance.min()
  count = min(4, maps.importance.size)
  assert len(set(heads)) == len(heads) == count

  figure = report.plot(tmp_path / 'importance.png')
  check(tmp_path / 'importance.png')
  shown = figure.axes[0].images[0].get_array()
  assert_allclose(shown, report.head_importance().T)
  assert 'matplotlib.pyplot' not in sys.modules


@pytest.mark.typed
@pytest.mark.parametrize(
  'scale, shift',
  [
    (1, 0),
    (5, 0),
    (2, -1),
  ],
)
def test_weights_of_any_range(scale, shift, tmp_path):
  figure, [ax] = canvas(1, 1, 4, 4)
  random = np.random.default_rng(0).random((6, 6))
  weights = np.tril(scale * random + shift)
  pictures.attention_map(ax, weights, 'title', 'raw weights')
  (tmp_path / 'panel.png').write_bytes(png(figure))
  check(tmp_path / 'panel.png')
  largest = np.abs(weights).max()
  expected = (-largest, largest) if shift else (0, max(1, largest))

  image = ax.images[0]
  assert image.get_clim() == pytest.approx(expected)


def test_a_large_model_has_a_map_without_numbers():
  blocks, heads = 22, 32
  maps = np.broadcast_to(np.eye(2), (blocks, 1, heads, 2, 2))
  figure = sj.SinkReport.from_attentions(maps).plot(epsilon=0.2)
  width, height = figure.get_size_inches()
  assert height < width < 8
  assert not figure.axes[0].texts
