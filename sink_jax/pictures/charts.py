"""Lines, bars and intervals, drawn from rows, and the courses of training runs.

`panel`, `by` and `names` are names of columns: rows that agree in them share a panel, a line or a
place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from sink_jax.pictures.style import (
  COLOURS,
  GREY,
  WIDTH,
  Columns,
  Row,
  canvas,
  groups,
  label,
  legend,
  logarithmic,
  word,
)

_MARKERS = 'os^Dv<>'
_FEW = 20  # bars, which have room for their numbers


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
  name: str = '',
) -> Figure:
  """Draws columns `y` against `x`, a line for each of them and of the values of `by`.

  log: the axes with a logarithmic scale, such as 'xy'. error: the column of the bars of y. percent:
  whether the axis of y goes from 0 to 100. name: of that axis, where `y` are several. A number of
  the paper, 'paper_COLUMN', is a cross.
  """
  columns: Columns = (y,) if isinstance(y, str) else y
  styles = itertools.repeat(style) if isinstance(style, str) else style
  series = list(itertools.product(zip(columns, styles), groups(rows, by)))
  panels = groups(rows, panel)
  figure, axes = canvas(
    len(panels), 3, 4.6 if len(panels) > 1 else WIDTH, 3.6, below=0.2 + 0.1 * len(series)
  )
  for ax, (title, inside) in zip(axes, panels.items()):
    lines_here = groups(inside, by)
    for number, ((column, shape), words) in enumerate(series):
      points = [row for row in lines_here.get(words, ()) if row.get(column) is not None]
      points.sort(key=itemgetter(x))
      named = (word(column), words) if len(columns) > 1 else (words,)
      look = _look(number, ', '.join(filter(None, named)), shape)
      shift = 0.12 * (number - (len(series) - 1) / 2) if error else 0  # side by side
      _line(ax, points, x, column, look, error, shift)
    _set_scales(ax, log, sorted({row[x] for row in inside}))
    if percent:
      ax.set_ylim(-4, 104)
    ax.grid(alpha=0.25)
    label(ax, title, word(x), name or word(next(iter(columns))))
  legend(figure, 3 * min(3, len(panels)))
  return figure


def _look(number: int, name: str, style: str) -> dict[str, Any]:
  """Colour, marker and name of a line; where the colours begin again, markers move on by one."""
  size = len(COLOURS)
  return {
    'color': COLOURS[number % size],
    'label': name,
    'linewidth': 2,
    'linestyle': '-' if '-' in style else '',
    'markersize': 5,
    'marker': _MARKERS[(number + number // size) % size] if 'o' in style else '',
  }


def _line(
  ax: Axes,
  points: Sequence[Row],
  x: str,
  column: str,
  look: dict[str, Any],
  error: str,
  shift: float,
) -> None:
  """Draws a column of rows, with the bars of another and the paper's numbers; see `lines`."""
  if not points:
    return
  across = [row[x] + shift for row in points]
  up = [row[column] for row in points]
  if error:
    ax.errorbar(across, up, [row[error] for row in points], capsize=3, **look)
  else:
    ax.plot(across, up, **look)
  paper = [(row[x], row[f'paper_{column}']) for row in points if f'paper_{column}' in row]
  if paper:
    words = f'{look["label"]}: the paper' if look['label'] else 'the paper'
    cross = {'color': look['color'], 'markersize': 9, 'markeredgewidth': 2}
    ax.plot(*zip(*paper), 'x', label=words, **cross)


def _set_scales(ax: Axes, log: str, ticks: Sequence[float]) -> None:
  """Makes the axes in `log` logarithmic; ticks: of a logarithmic x, shown if they are few."""
  if 'x' not in log:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  else:
    ax.set_xscale('log')
    if len(ticks) < 9 and ticks[-1] < 10_000:
      ax.set_xticks(ticks, labels=map(str, ticks))
      ax.minorticks_off()
  if 'y' in log:
    logarithmic(ax)


