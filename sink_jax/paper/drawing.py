"""The figures as PNGs: panels of series, maps, masks, and the rates of the synthetic task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sink_jax.attention.mask import Prefix, Window
from sink_jax.evaluate import plots
from sink_jax.io.tables import short
from sink_jax.paper.pictures import Panel, Picture
from sink_jax.paper.synthetic import SyntheticAxis
from sink_jax.report.images import png

_MARKERS = 'osD^vPXh*<>'
_COLOURS = (*plots.COLOURS, '#8C6D31', '#7B3294', '#888888')
_ACROSS = 3
_WITH_MARKERS = 40  # points of a line; more markers would hide it
_LEGEND = 10


def panels(picture: Picture) -> bytes:
  """The PNG of a picture of runs."""
  shown = picture.panels
  across = min(picture.across or _ACROSS, len(shown))
  down = -(-len(shown) // across)
  width = {1: 7.2, 2: 10.5, 3: 12.5}[across]
  names = list(dict.fromkeys(line.name for panel in shown for line in panel.series))
  # Columns of the legend: three long names would be wider than the figure, and two or four names
  # fill rows of two.
  columns = 2 if len(names) in (2, 4) or max(map(len, names), default=0) > 30 else 3
  height = (3.4 if across > 1 else 3.8) * down + 0.24 * -(-len(names) // columns)
  figure, axes = plots.canvas(width, height, down, across)
  for ax in axes.flat[len(shown):]:
    ax.set_axis_off()
  lines = {}
  for ax, panel in zip(axes.flat, shown):
    if panel.map_TxT is not None:
      plots.attention_panel(figure, ax, panel.map_TxT, panel.title, 'attention')
    else:
      # A name that several panels share has one entry, of the first panel that has it.
      lines = _panel(ax, panel, names) | lines
  if lines:
    figure.legend([lines[name] for name in names], list(map(plots.mathematical, names)),
                  frameon=False, fontsize=_LEGEND, ncols=min(columns, len(names)),
                  loc='outside lower center')
  return png(figure)


def masks(of: str) -> bytes:
  """Which keys a query sees under two masks each, as a PNG. of: 'prefix' or 'window'."""
  length = 12
  pair = {'prefix': {'causal, p = 1': Prefix(1), 'prefix, p = 5': Prefix(5)},
          'window': {'causal': Window(length), 'window, w = 5': Window(5)}}[of]
  figure, axes = plots.canvas(7.2, 3.9, columns=2)
  query, key = np.mgrid[:length, :length]
  for ax, (title, mask) in zip(axes[0], pair.items()):
    ax.imshow(mask.keep(query, key), cmap='Blues', vmin=0, vmax=1.3,
              extent=(0.5, length + 0.5, length + 0.5, 0.5))
    # Lines between cells, where the minor ticks are; the major ones lie on the cells.
    ax.set_xticks(np.arange(0.5, length), minor=True)
    ax.set_yticks(np.arange(0.5, length), minor=True)
    ax.grid(which='minor', color='white', linewidth=1.5)
    ax.tick_params(which='minor', length=0)
    plots.label(ax, title, 'key', 'query')
  return png(figure)


def rates(axis: SyntheticAxis) -> bytes:
  """Sink_1 and Sink_* by variant, with the range over seeds, as a PNG."""
  rows = [row for row in axis.rows if 'Sink_1 %' in row.cells]
  names = [row.variant + ('*' if row.cells['Sink_1 %'].proxy else '') for row in rows]
  figure, axes = plots.canvas(8.0, 1.5 + 0.36 * len(names))
  ax = axes[0, 0]
  for shift, heading, name, colour, marker in (
      (-0.13, 'Sink_1 %', plots.SINK_1 + ', first token', plots.COLOURS[0], 'o'),
      (0.13, 'Sink_* %', plots.SINK_EXTRA_KEY + ', extra key', plots.COLOURS[1], 'D')):
    measured = [(i + shift, row.cells[heading]) for i, row in enumerate(rows)
                if heading in row.cells]
    if not measured:
      continue
    y, cells = zip(*measured)
    ax.hlines(y, [cell.least for cell in cells], [cell.largest for cell in cells], color=colour,
              linewidth=2)
    ax.plot([cell.mean for cell in cells], y, marker, color=colour, markersize=8, label=name)
  ax.set_yticks(range(len(names)), names)
  # From the top, in the order of the table.
  ax.set_ylim(len(names) - 0.4, -0.6)
  ax.set_xlim(-4, 104)
  ax.grid(alpha=0.25)
  plots.label(ax, '', '% of heads, mean and range over seeds', '')
  figure.legend(loc='outside lower center', ncols=2, frameon=False, fontsize=_LEGEND)
  return png(figure)


def _panel(ax: Axes, panel: Panel, names: Sequence[str]) -> dict[str, Line2D]:
  """Lines with the range over seeds, {name: line}; a name has one colour on both axes."""
  # Rates in percent go with losses in nats on one x axis.
  right = ax.twinx() if any(line.axis == 'right' for line in panel.series) else None
  lines = {}
  for line in panel.series:
    # Beyond the last colour the dashes tell names apart.
    i = names.index(line.name)
    again = i // len(_COLOURS)
    colour = _COLOURS[i % len(_COLOURS)]
    marker = _MARKERS[i % len(_MARKERS)] if len(line.x) <= _WITH_MARKERS else ''
    target = right if right is not None and line.axis == 'right' else ax
    x, y, low, high = (np.asarray(values, np.float64)  # None becomes nan, a gap
                       for values in (line.x, line.y, line.low, line.high))
    artist, = target.plot(x, y, color=colour, linewidth=2, marker=marker, markersize=5,
                          linestyle='--' if line.dashed else ('-', '-.', ':')[again % 3])
    lines.setdefault(line.name, artist)
    seeds = [seed for seed in panel.seeds if seed.name == line.name]
    for seed in seeds:
      target.plot(np.asarray(seed.x), np.asarray(seed.y), color=colour, linewidth=0.7, alpha=0.6)
    if line.low != line.high and not seeds:
      target.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
  for level in panel.levels:
    ax.axhline(level, color='#777777', linewidth=1, linestyle=':')
  _scales(ax, panel)
  if right is not None:
    right.set_ylim(-4, 104)
    plots.label(right, '', '', plots.mathematical(panel.right))
  ax.grid(alpha=0.25)
  plots.label(ax, plots.mathematical(panel.title), panel.x, plots.mathematical(panel.y))
  return lines


def _scales(ax: Axes, panel: Panel) -> None:
  plain = FuncFormatter(lambda value, _: f'{value:g}')
  if 'x' in panel.log:
    # 0 has no place on a logarithmic axis: `data.max_tokens` is 0 where all text is used.
    ticks = sorted({x for line in panel.series for x in line.x if x})
    ax.set_xscale('log')
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xticks(ticks, [short(x).replace(' ', '') if x >= 1e4 else f'{x:g}' for x in ticks],
                  minor=False)
    ax.minorticks_off()
  elif panel.x.startswith(('block', 'position')):
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  if 'y' in panel.log:
    ax.set_yscale('log')
    if panel.y == 'hidden norm ratio':
      ax.axhline(1, color='#777777', linewidth=1, linestyle=':')
      low, high = ax.get_ylim()
      ax.set_ylim(min(low, 0.5), max(high, 3))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(plain)
