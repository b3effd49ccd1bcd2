"""Rates of many trials at a glance: a row for each, with a mark for each seed.

Beside means and ranges, which `drawing.rates` has, marks show seeds that fall into two groups, as
where a sink emerges in some seeds alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sink_jax.evaluate import plots

# {row: {kind: a rate in percent for each seed}}
Rows = Mapping[str, Mapping[str, Sequence[float]]]
_MARKERS = 'osD^v'


def seed_rows(rows_by_title: Mapping[str, Rows], levels: Mapping[str, Sequence[float]],
              height: float = 0.2) -> Figure:
  """A panel for each title with its rows from the top, and one legend of all kinds.

  Args:
    levels: {kind: where its dotted lines stand}, of every kind, in the order of the legend.
    height: of a row, in inches.
  """
  kinds, most = list(levels), max(map(len, rows_by_title.values()))
  # Narrow panels: on a phone each has the whole screen, where letters of wide ones are small.
  figure, axes = plots.canvas(4.6 * len(rows_by_title), 1.6 + height * most,
                              columns=len(rows_by_title))
  artists = {}
  for ax, (title, rows) in zip(axes[0], rows_by_title.items()):
    shown = [kind for kind in kinds if any(of.get(kind) for of in rows.values())]
    for place, kind in enumerate(shown):
      style = {'color': plots.COLOURS[kinds.index(kind)], 'marker': _MARKERS[kinds.index(kind)]}
      shift = 0.6 * ((place + 0.5) / len(shown) - 0.5)  # kinds of a row do not hide one another
      points = [(value, i + shift) for i, of in enumerate(rows.values())
                for value in of.get(kind, ())]
      artists[kind], = ax.plot(*zip(*points), linestyle='', markersize=5, alpha=0.75, **style)
      for level in levels[kind]:
        ax.axvline(level, color=style['color'], linewidth=1.2, linestyle=':')
    _rows(ax, list(rows))
    ax.set_xlim(-4, 104)
    plots.label(ax, title, '% of heads, a mark for each seed', '')
    ax.tick_params(axis='y', labelsize=9)
  known = [kind for kind in kinds if kind in artists]
  figure.legend([artists[kind] for kind in known], list(map(plots.mathematical, known)),
                loc='outside lower center', ncols=min(2, len(known)), frameon=False, fontsize=10)
  return figure


def _rows(ax: Axes, names: Sequence[str]) -> None:
  ax.set_yticks(range(len(names)), names)
  ax.set_ylim(len(names) - 0.4, -0.6)
  ax.grid(alpha=0.25)
