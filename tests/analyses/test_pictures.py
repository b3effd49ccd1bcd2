"""The drawing of rows as lines, bars, maps and grids."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from sink_jax.analyses.runner import find
from sink_jax.pictures import charts, maps


def drawn(ax):
  """{label: points (n, 2)} of the plotted lines."""
  return {line.get_label(): line.get_xydata() for line in ax.get_lines()}


def test_lines_by_series_and_panel():
  rows = [
    {
      'model': m,
      'length': t,
      'epsilon': e,
      'sink_1': 10 * t + e,
      'sink_t': t,
      'paper_sink_1': 7.0,
    }
    for m in 'ab'
    for t in (4, 2)
    for e in (0.2, 0.3)
  ]
  figure = charts.lines(
    rows,
    'length',
    'sink_1',
    ('epsilon',),
    log='x',
    percent=True,
  )

  assert [ax.get_title() for ax in figure.axes] == ['a', 'b']

  for ax in figure.axes:
    for e in (0.2, 0.3):
      assert_allclose(drawn(ax)[f'ε = {e}'], [(2, 20 + e), (4, 40 + e)])
      assert_allclose(drawn(ax)[f'ε = {e}: the paper'], [(2, 7), (4, 7)])
    assert ax.get_xscale() == 'log'
    assert [t.get_text() for t in ax.get_xticklabels()] == ['2', '4']

  [ax] = charts.lines(rows[:4], 'length', ('sink_1', 'sink_t'), ('epsilon',), panel=()).axes
  assert sum('the paper' not in name for name in drawn(ax)) == 4


def test_every_line_has_a_look_of_its_own():
  families = [
    {
      'family': f'family {i}',
      'parameters': n,
      'sink_1': i,
    }
    for i in range(9)
    for n in (1e7, 1e6)
  ]
  [ax] = charts.lines(
    families,
    'parameters',
    'sink_1',
    ('family',),
    panel=(),
    log='x',
  ).axes

  assert len({(line.get_color(), line.get_marker()) for line in ax.get_lines()}) == 9


def test_bars_of_errors_stand_side_by_side():
  rows = [
    {
      'model': m,
      'layer': n,
      'attention': 0.5,
      'deviation': 0.1 * n,
    }
    for m in 'ab'
    for n in range(3)
  ]
  [ax] = charts.lines(
    rows, 'layer', 'attention', ('model',), panel=(), error='deviation', style='o'
  ).axes

  for bars, shift in zip(ax.containers, (-0.06, 0.06)):
    assert_allclose(bars.lines[0].get_xydata(), [(n + shift, 0.5) for n in range(3)])
    ends = np.array(bars.lines[2][0].get_segments())[..., 1]
    assert_allclose(ends[:, 1] - ends[:, 0], [0, 0.2, 0.4])


def test_bars_and_the_papers_number():
  rows = [
    {
      'model': m,
      'kind': kind,
      'sink_1': rate,
      **paper,
    }
    for m, kind, rate, paper in (
      ('a', 'natural', 10.0, {'paper': 12.0}),
      ('a', 'random', 20.0, {}),
      ('b', 'random', 30.0, {}),
    )
  ]
  [ax] = charts.bars(rows, 'model', 'sink_1', ('kind',)).axes
  found = sorted(
    (round(bar.get_x() + bar.get_width() / 2, 2), bar.get_height()) for bar in ax.patches
  )

  assert found == [
    (-0.2, 10),
    (0.2, 20),
    (1.2, 30),
  ]
  assert [tick.get_text() for tick in ax.get_xticklabels()] == ['a', 'b']
  assert set(ax.get_lines()[0].get_ydata()) == {12.0}

  rows = [row | {'epsilon': e} for row in rows for e in (0.2, 0.4)]
  figure = charts.bars(rows, 'model', 'sink_1', ('kind',), ('epsilon',))

  assert [ax.get_title() for ax in figure.axes] == ['ε = 0.2', 'ε = 0.4']


def test_maps_and_grids():
  rows = [
    {
      'model': 'a',
      'block': b,
      'head': h,
      'importance': b / 10 + h / 100,
      'sink_1': 50.0,
      'epsilon': 0.3,
    }
    for b in (2, 4)
    for h in (1, 2, 3)
  ]
  ax = maps.grid(rows, 'importance').axes[0]
  [image] = ax.get_images()

  assert_allclose(
    image.get_array(),
    [
      [0.21, 0.41],
      [0.22, 0.42],
      [0.23, 0.43],
    ],
  )
  assert image.get_clim() == (0, 1)
  assert ax.get_xlabel() == 'block'
  assert ax.get_ylabel() == 'head'
  assert [tick.get_text() for tick in ax.get_xticklabels()] == [
    '2',
    '4',
  ]
  assert '50.0 %' in ax.get_title()

  rows[1] |= {'map': np.tril(np.full((3, 3), 0.4)).tolist(), 'averaged': 'one sequence'}
  panels = [
    ax
    for ax in maps.attention_maps(
      rows, ('map', 'raw_map'), 'block {block}, head {head}, {averaged}'
    ).axes
    if ax.get_images()
  ]
  [ax] = panels  # only one row has a map

  assert 'block 2, head 2' in ax.get_title()
  assert 'one sequence' in ax.get_title()
  assert_allclose(np.ma.filled(ax.get_images()[0].get_array(), 0), np.tril(np.full((3, 3), 0.4)))


@pytest.mark.parametrize(
  'name, columns, rows, sentence',
  [
    (
      'lengths',
      'epsilon length sink_1',
      [(0.2, 16, 9.0), (0.3, 16, 50.0), (0.3, 64, 25.0), (0.4, 64, 8.0)],
      'Sink_1 (ε = 0.3) is 50.0 % at 16 tokens and 25.0 % at 64',
    ),
    (
      'domains',
      'epsilon domain sink_1',
      [(0.3, 'code', 50.0), (0.3, 'docs', 25.0), (0.4, 'code', 8.0)],
      'Sink_1 (ε = 0.3) goes from 25.0 % in docs to 50.0 % in code',
    ),
    (
      'norms',
      'kind block ratio',
      [('hidden states', 1, 2.0), ('hidden states', 2, 30.0), ('keys', 1, 99.0)],
      'after block 2 the hidden state of the first token is 30 times as long as those of the '
      'others',
    ),
    (
      'angles',
      'importance cosine_first cosine_others',
      [(0.4, 0.5, -0.1), (0.9, 0.7, 0.1), (0.1, 0.0, 0.0)],
      'in the 2 of 3 heads with a sink, the mean cosine of the queries is 0.60 with the first key '
      'and 0.00 with the others',
    ),
    (
      'streaming',
      'part cache positions perplexity',
      [
        ('all', 'last 8', 'cache', 9.0),
        ('all', 'last 8, text positions', 'text', 7.0),
        ('curve', 'last 8', 'cache', 1.0),
        ('all', 'all tokens', 'text', 3.0),
      ],
      'perplexity 9 with last 8, 3 with all tokens',
    ),
    (
      'last_query',
      'layer attention',
      [(0, 0.1), (3, 0.6)],
      'the last token gives the first 60% of its attention in layer 3',
    ),
  ],
)
def test_what_a_title_says(name, columns, rows, sentence):
  assert find(name).finding([dict(zip(columns.split(), row)) for row in rows]) == sentence
