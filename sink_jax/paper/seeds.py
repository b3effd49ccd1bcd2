"""Seeds at a glance: panels of courses, and of rows with a mark for each seed.

Beside means and ranges, seeds themselves show where they fall into two groups, as where a sink
emerges in some of them alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from matplotlib.figure import Figure

from sink_jax.evaluate import plots
from sink_jax.paper.curves import series
from sink_jax.paper.pictures import Panel, Series
from sink_jax.report.records import RunRecord

# (step, value) of a run; None where it was not measured or not finite.
Points = Callable[[RunRecord], Sequence[tuple[float, float | None]]]
_MARKERS = 'osD^v'


@dataclasses.dataclass(frozen=True)
class SeedRows:
  """A panel of rows, from the top.

  rows: {row: {kind: a rate in percent for each seed}}. levels: {kind: where its dotted line is}.
  """

  title: str
  rows: Mapping[str, Mapping[str, Sequence[float]]]
  levels: Mapping[str, float]


def seed_panel(title: str, y: str, runs: Mapping[str, Sequence[RunRecord]], points: Points,
               means: Points | None = None, levels: Sequence[float] = ()) -> Panel:
  """Courses against the step: the mean of each line's runs, and each run as a thin line.

  Args:
    runs: by the name of their line.
    means: the points of which means are taken, where those of runs are too many to see them.
    levels: where dotted lines stand.
  """
  def lines(groups: Iterable[tuple[str, Sequence[RunRecord]]], of: Points) -> list[Series]:
    return [line for name, members in groups if (line := series(name, members, of))]
  # A mean would end where the shortest run does: those without a point have no part in it.
  begun = [(name, [run for run in members if points(run)]) for name, members in runs.items()]
  return Panel(title, 'step', y, lines(begun, means or points), levels=levels, seeds=lines(
      ((name, [run]) for name, members in begun for run in members), points))


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
  names = [kind for kind in kinds if kind in artists]
  figure.legend([artists[kind] for kind in names], list(map(plots.mathematical, names)),
                loc='outside lower center', ncols=max(1, min(2, len(names))), frameon=False,
                fontsize=10)
  return figure
