"""Four pictures, drawn from the rows of an analysis: lines, bars, intervals and heat maps.

`panel`, `by` and the like are names of columns: rows that agree in them share a panel or a line.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from sink_jax.evaluate import plots

Row = dict[str, Any]
Columns = tuple[str, ...]
_WORDS = {
  'sink_1': f'{plots.SINK_1} (% of heads)',
  'sink_t': r'$\mathrm{Sink}_t^{\epsilon}$',
  'epsilon': 'ε',
  'length': 'T (tokens)',
  'percent': '%',
  'norm_product': r'$\|q\|\|k\|$',
  'score': r'$q k^\top / \sqrt{d_h}$',
  'map': 'attention',
  'raw_map': 'raw weights',
  'position': 'position t',
  'first': 'first token',
  'others': 'mean of the others',
  'tokens': 'tokens read',
  'size': 'cache (tokens)',
  'attention': 'attention on the first token',
}


def lines(
  rows: Sequence[Row],
  x: str,
  y: str | Columns,
  by: Columns = (),
  panel: Columns = ('model',),
  *,
  log: str = '',
  error: str = '',
  style: str | Columns = 'o-',
  percent: bool = False,
  label: str = '',
) -> Figure:
  """Draws columns `y` against `x`, a line for each of them and of the values of `by`.

  log: the axes with a logarithmic scale, such as 'xy'. error: the column of the bars of y. percent:
  whether the axis of y goes from 0 to 100. label: of that axis, where `y` are several. A number of
  the paper, 'paper_COLUMN', is a cross.
  """
  figure, panels = _panels(rows, panel, 4.4, 3.8)
  names: list[str] = [y] if isinstance(y, str) else [*y]
  styles = dict(zip(names, itertools.repeat(style) if isinstance(style, str) else style))
  for ax, (title, inside) in panels:
    groups = _groups(inside, by)
    for i, (column, (words, group)) in enumerate(itertools.product(names, groups.items())):
      points = sorted((row for row in group if row.get(column) is not None), key=lambda row: row[x])
      if not points:
        continue
      across, up = ([row[key] for row in points] for key in (x, column))
      words = ', '.join(filter(None, [_word(column) if len(names) > 1 else '', words]))
      shape = styles[column]
      look = _look(i, words or _word(column), 'o' in shape)
      if error:
        shift = 0.12 * (i - (len(groups) - 1) / 2)  # side by side
        bounds = [row[error] for row in points]
        ax.errorbar(np.add(across, shift), up, bounds, capsize=3, linestyle='', **look)
      else:
        ax.plot(across, up, linestyle='-' if '-' in shape else '', **look)
      if paper := [(row[x], row[f'paper_{column}']) for row in points if f'paper_{column}' in row]:
        cross: dict[str, Any] = dict(color=look['color'], markersize=9, markeredgewidth=2)
        ax.plot(*zip(*paper), 'x', label=f'{words or "Sink_1"}: the paper', **cross)
    _set_scales(ax, log, sorted({row[x] for row in inside}) if 'x' in log else ())
    if percent:
      ax.set_ylim(-4, 104)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, **_place_of_legend(len(ax.get_lines())))
    plots.label(ax, title, _word(x), label or _word(names[0]))
  return figure


def _look(number: int, words: str, marked: bool) -> dict[str, Any]:
  """Colour, marker and label of a line; where the colours begin again, markers move on by one."""
  return dict(
    color=plots.COLOURS[number % 7],
    label=words,
    linewidth=2,
    markersize=5,
    marker='os^Dv<>'[(number + number // 7) % 7] if marked else '',
  )


def _set_scales(ax: Axes, log: str, ticks: Sequence[float]) -> None:
  """Makes the axes in `log` logarithmic; ticks: of a logarithmic x, shown if they are few."""
  ax.set(xscale='log' if 'x' in log else 'linear', yscale='log' if 'y' in log else 'linear')
  if 'x' not in log:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  elif len(ticks) < 9 and ticks[-1] < 10_000:
    ax.set_xticks(ticks, labels=map(str, ticks))
    ax.minorticks_off()
  if 'y' in log:
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(ScalarFormatter())


def _place_of_legend(drawn: int) -> dict[str, Any]:
  """Where the legend of so many lines covers none of them."""
  if drawn > 8:
    return dict(loc='upper left', bbox_to_anchor=(1, 1))
  return dict(loc='upper center', bbox_to_anchor=(0.5, -0.22), ncols=2) if drawn > 3 else {}


def bars(rows: Sequence[Row], x: str, y: str, by: Columns, panel: Columns = ()) -> Figure:
  """Draws a group of bars (percent) for each value of `x`; a line across is the paper's number."""
  width = max(4.0, 2 + 0.3 * len(rows), 0.1 * sum(map(len, {row[x] for row in rows})))
  figure, panels = _panels(rows, panel, width, 3.6, columns=1)
  series = list(_groups(rows, by))
  for ax, (title, inside) in panels:
    places = list(dict.fromkeys(row[x] for row in inside))
    width = 0.8 / len(series)
    for label, group in _groups(inside, by).items():
      i = series.index(label)
      centres = [places.index(row[x]) + width * (i - (len(series) - 1) / 2) for row in group]
      drawn = ax.bar(
        centres, [row[y] for row in group], 0.92 * width, color=plots.COLOURS[i % 7], label=label
      )
      if len(places) * len(series) < 20:
        ax.bar_label(drawn, fmt='%.1f', fontsize=8)
      for centre, row in zip(centres, group):
        if row.get('paper') is not None:
          ax.plot(
            [centre - width / 2, centre + width / 2], [row['paper']] * 2, color='black', linewidth=2
          )
    if any(row.get('paper') is not None for row in inside):
      ax.plot([], [], color='black', linewidth=2, label='the paper')
    ax.set_ylim(0, 108)
    ax.grid(alpha=0.25, axis='y')
    ax.set_xticks(range(len(places)), labels=places, rotation=60 if len(places) > 4 else 0)
    ax.legend(fontsize=8, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
    plots.label(ax, title, '', _word(y))
  return figure


def intervals(
  rows: Sequence[Row],
  names: Columns,
  panel: Columns = ('model',),
  *,
  label: str,
  log: float | None = None,
) -> Figure:
  """Draws the `change` of each row from `low` to `high`, on the range of its controls in grey.

  names: the columns that name a row. log: up to where the axis is linear; it is logarithmic beyond.
  """
  groups = _groups(rows, panel)
  figure, axes = _canvas(len(groups), 1, 6, 0.9 + 0.2 * max(map(len, groups.values())))
  for ax, (title, inside) in zip(axes, groups.items()):
    for y, row in enumerate(inside):
      if 'control_low' in row:
        ax.plot([row['control_low'], row['control_high']], [y, y], color='0.75', linewidth=8)
      ax.plot([row['low'], row['high']], [y, y], color=plots.COLOURS[0], linewidth=2)
      ax.plot(row['change'], y, 'o', color=plots.COLOURS[0], markersize=5)
    ax.set_yticks(
      range(len(inside)), labels=[', '.join(str(row[name]) for name in names) for row in inside]
    )
    ax.set_ylim(len(inside) - 0.5, -0.5)
    if log is not None:
      ax.set_xscale('symlog', linthresh=log)
      ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.axvline(0, color='0.5', linewidth=1)
    ax.grid(alpha=0.25, axis='x')
    plots.label(ax, title, label, '')
  return figure


def heat_maps(rows: Sequence[Row], columns: Columns, title: str = '') -> Figure:
  """Draws the maps (T, T) of columns, queries down and keys across; a row fills in the `title`."""
  shown = [(row, column) for row in rows for column in columns if row.get(column) is not None]
  drawn = sum(row.get(columns[0]) is not None for row in rows)
  across = len(columns) if len(shown) == len(columns) * drawn > drawn else 4
  figure, axes = _canvas(len(shown), across, 3.9, 4.2)
  for ax, (row, column) in zip(axes, shown):
    plots.attention_panel(
      ax,
      row[column],
      f'{row["model"]}: block {row["block"]}, head {row["head"]}\n'
      f'importance {row["importance"]:.2f}, {title.format(**row)}',
      _word(column),
      signed=column in ('cosine', 'score'),
    )
  return figure


def grids(rows: Sequence[Row], value: str) -> Figure:
  """Draws a value in [0, 1] of every head, blocks down and heads across, a panel for each model."""
  figure, panels = _panels(rows, ('model',), 4.0, 3.6)
  for ax, (title, inside) in panels:
    blocks, heads = (sorted({row[name] for row in inside}) for name in ('block', 'head'))
    grid = np.full((len(blocks), len(heads)), np.nan)
    for row in inside:
      grid[blocks.index(row['block']), heads.index(row['head'])] = row[value]
    # The same colours for all models.
    image = ax.imshow(grid, vmin=0, vmax=1, cmap='viridis', aspect='auto', interpolation='nearest')
    for axis, names in ((ax.xaxis, heads), (ax.yaxis, blocks)):
      every = -(-len(names) // 8)
      axis.set_ticks(range(0, len(names), every), labels=list(map(str, names[::every])))
    bar = figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03)
    bar.ax.axhline(inside[0]['epsilon'], color='white', linewidth=2)
    rates = [row['sink_1'] for row in inside if 'sink_1' in row]
    plots.label(
      ax, f'{title}: {plots.SINK_1} = {np.mean(rates):.1f} %' if rates else title, 'head', 'block'
    )
  return figure


def _word(column: str) -> str:
  return _WORDS.get(column, column.replace('_', ' '))


def _groups(rows: Sequence[Row], columns: Columns) -> dict[str, list[Row]]:
  """Rows by the words for their values of columns, in the order in which they come."""
  groups: dict[str, list[Row]] = {}
  for row in rows:
    words = (
      f'{_word(name)} = {row[name]}'
      if isinstance(row[name], (int, float))
      else row[name] or 'unchanged'
      for name in columns
    )
    groups.setdefault(', '.join(words), []).append(row)
  return groups


def _panels(
  rows: Sequence[Row], by: Columns, width: float, height: float, columns: int = 3
) -> tuple[Figure, Sequence[tuple[Axes, tuple[str, list[Row]]]]]:
  """A figure with a panel for every group of rows, and (axes, (title, rows)) of each."""
  groups = _groups(rows, by)
  figure, axes = _canvas(len(groups), columns, width, height)
  return figure, list(zip(axes, groups.items()))


def _canvas(panels: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
  columns = min(columns, panels)
  lines = -(-panels // columns)
  figure, axes = plots.canvas(1 + width * columns, height * lines, lines, columns, panels)
  return figure, list(axes.flat)
