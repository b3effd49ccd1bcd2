"""Rows of the paper's tables with what was measured for them, as typed values.

`tables` and `open_models` make them, and `tables` shows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.paper.metrics import Statistics
from sink_jax.paper.numbers import PaperRow, PaperTable, Value


@dataclasses.dataclass(frozen=True)
class OpenNumber:
  """A metric of a published model: a number, and the text that shows it.

  file: of the analysis. others: files that have the same number and are not shown. checkpoint,
  inputs: what the file says of them.
  """

  value: float
  text: str
  model: str
  file: str
  checkpoint: Mapping[str, Any]
  inputs: Mapping[str, Any]
  others: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Cell:
  """A number that was measured here beside the paper's.

  difference: measured minus the paper's; None where the two are not compared. agrees: of a truth,
  else None. remark: why it is not compared, or in what its making differs from the paper's.
  """

  paper: Value
  difference: float | None
  agrees: bool | None
  remark: str
  measured: Statistics | OpenNumber


@dataclasses.dataclass(frozen=True)
class Entry:
  """What was measured for a row: of a trial at one budget and protocol, or of published models.

  cells: by metric. sources: names of runs, or files of the cells. steps, unique_tokens (0: all of
  the data): of the first run with a config. tokens: seen by the first measured run.
  """

  status: str
  cells: Mapping[str, Cell]
  sources: Sequence[str]
  budget: str = ''
  protocol: str = ''
  steps: int | None = None
  tokens: int | None = None
  unique_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the paper and what was measured for it.

  texts: the paper's values by metric, as they stand in a table.
  """

  paper: PaperRow
  texts: Mapping[str, str]
  entries: Sequence[Entry] = ()


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of the paper with rows of measured numbers. headings: of columns, by metric."""

  paper: PaperTable
  status: str
  headings: Mapping[str, str]
  rows: Sequence[Row]
