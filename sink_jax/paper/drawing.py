"""The pictures of the paper's reports drawn: series, maps, masks, claims, and rows of seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill, shorten

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from sink_jax.attention.mask import Prefix, Window
from sink_jax.evaluate import plots
from sink_jax.io.terminal import short
from sink_jax.paper.claims import FAILS, HOLDS, Claim
from sink_jax.paper.metrics import METRICS
from sink_jax.paper.parts import Part
from sink_jax.paper.pictures import Panel, Picture
from sink_jax.report.images import png

_MARKERS = 'osD^vPXh*<>'
_COLOURS = (*plots.COLOURS, '#8C6D31', '#7B3294', '#888888')
_ACROSS = 3
_WITH_MARKERS = 40  # points of a line; more markers would hide it
_LEGEND = 10
_VERDICTS = {HOLDS: plots.COLOURS[2], FAILS: plots.COLOURS[1]}
_MARGIN = 0.08  # of the range of the numbers, on either side of them
_STRIP = 0.66  # inches of a claim


@dataclasses.dataclass(frozen=True)
class SeedRows:
  """A panel of rows, from the top.

  rows: {row: {kind: a rate in percent for each seed}}. levels: {kind: where its dotted line is}.
  """

  title: str
  rows: Mapping[str, Mapping[str, Sequence[float]]]
  levels: Mapping[str, float]


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
  figure, axes = plots.canvas(width, height, down, across, len(shown))
  lines = {}
  for ax, panel in zip(axes.flat, shown):
    if panel.map_TxT is not None:
      plots.attention_panel(ax, panel.map_TxT, panel.title, 'attention')
    else:
      # A name that several panels share has one entry, of the first panel that has it.
      lines = _panel(ax, panel, names) | lines
  if lines:
    _legend(figure, {name: lines[name] for name in names}, columns)
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


def place_of(part: Part) -> Callable[[float], float]:
  """Where values of a part stand, from 0 at the left end of its axis to 1 at the right.

  What lies off the axis stands at its end.
  """
  metric = METRICS[part.metric]
  if metric.unit == 'percent' and len(part.trials) == 1:
    least, largest = 0.0, 100.0
  else:
    ends = [end for end in (part.low, part.high, part.paper) if end is not None]
    shown = [metric.scaled(value) for value in (*part.values, part.level, *ends)]
    margin = _MARGIN * (max(shown) - min(shown)) or 1.0
    least, largest = min(shown) - margin, max(shown) + margin
  return lambda value: min(max((metric.scaled(value) - least) / (largest - least), 0.0), 1.0)


def deciding(parts: Iterable[Part]) -> Part | None:
  """The part that was decided against the claim; else an open one; else that with least room.

  None where all are truths, which words say better.
  """
  def room(part: Part) -> float:
    """How far the mean lies beyond its level, in widths of the interval where there is one."""
    scaled = METRICS[part.metric].scaled
    gap = abs(scaled(part.mean) - scaled(part.level))
    if part.low is None or part.high is None:
      return gap
    return gap / ((scaled(part.high) - scaled(part.low)) or 1.0)

  drawn = [part for part in parts if METRICS[part.metric].unit != 'truth']
  return min(drawn, key=lambda part: ((False, None, True).index(part.held), room(part)),
             default=None)


def claim_rows(claims: Iterable[Claim]) -> dict[str, list[tuple[str, str, Part]]]:
  """{group of runs: (claim, verdict, the part that decides it)} of what can be drawn."""
  found: dict[str, list[tuple[str, str, Part]]] = {}
  for claim in claims:
    for verdict in claim.verdicts:
      if part := deciding(verdict.parts):
        found.setdefault(verdict.name, []).append((claim.statement, verdict.verdict, part))
  return found


def claims(groups: Mapping[str, Sequence[tuple[str, str, Part]]]) -> bytes:
  """The seeds of `claim_rows` beside the level asked for, as a PNG.

  Each group has two columns, which a narrow page sets below one another, so that their words can
  be read on a phone.
  """
  lengths = [-(-len(of) // 2) for of in groups.values()]  # of their columns, in claims
  heights = [_STRIP * length + 0.4 for length in lengths]
  figure, axes = plots.canvas(8.8, sum(heights), len(groups), columns=2)
  axes[0, 0].get_gridspec().set_height_ratios(heights)
  for pair, length, (name, of) in zip(axes, lengths, groups.items()):
    for ax, title, column in zip(pair, (name, ''), (of[:length], of[length:])):
      if not column:  # one claim has no second column
        ax.set_axis_off()
        continue
      # Whole marks at both ends.
      ax.set(xticks=[], yticks=[], xlim=(-0.015, 1.015), ylim=(length, 0))
      ax.spines[:].set_visible(False)
      ax.set_title(title, loc='left', fontsize=11, fontweight='bold')
      for i, row in enumerate(column):
        _strip(ax, i, *row)
  return png(figure)


def _strip(ax: Axes, i: int, statement: str, verdict: str, part: Part) -> None:
  """A claim in up to two lines of words, and its seeds below. i: its place from the top."""
  place, y, colour = place_of(part), i + 0.8, _VERDICTS.get(verdict, '#777777')
  words = fill(shorten(statement, 80, placeholder=' ...'), 42)
  ax.text(0, i + 0.58, plots.mathematical(words), fontsize=9.5, linespacing=1.1)
  ax.text(1, i + 0.58, verdict, fontsize=9.5, ha='right', color=colour, fontweight='bold')
  ax.hlines(y, 0, 1, color='#cccccc', linewidth=0.8)
  if part.low is not None and part.high is not None:
    ax.hlines(y, place(part.low), place(part.high), color=colour, linewidth=6, alpha=0.35)
  ax.plot([place(part.level)] * 2, [y - 0.15, y + 0.15], color='black', linewidth=1.5)
  if part.paper is not None:
    ax.plot(place(part.paper), y, 'D', markersize=7, color=plots.COLOURS[0],
            markerfacecolor='none')
  seeds = list(map(place, part.values))
  ax.plot(seeds, [y] * len(seeds), 'o', markersize=4.5, color=colour)


def seed_rows(panels: Sequence[SeedRows], height: float = 0.2) -> Figure:
  """Panels beside one another, with one legend of all kinds. height: of a row, in inches."""
  # Narrow panels: on a phone each has the whole screen, where letters of wide ones are small.
  figure, axes = plots.canvas(4.2 * len(panels), 1.6 + height * max(len(of.rows) for of in panels),
                              columns=len(panels))
  kinds = list(dict.fromkeys(kind for panel in panels for of in panel.rows.values() for kind in of))
  artists = {}
  for ax, panel in zip(axes[0], panels):
    shown = [kind for kind in kinds if any(of.get(kind) for of in panel.rows.values())]
    for place, kind in enumerate(shown):
      # Marks of a row's kinds lie below one another, so that none hides another.
      shift = 0.6 * ((place + 0.5) / len(shown) - 0.5)
      points = [(value, i + shift) for i, of in enumerate(panel.rows.values())
                for value in of.get(kind, ())]
      colour, marker = plots.COLOURS[kinds.index(kind)], _MARKERS[kinds.index(kind)]
      artists[kind], = ax.plot(*zip(*points), linestyle='', markersize=5, alpha=0.75,
                               color=colour, marker=marker)
      if kind in panel.levels:
        ax.axvline(panel.levels[kind], color=colour, linewidth=1.2, linestyle=':')
    ax.set_yticks(range(len(panel.rows)), map(plots.mathematical, panel.rows))
    ax.set_ylim(len(panel.rows) - 0.4, -0.6)
    ax.set_xlim(-4, 104)
    ax.grid(alpha=0.25)
    plots.label(ax, panel.title, '% of heads, a mark for each seed', '')
    ax.tick_params(axis='y', labelsize=9)
  _legend(figure, {kind: artists[kind] for kind in kinds if kind in artists}, 2)
  return figure


def _legend(figure: Figure, lines: Mapping[str, Line2D], columns: int) -> None:
  figure.legend(lines.values(), map(plots.mathematical, lines), loc='outside lower center',
                ncols=max(1, min(columns, len(lines))), frameon=False, fontsize=_LEGEND)


def _panel(ax: Axes, panel: Panel, names: Sequence[str]) -> dict[str, Line2D]:
  """Lines with the range over seeds, {name: line}; a name has one colour on both axes."""
  # Rates in percent go with losses in nats on one x axis.
  right = ax.twinx() if any(line.axis == 'right' for line in panel.series) else None
  lines = {}
  for line in panel.series:
    # Beyond the last colour the dashes tell names apart.
    i = names.index(line.name)
    dashes = '--' if line.dashed else ('-', '-.', ':')[i // len(_COLOURS) % 3]
    marker = _MARKERS[i % len(_MARKERS)] if len(line.x) <= _WITH_MARKERS else ''
    colour, target = _COLOURS[i % len(_COLOURS)], right if right and line.axis == 'right' else ax
    x, y, low, high = (np.asarray(values, np.float64)  # None becomes nan, a gap
                       for values in (line.x, line.y, line.low, line.high))
    artist, = target.plot(x, y, color=colour, linewidth=2, marker=marker, markersize=5,
                          linestyle=dashes)
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
  if 'x' in panel.log:
    # 0 has no place on a logarithmic axis: `data.max_tokens` is 0 where all text is used.
    ticks = sorted({x for line in panel.series for x in line.x if x})
    ax.set_xscale('log')
    ax.set_xticks(ticks, [short(x).replace(' ', '') if x >= 1e4 else f'{x:g}' for x in ticks])
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
    ax.yaxis.set_minor_formatter('')
    ax.yaxis.set_major_formatter('{x:g}')
