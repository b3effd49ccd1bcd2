"""Figures of the paper as typed values: series, panels, pictures.

`curves` and `open_models` make them, `drawing` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.paper.numbers import PaperFigure
from sink_jax.report.jsontext import UNWRITTEN


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
class DrawnModel:
  """A published model in a picture, and the file and checkpoint that it is drawn from."""

  model: str
  file: str
  checkpoint: Mapping[str, Any]


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
  models: Sequence[DrawnModel] = ()
  numbers: Sequence[Sequence[str]] = ()
  png: bytes = dataclasses.field(default=b'', metadata=UNWRITTEN)


@dataclasses.dataclass(frozen=True)
class Figure:
  """A figure of the paper with its pictures. status: 'drawn', or why there is none."""

  paper: PaperFigure
  pictures: Sequence[Picture]
  status: str
