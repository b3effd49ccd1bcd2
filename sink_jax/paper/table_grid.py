"""Tables of the report, written to its page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sink_jax.io.tables import number, short
from sink_jax.paper.cells import Cell, Entry, Row, Table
from sink_jax.paper.content import GroupSummary, SyntheticAxis
from sink_jax.report.markup import upper
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord

_MARKS = '†‡§¶#'
_PROXIES = '*: of proxy scores.'
_NOT_RUN = Entry('not run', {}, ())
Words = str | tuple[str, str]  # a text, or a text and small print


def add_table(parts: Parts, table: Table, groups: Sequence[GroupSummary]) -> None:
  """A table of the paper with what was measured for it, and notes."""
  paper, metrics, headings = table.paper, table.paper.metrics, table.headings
  parts.heading(paper.name, 3)
  parts.paragraph(f'{paper.title} (Section {paper.section}).' if paper.number else
                  f'Section {paper.section}.')
  parts.paragraph(upper(table.status) + '.' if table.status else '')
  trained = paper.needs == 'training'
  # Where nothing was measured, columns for measured numbers and differences would be empty.
  measured = trained or any(row.entries for row in table.rows)
  several = trained and len(groups) > 1
  head = ['setting'] + ['budget, protocol'] * several
  for metric in metrics:
    apart = 'agrees' if metric == 'converges' else 'difference'
    head += [f'{headings[metric]}: paper', 'measured', apart] if measured else [headings[metric]]
  head += ['steps', 'tokens', 'status and runs'] if trained else ['status and files'] * measured
  marks: dict[str, str] = {}
  # A row that nobody has run is shown all the same.
  rows = [[_setting(row)] + [f'{entry.budget}, {entry.protocol}'.strip(', ')] * several
          + [cell for metric in metrics
             for cell in _measured(row, entry.cells, metric, marks)[:3 if measured else 1]]
          + (_cost(entry) if trained else [])
          + [(entry.status, ', '.join(entry.sources))] * measured
          for row in table.rows for entry in row.entries or [_NOT_RUN]]
  if rows:
    parts.table(head, rows, (0, *[1] * several, *[len(head) - 1] * measured))
  parts.paragraphs([paper.note, *(f'{mark}: {words}.' for words, mark in marks.items())])
  # The first column names the setting, where a star would be the paper's.
  if trained and any('*' in str(cell) for row in rows for cell in row[1:]):
    parts.paragraph(_PROXIES)


def add_synthetic(parts: Parts, axis: SyntheticAxis) -> None:
  """The table of the synthetic axis."""
  head = ['variant', *axis.columns, 'status and runs']
  rows = [[row.variant, *(_with_spread(row.cells[heading].text) if heading in row.cells else ''
                          for heading in axis.columns),
           (row.status, ', '.join(row.runs))] for row in axis.rows]
  parts.table(head, rows, (0, len(head) - 1))
  if any('*' in str(cell) for row in rows for cell in row):
    parts.paragraph(_PROXIES)


def add_runs(parts: Parts, runs: Iterable[RunRecord]) -> None:
  """Every run, with the label, the status and the main numbers."""
  parts.table(
      ['run', 'trial', 'budget', 'protocol', 'seed', 'status', 'step', 'Sink_1 %', 'valid loss'],
      [[run.name, run.label.trial, run.label.budget, run.label.protocol,
        number(run.setup and run.setup.seed, 'd', ''),
        (run.status, run.error or run.reason or ''), number(run.step, ',d', ''),
        number(run.probe and run.probe.sink_1, '.2f', '') + ('*' if run.proxy else ''),
        number((run.losses or {}).get('valid'), '.3f', '')] for run in runs], (0, 1, 2, 3, 5))


def _setting(row: Row) -> Words:
  # That word stands in the place of the numbers.
  note = '' if row.paper.note == 'illegible' else row.paper.note
  return row.paper.setting, '; '.join(filter(None, [row.paper.trial, note]))


def _measured(row: Row, cells: Mapping[str, Cell], metric: str, marks: dict[str, str]
              ) -> list[Words]:
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
  return [row.texts[metric], _with_spread(cell.measured.text), apart]


def _mark(number: int) -> str:
  """Each doubled, and so on, where there are more than these."""
  return _MARKS[number % len(_MARKS)] * (1 + number // len(_MARKS))


def _with_spread(text: str) -> Words:
  """'1.00 (0.50 to 1.50, n = 2)' with what is in brackets as small print."""
  words, _, spread = text.partition(' (')
  return words, spread.removesuffix(')')


def _cost(entry: Entry) -> list[Words]:
  """Steps of the config, and tokens seen so far."""
  unique = f'{short(entry.unique_tokens)} unique' if entry.unique_tokens else ''
  seen = '' if entry.tokens is None else short(entry.tokens)
  return [number(entry.steps, ',d', ''), (seen, unique)]
