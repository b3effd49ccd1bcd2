"""Tables of the report as cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sink_jax.paper.cells import Cell, Row, Statistics, Table, TrainedEntry
from sink_jax.paper.content import (
  GroupSummary,
  JudgedPart,
  PaperReport,
  SyntheticAxis,
  Verdict,
)
from sink_jax.paper.metrics import METRICS
from sink_jax.report.markup import short

_MARKS = '†‡§¶#'
GridCell = str | tuple[str, str]  # a text, or a text and small print


@dataclasses.dataclass(frozen=True)
class Grid:
  """head and rows of cells, and notes below them. left: columns of words."""

  head: Sequence[str]
  rows: Sequence[Sequence[GridCell]]
  notes: Sequence[str]
  left: Sequence[int] = (0,)


def table_grid(table: Table, groups: Sequence[GroupSummary]) -> Grid | None:
  """The cells of a table of the paper; None where the paper's has no numbers."""
  if not table.rows:
    return None
  metrics, headings = table.paper.metrics, table.headings
  notes = [table.paper.note] if table.paper.note else []
  if any(row.open_models for row in table.rows):
    return _open_grid(table, notes)
  if table.paper.needs != 'training':
    # Nothing was measured: columns for measured numbers and differences would be empty.
    return Grid(['setting', *(headings[metric] for metric in metrics)],
                [[_setting(row), *(row.texts[metric] for metric in metrics)]
                 for row in table.rows], notes)
  several = len(groups) > 1
  head = ['setting'] + ['budget, protocol'] * several + _compared(table)
  head += ['steps', 'tokens', 'status and runs']
  marks: dict[str, str] = {}
  rows = []
  for row in table.rows:
    for entry in row.trained or [None]:  # a row that nobody has run is shown all the same
      cells = entry.cells if entry else {}
      rows.append([_setting(row)] + [_group(entry)] * several
                  + [cell for metric in metrics for cell in _measured(row, cells, metric, marks)]
                  + _cost(entry))
  notes += [f'{mark}: {words}.' for words, mark in marks.items()]
  # The first column names the setting, where a star would be the paper's.
  if any('*' in str(cell) for row in rows for cell in row[1:]):
    notes.append('*: of proxy scores.')
  return Grid(head, rows, notes, (0, *([1] if several else []), len(head) - 1))


def _compared(table: Table) -> list[str]:
  """Headings of the paper's number, the measured one, and the difference."""
  return [words for metric in table.paper.metrics for words in (
      f'{table.headings[metric]}: paper', 'ours',
      'agrees' if metric == 'converges' else 'difference')]


def _open_grid(table: Table, notes: Sequence[str]) -> Grid:
  """A table of open models, some of which have been measured."""
  marks: dict[str, str] = {}
  rows = []
  for row in table.rows:
    entry = row.open_models
    cells = [cell for metric in table.paper.metrics
             for cell in _measured(row, entry.cells if entry else {}, metric, marks)]
    status = (entry.status, ', '.join(entry.files)) if entry else 'not run'
    rows.append([_setting(row), *cells, status])
  head = ['setting', *_compared(table), 'status and files']
  return Grid(head, rows, [*notes, *(f'{mark}: {words}.' for words, mark in marks.items())],
              (0, len(head) - 1))


def verdict_words(verdict: Verdict) -> str:
  """'holds', or 'undecided (about 7 seeds would decide)'."""
  return verdict.verdict + (f' (about {verdict.needed} seeds would decide)' if verdict.needed
                            else '')


def part_words(part: JudgedPart) -> str:
  """'Sink_1 of default, at least 10 %: 29.79 [15.20, 44.38], n = 3 (34.25, 27.50, 27.62): holds'.

  A truth has no interval: how its seeds ended says it. * marks proxy scores, as in the tables. A
  seed in which no sink emerged counts as its last step, the least that it can be.
  """
  metric = METRICS[part.metric]
  shown = lambda values: ', '.join(metric.text(value) for value in values)
  interval = f' [{shown([part.low, part.high])}]' if part.low is not None else ''
  seeds = f', n = {part.n} ({shown(part.values)})' if part.n > 1 else ', n = 1'
  paper = f'; the paper {metric.text(part.paper)}' if part.paper is not None else ''
  held = {True: 'so', False: 'not so', None: 'undecided'}[part.held]
  doubt = f', since {part.doubt}' if part.doubt else ''
  star = '*' if part.proxy else ''
  never = f'; no sink emerged in {", ".join(part.never)}' if part.never else ''
  return (f'{part.words}, asked {part.asked}: {metric.text(part.mean)}{star}{interval}{seeds}: '
          f'{held}{doubt}{never}{paper}')


