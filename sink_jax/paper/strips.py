"""The picture of the claims: the part that decides each, as seeds beside the level asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from textwrap import shorten

from sink_jax.evaluate import plots
from sink_jax.paper.claims import FAILS, HOLDS, Claim
from sink_jax.paper.metrics import METRICS
from sink_jax.paper.parts import Part
from sink_jax.report.images import png

FILE = 'claims.png'
CAPTION = ('The claims that were judged: a dot is a seed, the bar the interval of their mean, the '
           "upright line the level that is asked for, and the diamond the paper's number. Rates "
           'stand on an axis from 0 to 100 %, ratios on a logarithmic one. Of several numbers that '
           'a claim asks for, the one that decides it is drawn, or is the farthest from deciding '
           'it.')
_COLOURS = {HOLDS: plots.COLOURS[2], FAILS: plots.COLOURS[1]}
_MARGIN = 0.08  # of the range of the numbers, on either side of them


@dataclasses.dataclass(frozen=True)
class Strip:
  """Where the numbers of a part stand, from 0 at the left end of its axis to 1 at the right."""

  seeds: Sequence[float]
  level: float
  interval: tuple[float, float] | None
  paper: float | None


def strip_of(part: Part) -> Strip:
  """The places of a part's numbers; what lies off the axis stands at its end."""
  metric = METRICS[part.metric]
  ends = [end for end in (part.low, part.high, part.paper) if end is not None]
  if metric.unit == 'percent' and len(part.trials) == 1:
    least, largest = 0.0, 100.0
  else:
    shown = [metric.scaled(value) for value in (*part.values, part.level, *ends)]
    least, largest = min(shown), max(shown)
    margin = _MARGIN * (largest - least) or 1.0
    least, largest = least - margin, largest + margin
  place = lambda value: min(max((metric.scaled(value) - least) / (largest - least), 0.0), 1.0)
  known = part.low is not None and part.high is not None
  return Strip([place(value) for value in part.values], place(part.level),
               (place(part.low), place(part.high)) if known else None,
               None if part.paper is None else place(part.paper))


def deciding(parts: Iterable[Part]) -> Part | None:
  """The part that was decided against the claim; else an open one; else that with least room.

  None where all are truths, which words say better.
  """
  drawn = [part for part in parts if METRICS[part.metric].unit != 'truth']
  order = {False: 0, None: 1, True: 2}
  return min(drawn, key=lambda part: (order[part.held], _room(part)), default=None)


def rows(claims: Iterable[Claim]) -> dict[str, list[tuple[str, str, Part]]]:
  """{group of runs: (claim, verdict, the part that decides it)} of what can be drawn."""
  found: dict[str, list[tuple[str, str, Part]]] = {}
  for claim in claims:
    for verdict in claim.verdicts:
      if part := deciding(verdict.parts):
        found.setdefault(verdict.name, []).append((claim.statement, verdict.verdict, part))
  return found


def picture(claims: Iterable[Claim]) -> bytes:
  """The PNG of all claims that were judged, with a panel for each group of runs."""
  groups = rows(claims)
  heights = [0.44 * len(of) + 0.4 for of in groups.values()]
  figure, axes = plots.canvas(6.4, sum(heights), len(groups))
  axes[0, 0].get_gridspec().set_height_ratios(heights)
  for ax, (name, of) in zip(axes.flat, groups.items()):
    ax.set_axis_off()
    ax.set_xlim(-0.015, 1.015)  # whole marks at both ends
    ax.set_ylim(len(of), 0)
    ax.set_title(name, loc='left', fontsize=11, fontweight='bold')
    for i, (statement, verdict, part) in enumerate(of):
      strip, y = strip_of(part), i + 0.72
      colour = _COLOURS.get(verdict, '#777777')
      ax.text(0, i + 0.42, plots.mathematical(shorten(statement, 66, placeholder=' ...')),
              fontsize=9.5)
      ax.text(1, i + 0.42, verdict, fontsize=9.5, ha='right', color=colour, fontweight='bold')
      ax.hlines(y, 0, 1, color='#cccccc', linewidth=0.8)
      if strip.interval:
        ax.hlines(y, *strip.interval, color=colour, linewidth=6, alpha=0.35)
      ax.plot([strip.level] * 2, [y - 0.22, y + 0.22], color='black', linewidth=1.5)
      if strip.paper is not None:
        ax.plot(strip.paper, y, 'D', markersize=7, color=plots.COLOURS[0], markerfacecolor='none')
      ax.plot(strip.seeds, [y] * len(strip.seeds), 'o', markersize=4.5, color=colour)
  return png(figure)


def _room(part: Part) -> float:
  """How far the mean lies beyond its level, in widths of the interval where there is one."""
  metric = METRICS[part.metric]
  gap = abs(metric.scaled(part.mean) - metric.scaled(part.level))
  if part.low is None or part.high is None:
    return gap
  return gap / ((metric.scaled(part.high) - metric.scaled(part.low)) or 1.0)
