"""Cosines and norm products against loops over pairs of recorded queries and keys."""

import math

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import angles
from tests.analyses.small import (
  check_png,
  check_rows,
  drawn,
  lines,
  options,
  random_inputs,
  small_run,
)


def pairs(run, tokens):
  """{name: (N, S, H, T, T)} by loops over queries and the keys up to them; zero elsewhere."""
  layers = run.record(tokens, sj.RecordOptions(queries_keys=True)).layers
  q = np.asarray(layers.queries_BxTxHxDh, np.float64)
  k = np.asarray(layers.keys_BxTxHkvxDh, np.float64)
  n, s, length, heads, width = q.shape
  found = {name: np.zeros((n, s, heads, length, length)) for name in angles.NAMES}
  for i in np.ndindex(n, s, heads):
    for t in range(length):
      for j in range(t + 1):
        a, b = q[i[0], i[1], t, i[2]], k[i[0], i[1], j, i[2] // (heads // k.shape[3])]
        sizes = math.sqrt(a @ a) * math.sqrt(b @ b)
        found['cosine'][i][t, j] = a @ b / sizes
        found['norm_product'][i][t, j] = sizes
        found['score'][i][t, j] = a @ b / math.sqrt(width)
  return found


@pytest.mark.parametrize('changes', [
    {}, dict(attention=sj.AttentionSpec(position='Alibi()', mask='Window(size=3)'), kv_heads=4),
    dict(attention=sj.AttentionSpec(qk_norm='QKNorm()'))], ids=['rotary', 'alibi', 'qk norm'])
def test_statistics_and_maps(changes):
  run, inputs = small_run(**changes), random_inputs(length=7)
  found = angles.measure(run, inputs, options(layers=(0, 1), heads=(3, 0)))
  own = pairs(run, inputs.tokens)
  for name, x in own.items():
    first = x[..., 1:, 0].mean((1, 3))
    others = np.mean([x[..., t, 1:t + 1].mean(-1) for t in range(1, 7)], 0).mean(1)
    np.testing.assert_allclose(found[f'{name}_first'], first, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[f'{name}_others'], others, rtol=1e-4, atol=1e-5)
    assert np.abs(first - others).max() > 1e-2
  assert [(m['layer'], m['head']) for m in found['maps']] == [(0, 3), (0, 0), (1, 3), (1, 0)]
  for m in found['maps']:
    for name, x in own.items():
      np.testing.assert_allclose(m[name], x[m['layer'], :, m['head']].mean(0), atol=7e-5)  # 4 digits


def test_the_default_heads_are_those_of_the_largest_and_the_smallest_importance():
  run, inputs = small_run(), random_inputs()
  found = angles.measure(run, inputs, options())
  record = sj.RecordOptions(maps=True)
  maps = np.asarray(run.record(inputs.tokens, record).layers.maps_BxHxTxT, float)
  alpha = maps[..., 0].mean((1, 3))
  np.testing.assert_allclose(found['importance'], alpha, rtol=1e-5)
  assert [m['importance'] for m in found['maps']] == pytest.approx(
      [*np.sort(alpha, None)[:-3:-1], *np.sort(alpha, None)[1::-1]], rel=1e-5)
  for m in found['maps']:
    assert m['importance'] == pytest.approx(alpha[m['layer'], m['head']], rel=1e-5)


def test_maps_are_of_the_first_tokens(monkeypatch):
  run, inputs = small_run(), random_inputs(length=9)
  monkeypatch.setattr(angles, '_LENGTH', 5)
  monkeypatch.setattr(angles, '_NUMBERS_AT_A_TIME', 1)  # a sequence at a time
  found = angles.pair_maps(run, inputs.tokens, [(1, 2)])
  short = pairs(run, inputs.tokens[:, :5])
  for name, x in short.items():
    np.testing.assert_allclose(found[name][0], x[1, :, 2].mean(0), atol=1e-5)


def test_which_heads_are_chosen():
  alpha = [[0.1, 0.4, 0.2], [0.5, 0.3, 0.1]]
  assert angles.choose_heads(alpha) == [(1, 0), (0, 1), (0, 0), (1, 2)]
  assert angles.choose_heads([[0.3]]) == [(0, 0)]
  assert angles.choose_heads(alpha, layers=[0, 1]) == [(0, 1), (1, 0)]
  assert angles.choose_heads(alpha, heads=[2, 1]) == [(0, 2), (0, 1)]
  assert angles.choose_heads(alpha, [1], [0, 2]) == [(1, 0), (1, 2)]


@pytest.mark.parametrize('asked, words', [
    (dict(layers=(2,)), '--layers=3: .* in 1,2'), (dict(heads=(4,)), '--heads=5: .* 1 to 4'),
    (dict(layers=(0, 1, 0), heads=(0, 1, 2)), '9 heads would have maps')])
def test_what_cannot_be_asked(asked, words):
  with pytest.raises(ValueError, match=words):
    angles.measure(small_run(), random_inputs(), options(**asked))


def test_picture(tmp_path):
  run = small_run(layers=4)
  result = angles.measure(run, random_inputs(), options(layers=(1,)))
  table = check_rows(angles, [result])
  assert table[1][:2] == ['small', '2'] and len(table) == 2
  angles.draw([result, result], tmp_path / 'angles.png')
  check_png(tmp_path / 'angles.png')


def test_what_is_drawn_where(monkeypatch):
  found = angles.measure(small_run(), random_inputs(), options(layers=(1,)))
  axes = drawn(angles, [found], monkeypatch).axes
  for ax, panel, name in zip(axes, axes[3:], angles.NAMES):
    own = lines(ax)
    for words, key in (('first key', 'first'), ('mean of the other keys', 'others')):
      mean = np.mean(found[f'{name}_{key}'], 1)
      np.testing.assert_allclose(own[words], np.transpose([[1, 2], mean]))
    shown = np.tril(np.ma.filled(panel.get_images()[0].get_array(), 0))
    np.testing.assert_allclose(shown, np.tril(found['maps'][0][name]))