def synthetic_grid(axis: SyntheticAxis) -> Grid:
  """The table of the synthetic axis."""
  head = ['variant', *axis.columns, 'status and runs']
  rows = [[row.variant, *(_spread(row.cells.get(heading)) for heading in axis.columns),
           (row.status, ', '.join(row.runs))] for row in axis.rows]
  notes = ['*: of proxy scores.'] if any('*' in str(cell) for row in rows for cell in row) else []
  return Grid(head, rows, notes, (0, len(head) - 1))


def runs_grid(report: PaperReport) -> Grid:
  """Every run, with the label, the status and the main numbers."""
  head = ['run', 'trial', 'budget', 'protocol', 'seed', 'status', 'step', 'Sink_1 %', 'valid loss']
  number = lambda value, form: '' if value is None else format(value, form)
  rows = []
  for name, run in report.runs.items():
    rows.append([name, run.trial, run.budget, run.protocol, number(run.seed, 'd'),
                 (run.status, run.error or run.reason or ''), number(run.step, ',d'),
                 number((run.sink or [None])[0], '.2f') + ('*' if run.proxy else ''),
                 number((run.losses or {}).get('valid'), '.3f')])
  return Grid(head, rows, [], (0, 1, 2, 3, 5))


def _setting(row: Row) -> GridCell:
  # `paper_text` puts that word in the place of the numbers.
  note = '' if row.paper.note == 'illegible' else row.paper.note
  small = '; '.join(filter(None, [row.paper.trial, note]))
  return (row.paper.setting, small) if small else row.paper.setting


def _group(entry: TrainedEntry | None) -> str:
  return f'{entry.budget}, {entry.protocol}' if entry else ''


def _measured(row: Row, cells: Mapping[str, Cell], metric: str, marks: dict[str, str]
              ) -> list[GridCell]:
  """The paper's value, the measured one, the difference.

  marks: {remark: its mark} of the whole table, which new remarks are added to.
  """
  cell = cells.get(metric)
  if cell is None:
    return [row.texts[metric], '', '']
  if cell.agrees is not None:
    apart = 'yes' if cell.agrees else 'no'
  elif cell.difference is None:
    apart = 'not compared' if cell.remark else ''
  else:
    steps = metric.endswith('step')
    apart = f'{cell.difference:+,.0f}' if steps else f'{cell.difference:+.2f}'
  if cell.remark:
    # Equal remarks share a mark, and the note below the table stands once.
    apart += marks.setdefault(cell.remark, _mark(len(marks)))
  return [row.texts[metric], _with_spread(cell.text), apart]


def _mark(number: int) -> str:
  """Each doubled, and so on, where there are more than these."""
  return _MARKS[number % len(_MARKS)] * (1 + number // len(_MARKS))


def _spread(statistics: Statistics | None) -> GridCell:
  return '' if statistics is None else _with_spread(statistics.text)


def _with_spread(text: str) -> GridCell:
  """'1.00 (0.50 to 1.50, n = 2)' with what is in brackets as small print."""
  words, _, spread = text.partition(' (')
  return (words, spread.removesuffix(')')) if spread else words


def _cost(entry: TrainedEntry | None) -> list[GridCell]:
  if entry is None:
    return ['', '', 'not run']
  seen = '' if entry.tokens is None else short(entry.tokens)
  tokens = (seen, f'{short(entry.unique_tokens)} unique') if entry.unique_tokens else seen
  # Steps are those of the config, tokens those seen so far.
  steps = '' if entry.steps is None else f'{entry.steps:,}'
  return [steps, tokens, (entry.status, ', '.join(entry.runs))]
