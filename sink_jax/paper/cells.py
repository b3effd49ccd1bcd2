"""Rows of the paper's tables with what was measured for them, as typed values.

`tables` and `open_models` make them, `table_grid` shows them. The `as_dict` of each is its form in
report.json, whose keys are fixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.paper.numbers import PaperRow, PaperTable, Value


@dataclasses.dataclass(frozen=True)
class Statistics:
  """A metric over the seeds of a trial: numbers, and the text that shows them.

  mean is None where a seed never gets there, as where no sink emerges. standard_deviation: None
  for one seed. runs: names of the folders.
  """

  mean: float | None
  least: float | None
  largest: float | None
  standard_deviation: float | None
  n: int
  text: str
  proxy: bool
  runs: Sequence[str]

  def as_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class TrialStatistics:
  """A number that decides a claim."""

  trial: str
  metric: str
  statistics: Statistics

  def as_dict(self) -> dict[str, Any]:
    # 'measure' is the key of reports that were written when metrics had that name.
    return {'trial': self.trial, 'measure': self.metric, **self.statistics.as_dict()}


@dataclasses.dataclass(frozen=True)
class Cell:
  """A measured number beside the paper's.

  difference: measured minus the paper's; None where the two are not compared. agrees: of a truth,
  else None. remark: why it is not compared, or in what its making differs from the paper's.
  """

  paper: Value
  difference: float | None
  agrees: bool | None
  remark: str

  @property
  def text(self) -> str:
    raise NotImplementedError

  def as_dict(self) -> dict[str, Any]:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TrainedCell(Cell):
  """A number of runs that were trained here."""

  statistics: Statistics

  @property
  def text(self) -> str:
    return self.statistics.text

  def as_dict(self) -> dict[str, Any]:
    # Flat, as every committed report has it.
    return self.statistics.as_dict() | {'paper': self.paper, 'difference': self.difference,
                                        'agrees': self.agrees, 'remark': self.remark}


@dataclasses.dataclass(frozen=True)
class OpenCell(Cell):
  """A number of a published model.

  file: of the analysis. others: files that have the same number and are not shown. checkpoint,
  inputs: what the file says of them.
  """

  value: float
  words: str
  model: str
  file: str
  checkpoint: Mapping[str, Any]
  inputs: Mapping[str, Any]
  others: Sequence[str]

  @property
  def text(self) -> str:
    return self.words

  def as_dict(self) -> dict[str, Any]:
    # The same keys as for trained runs, so that a reader of report.json need not tell the two
    # apart.
    return {'mean': self.value, 'text': self.words, 'paper': self.paper,
            'difference': self.difference, 'agrees': self.agrees, 'remark': self.remark,
            'model': self.model, 'file': self.file, 'checkpoint': self.checkpoint,
            'inputs': self.inputs, 'others': self.others}


@dataclasses.dataclass(frozen=True)
class TrainedEntry:
  """A trial of a row, at one budget and protocol.

  finished: whether a run of it is done. cells: by metric. steps, unique_tokens (0: all of the
  data): of the first run with a config. tokens: seen by the first measured run.
  """

  budget: str
  protocol: str
  status: str
  finished: bool
  cells: Mapping[str, TrainedCell]
  steps: int | None
  tokens: int | None
  unique_tokens: int
  runs: Sequence[str]

  def as_dict(self) -> dict[str, Any]:
    return {'budget': self.budget, 'protocol': self.protocol, 'status': self.status,
            'finished': self.finished, 'measures': _as_dicts(self.cells), 'steps': self.steps,
            'tokens': self.tokens, 'unique_tokens': self.unique_tokens, 'runs': self.runs}


@dataclasses.dataclass(frozen=True)
class OpenEntry:
  """The published models of a row. files: of the cells that are shown."""

  status: str
  cells: Mapping[str, OpenCell]
  files: Sequence[str]

  def as_dict(self) -> dict[str, Any]:
    return {'status': self.status, 'measures': _as_dicts(self.cells), 'files': self.files}


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the paper and what was measured for it.

  texts: the paper's values by metric, as they stand in a table. trained: an entry per budget and
  protocol. open_models: None where nothing was measured.
  """

  paper: PaperRow
  texts: Mapping[str, str]
  trained: Sequence[TrainedEntry] = ()
  open_models: OpenEntry | None = None

  def as_dict(self) -> dict[str, Any]:
    # A row is of trained or of open models: one of the two is empty.
    entries = [*self.trained, *([self.open_models] if self.open_models else [])]
    return self.paper.as_dict() | {'paper': self.texts,
                                   'ours': [entry.as_dict() for entry in entries]}


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of the paper with rows of measured numbers. headings: of columns, by metric."""

  paper: PaperTable
  status: str
  headings: Mapping[str, str]
  rows: Sequence[Row]

  def as_dict(self) -> dict[str, Any]:
    table = self.paper
    return {
        'key': table.key, 'number': table.number, 'half': table.half, 'title': table.title,
        'section': table.section, 'needs': table.needs,
        **({'analysis': table.analysis} if table.analysis else {}),
        'measures': table.metrics,
        **({'note': table.note} if table.note else {}),
        'rows': [row.as_dict() for row in self.rows],
        'name': table.name, 'status': self.status, 'headings': self.headings}


def _as_dicts(cells: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
  return {metric: cell.as_dict() for metric, cell in cells.items()}
