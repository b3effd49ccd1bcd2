"""Pictures as typed values, and the lines in them: means over runs, and their seeds one by one.

`curves`, `events`, `open_models` and the pages make them, `drawing` draws them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from sink_jax.paper.numbers import PaperFigure
from sink_jax.paper.open_protocol import Result
from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.records import RunRecord

# (x, y) of a run, of what was measured and is finite.
Points = Callable[[RunRecord], Sequence[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Series:
  """A line of a panel. low, high: the range over seeds. axis: 'left' or 'right'."""

  name: str
  runs: Sequence[str]
  x: Sequence[float | None]
  y: Sequence[float | None]
  low: Sequence[float | None]
  high: Sequence[float | None]
  axis: str = 'left'
  dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
  """Lines, or an attention map.

  x, y, right: labels of axes. log: the axes that are logarithmic, as in 'xy'. runs: of the map,
  which the analyses.json of its run has; report.json would be many times as large with it. seeds:
  thin lines of one run each, under the name of their mean, in place of its range. levels: at which
  dotted lines stand.
  """

  title: str
  x: str
  y: str
  series: Sequence[Series]
  right: str = ''
  log: str = ''
  map_TxT: Sequence[Sequence[float]] | None = dataclasses.field(
      default=None, metadata=UNWRITTEN)
  runs: Sequence[str] = ()
  seeds: Sequence[Series] = dataclasses.field(default=(), metadata=UNWRITTEN)
  levels: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Picture:
  """A picture: the name of its PNG, of what it is, and what is missing in it.

  budget, protocol: of the runs that it shows. across: how many panels stand beside one another.
  models, numbers: of published models, whose analysis draws the picture, and those that it shows
  as a table of texts, its header first. png: of a picture that is not drawn from its panels.
  """

  file: str
  name: str = ''
  missing: Sequence[str] = ()
  panels: Sequence[Panel] = ()
  note: str = ''
  budget: str = ''
  protocol: str = ''
  across: int | None = None
  models: Sequence[Result] = ()
  numbers: Sequence[Sequence[str]] = ()
  png: bytes = dataclasses.field(default=b'', metadata=UNWRITTEN)


@dataclasses.dataclass(frozen=True)
class Figure:
  """A figure of the paper with its pictures. status: 'drawn', or why there is none."""

  paper: PaperFigure
  pictures: Sequence[Picture]
  status: str


def course(kind: str, key: str) -> Points:
  """What gives the (step, value) of a run. kind: 'train', 'valid' or 'probe'; key: of its rows."""
  def points(run: RunRecord) -> list[tuple[float, float]]:
    of = {'train': run.train_course, 'valid': run.valid_course,
          'probe': vars(run.probe.curves) if run.probe else {}}[kind]
    return [(step, value) for step, value in zip(of.get('step', ()), of.get(key, ()))
            if step is not None and value is not None]
  return points


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
  """Means over stretches of steps, so that there are at most so many of them."""
  # Every stretch stands at its last step, so that the curve ends where the run does.
  size = -(-len(points) // most) or 1
  stretches = [points[i:i + size] for i in range(0, len(points), size)]
  return [(stretch[-1][0], statistics.fmean(y for _, y in stretch)) for stretch in stretches]


def series(name: str, runs: Sequence[RunRecord], points: Points, axis: str = 'left',
           dashed: bool = False) -> Series | None:
  """The mean over runs where all of them have a point; None where there is no such point."""
  # Seeds that diverged or are under way have fewer points: a mean over some seeds would jump
  # where one of them ends.
  courses = [dict(points(run)) for run in runs]
  shared = [x for x in courses[0] if all(x in course for course in courses)] if courses else []
  return line(name, [run.name for run in runs],
              [(x, [course[x] for course in courses]) for x in shared], axis, dashed)


def line(name: str, runs: Sequence[str], values: Sequence[tuple[float | None, Sequence[float]]],
         axis: str = 'left', dashed: bool = False) -> Series | None:
  """Means with their range. values: those at each x. None where there is none."""
  ys = [of for _, of in values]
  return Series(name, runs, [x for x, _ in values], [statistics.fmean(y) for y in ys],
                [min(y) for y in ys], [max(y) for y in ys], axis, dashed) if values else None


def seed_panel(title: str, y: str, runs: Mapping[str, Sequence[RunRecord]], points: Points,
               means: Points | None = None, levels: Sequence[float] = (), log: str = '') -> Panel:
  """Courses against the step: the mean of each line's runs, and each run as a thin line.

  Seeds themselves show where they fall into two groups, as where a sink emerges in some alone.

  Args:
    runs: by the name of their line.
    means: the points of which means are taken, where those of runs are too many to see them.
    levels, log: of the panel.
  """
  # A mean would end where the shortest run does: those without a point have no part in it.
  begun = {name: [run for run in of if points(run)] for name, of in runs.items()}
  lines = [series(name, of, means or points) for name, of in begun.items()]
  seeds = [series(name, [run], points) for name, of in begun.items() for run in of]
  return Panel(title, 'step', y, [*filter(None, lines)], log=log, seeds=[*filter(None, seeds)],
               levels=levels)
