"""The report of the paper as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.paper.cells import Table
from sink_jax.paper.content import EventOrder, PaperReport, SyntheticAxis
from sink_jax.paper.events import CAPTION, NOTE
from sink_jax.paper.pictures import Figure
from sink_jax.paper.table_grid import (
  Grid,
  GridCell,
  part_words,
  runs_grid,
  synthetic_grid,
  table_grid,
  verdict_grid,
  verdict_words,
)
from sink_jax.report import markup
from sink_jax.report.markup import escaped, upper


def as_markdown(report: PaperReport) -> str:
  """The whole report; pictures are named, and lie beside it."""
  lines = [f'# {report.title}', '', f'*{report.paper}*: its claims, tables and figures.', '',
           '## In short', '']
  for part in report.summary.parts:
    lines += [f'### {upper(part.name)}', '', *(f'- {escaped(line)}' for line in part.lines), '']
  lines += ['## Claims', '', *(escaped(note) + '\n' for note in report.summary.notes),
            *_grid(verdict_grid(report)), '']
  for claim in report.claims:
    lines += [f'- **{escaped(claim.statement)}**{claim.marks} (Section {claim.section})']
    for verdict in claim.verdicts:
      lines += [f'  - {verdict.name}: **{verdict_words(verdict)}**. {escaped(verdict.why)}',
                *(f'    - {escaped(part_words(part))}' for part in verdict.parts)]
    lines += [f'  - Asked: {escaped(claim.criterion)}']
  lines += ['', '## Tables', '', escaped(report.comparison), '']
  for table in report.tables:
    lines += _table(table, report)
  lines += ['## Figures', '']
  for figure in report.figures:
    lines += _figure(figure)
  lines += _events(report.events) if report.events else []
  lines += _synthetic(report.synthetic) if report.synthetic else []
  lines += ['## All runs', '', *_grid(runs_grid(report)), ''] if report.runs else []
  return '\n'.join(lines + _made(report)) + '\n'


def _table(table: Table, report: PaperReport) -> list[str]:
  grid, paper = table_grid(table, report.groups), table.paper
  title = paper.name + (f': {paper.title}' if paper.number else '')
  lines = [f'### {escaped(title)} (Section {paper.section})', '']
  lines += [f'{upper(escaped(table.status))}.', ''] if table.status else []
  return lines + ([*_grid(grid), ''] if grid else [escaped(paper.note), ''])


def _figure(figure: Figure) -> list[str]:
  title, paper = figure.paper.name, figure.paper
  lines = [f'### {title}', '', escaped(f'{paper.caption} {paper.note}'), '']
  if figure.status != 'drawn':
    lines += [f'{upper(escaped(figure.status))}.', '']
  for picture in figure.pictures:
    name = f'{title} {picture.name}'.strip()
    lines += [f'![{name}]({picture.file})', '']
    # Below the picture: Markdown has no captions.
    if picture.missing:
      start = f'{upper(picture.name)}: without' if picture.name else 'Without'
      lines += [f'{start} {escaped(", ".join(picture.missing))}.', '']
    lines += [escaped(picture.note), ''] if picture.note else []
  return lines


def _events(orders: Sequence[EventOrder]) -> list[str]:
  lines = ['## The order of events', '', escaped(NOTE), '']
  for order in orders:
    lines += [f'### {escaped(upper(order.name))}', '']
    lines += [f'- **{escaped(trial.trial)}**: {escaped(trial.sentences)}'
              for trial in order.trials]
    lines += ['', f'![{CAPTION}]({order.picture.file})', '']
  return lines


def _synthetic(axis: SyntheticAxis) -> list[str]:
  lines = ['## Synthetic axis', '', 'The variants on the Bigram-Backcopy task.', '',
           *_grid(synthetic_grid(axis)), '']
  if axis.file:
    lines += [f'![Sink_1 and Sink_* by variant]({axis.file})', '']
  return lines + [escaped(f'{heading}: {meaning}') + '  '
                  for heading, meaning in axis.columns.items()] + ['']


def _grid(grid: Grid) -> list[str]:
  lines = markup.markdown_table(grid.head, [[_plain(cell) for cell in row] for row in grid.rows],
                                grid.left)
  return lines + ['', *(escaped(note) + '  ' for note in grid.notes)]


def _plain(cell: GridCell) -> str:
  """Small print in brackets."""
  if not isinstance(cell, tuple):
    return cell
  return f'{cell[0]} ({cell[1]})' if cell[1] else cell[0]


def _made(report: PaperReport) -> list[str]:
  lines = ['## How it was made', '']
  # A backtick would end the code.
  code = lambda value: '`' + value.replace('`', "'") + '`'
  for key, values in report.provenance.items():
    lines += [f'- {upper(key)}:', *(f'  - {code(value)}' for value in values)]
  for name, rules in report.budgets.items():
    lines += ['', f'Budget {name}:', '', *(f'- {escaped(rule)}' for rule in rules)]
  for group in report.groups:
    settings = ', '.join(f'`{key} = {value}`' for key, value in group.settings.items())
    lines += ['', f'{upper(group.name)}: {group.runs} runs; {settings}']
  if report.other_runs:
    lines += ['', f'Not of the paper: {escaped(", ".join(report.other_runs))}.']
  return lines