def bars(rows: Sequence[Row], x: str, y: str, by: Columns, panel: Columns = ()) -> Figure:
  """Draws a group of bars (percent) for each value of `x`; a line across is the paper's number."""
  letters = sum(map(len, {row[x] for row in rows}))
  panels, series = groups(rows, panel), list(groups(rows, by))
  figure, axes = canvas(len(panels), 1, max(WIDTH, 1 + 0.3 * len(rows), 0.1 * letters), 3.6)
  for ax, (title, inside) in zip(axes, panels.items()):
    places = list(dict.fromkeys(row[x] for row in inside))
    width = 0.8 / len(series)
    for name, group in groups(inside, by).items():
      number = series.index(name)
      shift = width * (number - (len(series) - 1) / 2)
      centres = [places.index(row[x]) + shift for row in group]
      heights = [row[y] for row in group]
      colour = COLOURS[number % len(COLOURS)]
      drawn = ax.bar(centres, heights, 0.92 * width, color=colour, label=name)
      if len(places) * len(series) < _FEW:
        ax.bar_label(drawn, fmt='%.1f', fontsize=8)
      _mark_paper(ax, group, centres, width / 2)
    ax.set_ylim(0, 108)
    ax.grid(alpha=0.25, axis='y')
    ax.set_xticks(range(len(places)), labels=places, rotation=60 if len(places) > 4 else 0)
    label(ax, title, '', word(y))
  legend(figure, 4)
  return figure


def _mark_paper(ax: Axes, group: Sequence[Row], centres: Sequence[float], half: float) -> None:
  """Draws the paper's numbers across bars around `centres`."""
  for centre, row in zip(centres, group):
    if row.get('paper') is not None:
      ends = centre - half, centre + half
      ax.plot(ends, [row['paper']] * 2, color='black', linewidth=2, label='the paper')


def intervals(
  rows: Sequence[Row],
  names: Columns,
  panel: Columns = ('model',),
  *,
  name: str = '',
  log: float | None = None,
  across: int = 1,
) -> Figure:
  """Draws the `change` of each row from `low` to `high`, on the range of its controls in grey.

  A row may have a `colour` and a `marker` of its own.

  Args:
    names: the columns that name a row.
    name: of the axis. log: up to where it is linear; it is logarithmic beyond.
    across: panels in a line, which share the names of their rows.
  """
  panels = groups(rows, panel)
  height = 1.1 + 0.21 * max(map(len, panels.values()))
  figure, axes = canvas(len(panels), across, WIDTH / across, height)
  for number, (ax, (title, inside)) in enumerate(zip(axes, panels.items())):
    for y, row in enumerate(inside):
      _interval(ax, y, row)
    words = [', '.join(str(row[column]) for column in names) for row in inside]
    if number % across:
      words = [''] * len(inside)
    ax.set_yticks(range(len(inside)), labels=words)
    ax.set_ylim(len(inside) - 0.5, -0.5)
    if log is not None:
      ax.set_xscale('symlog', linthresh=log)
      ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.axvline(0, color='0.4', linewidth=0.8)
    ax.grid(alpha=0.25)
    label(ax, title, name, '')
  return figure


def _interval(ax: Axes, y: int, row: Row) -> None:
  """Draws a row of `intervals` at a height."""
  colour = row.get('colour', COLOURS[0])
  if 'control_low' in row:
    ax.plot((row['control_low'], row['control_high']), (y, y), color='0.75', linewidth=8)
  ax.plot((row['low'], row['high']), (y, y), color=colour, linewidth=1.6)
  ax.plot(row['change'], y, row.get('marker', 'o'), color=colour, markersize=5)


def courses(
  ax: Axes,
  x: Sequence[float],
  values_RxP: Float[np.ndarray, 'R P'],
  valid_R: Bool[np.ndarray, ' R'],
  name: str,
  colour: str,
  style: str = '-',
) -> None:
  """Draws a thin line for each of R runs, and a thick one for the mean of the valid ones.

  A run that is not valid is grey, dashed and ends in a cross. Before and after a run its values are
  NaN; the mean is of points that all valid runs have.
  """
  x_P = np.asarray(x)
  for values_P, valid in zip(values_RxP, valid_R):
    known = ~np.isnan(values_P)
    run = x_P[known], values_P[known]
    if valid:
      ax.plot(*run, color=colour, linewidth=0.9, alpha=0.55, linestyle=style, zorder=2)
    else:
      ax.plot(*run, color=GREY, linewidth=0.9, alpha=0.9, linestyle=(0, (2, 2)), zorder=4)
      end = [coordinates[-1:] for coordinates in run]
      ax.plot(*end, 'x', color=GREY, markersize=7, markeredgewidth=1.8, zorder=4)
  mean_P = values_RxP[valid_R].mean(0) if valid_R.any() else np.full(len(x_P), np.nan)
  known = ~np.isnan(mean_P)
  bad = np.count_nonzero(~valid_R)
  crossed = f', {bad} crossed out' if bad else ''
  ax.plot(
    x_P[known],
    mean_P[known],
    color=colour if valid_R.any() else GREY,
    linewidth=2.3,
    linestyle=style,
    marker='o' if known.sum() < 12 else '',
    markersize=4,
    label=f'{name} (n = {valid_R.sum()}{crossed})',
  )
