"""The report of the paper as one HTML page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from sink_jax.paper.cells import Table
from sink_jax.paper.content import (
  EventOrder,
  JudgedClaim,
  PaperReport,
  SyntheticAxis,
  TrialEvents,
  Verdict,
)
from sink_jax.paper.events import CAPTION, NOTE
from sink_jax.paper.overview import chip, overview
from sink_jax.paper.pictures import Figure
from sink_jax.paper.strips import strip
from sink_jax.paper.table_grid import (
  Grid,
  GridCell,
  part_words,
  runs_grid,
  synthetic_grid,
  table_grid,
)
from sink_jax.report import markup
from sink_jax.report.markup import text, upper

_SWEEP = 'python -m sink_jax.sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke'


def as_html(report: PaperReport, images: Mapping[str, bytes]) -> str:
  """The report as a page without scripts or outside resources. images: PNGs by file name."""
  parts = [_header(report), overview(report), _contents(report), _in_short(report),
           _claims(report),
           '<section id="tables"><h2>Tables</h2>', f'<p>{text(report.comparison)}</p>']
  # Tables have a number; the numbers of the running text follow in their own section.
  parts += [_table(table, report) for table in report.tables if table.paper.number]
  parts += ['</section>', '<section id="numbers"><h2>Numbers of the text</h2>']
  parts += [_table(table, report) for table in report.tables if not table.paper.number]
  parts += ['</section>', '<section id="figures"><h2>Figures</h2>']
  parts += [_figure(figure, images) for figure in report.figures]
  parts += ['</section>', _events(report.events, images) if report.events else '',
            _synthetic(report.synthetic, images) if report.synthetic else '',
            _runs(report) if report.runs else '', _made(report)]
  return markup.document(report.title, parts)


def _header(report: PaperReport) -> str:
  if not (report.runs or report.analyses):
    facts = f'Nothing has been run. Begin with {markup.code(_SWEEP)}.'
  else:
    parts = [f'{group.name}: {group.runs} runs of {group.trials} trials ('
             + ', '.join(f'{n} {status}' for status, n in group.statuses.items()) + ')'
             for group in report.groups]
    files = len(report.analyses)
    parts += [f'{files} file{"s" if files > 1 else ""} of analyses'] if files else []
    facts = text('; '.join(parts) or 'No run is of the paper') + '.'
  return (f'<header><h1>{text(report.title)}</h1><p><i>{text(report.paper)}</i>: its claims, '
          f'its tables and its figures, and what our runs say to each. {facts} Report of '
          f'{text(report.provenance["date"][0])}.</p></header>')


def _contents(report: PaperReport) -> str:
  link = lambda key, words: f'<a href="#{key}">{text(words)}</a>'
  short = lambda item: f'{item.number} {item.half}'.strip()
  papers = [table.paper for table in report.tables]
  tables = [link(table.key, short(table)) for table in papers if table.number]
  numbers = [link(table.key, table.title) for table in papers if not table.number]
  figures = [link(figure.key, short(figure) + (f' ({figure.paper})' if figure.paper else ''))
             for figure in (drawn.paper for drawn in report.figures)]
  lines = [link('overview', 'Every claim in a line'), link('in-short', 'In short'),
           link('claims', 'Claims'),
           f'{link("tables", "Tables")}: {", ".join(tables)}',
           f'{link("numbers", "Numbers of the text")}: {", ".join(numbers)}',
           f'{link("figures", "Figures")}: {", ".join(figures)}',
           *([link('events', 'The order of events')] if report.events else []),
           *([link('synthetic', 'Synthetic axis')] if report.synthetic else []),
           *([link('runs', 'All runs')] if report.runs else []),
           link('made', 'How it was made')]
  return '<nav><ul>' + ''.join(f'<li>{line}</li>' for line in lines) + '</ul></nav>'


def _in_short(report: PaperReport) -> str:
  parts = ['<section id="in-short"><h2>In short</h2>']
  for part in report.summary.parts:
    lines = ''.join(f'<li>{text(line)}</li>' for line in part.lines)
    parts.append(f'<h3>{text(upper(part.name))}</h3><ul>{lines}</ul>')
  return ''.join([*parts, '</section>'])


def _claims(report: PaperReport) -> str:
  notes = ''.join(f'<p class="note">{text(note)}</p>' for note in report.summary.notes)
  return ('<section id="claims"><h2>Claims</h2>' + notes + ''.join(map(_claim, report.claims))
          + '</section>')


def _claim(claim: JudgedClaim) -> str:
  verdicts = ''.join(
      f'<p>{chip(verdict)} {text(verdict.name)}: {text(verdict.why)}</p>' + _parts(verdict)
      for verdict in claim.verdicts)
  return (f'<article id="claim-{claim.key}"><h3>{text(claim.statement)}{claim.marks} '
          f'<small>Section {text(claim.section)}</small></h3>{verdicts}'
          f'<p class="note">Asked: {text(claim.criterion)}</p></article>')


def _parts(verdict: Verdict) -> str:
  rows = ''.join(f'<li>{strip(part)} {text(part_words(part))}</li>' for part in verdict.parts)
  return f'<ul class="parts">{rows}</ul>' if rows else ''


def _table(table: Table, report: PaperReport) -> str:
  grid, paper = table_grid(table, report.groups), table.paper
  title = paper.name + (f': {paper.title}' if paper.number else '')
  status = f'<p class="note">{text(upper(table.status))}.</p>' if table.status else ''
  body = _grid(grid) if grid else f'<p class="note">{text(paper.note)}</p>'
  return (f'<article id="{paper.key}"><h3>{text(title)} '
          f'<small>Section {text(paper.section)}</small></h3>{status}{body}</article>')


def _figure(figure: Figure, images: Mapping[str, bytes]) -> str:
  paper = figure.paper
  parts = [f'<article id="{paper.key}"><h3>{text(paper.name)}</h3>']
  words = ' '.join(filter(None, [paper.caption, paper.note]))
  if figure.status != 'drawn':
    parts.append(f'<p>{text(words)}</p><p class="note">{text(upper(figure.status))}.</p>')
  for picture in figure.pictures:
    missing = f' Without {", ".join(picture.missing)}.' if picture.missing else ''
    name = f'{upper(picture.name)}. ' if picture.name else ''
    note = f' {picture.note}' if picture.note else ''
    parts.append(markup.picture(images[picture.file], f'{name}{words}{note}{missing}',
                                'single' if picture.narrow else 'wide'))
  return ''.join([*parts, '</article>'])


def _events(orders: Sequence[EventOrder], images: Mapping[str, bytes]) -> str:
  parts = ['<section id="events"><h2>The order of events</h2>', f'<p>{text(NOTE)}</p>']
  for order in orders:
    parts.append(f'<h3>{text(upper(order.name))}</h3><ul>'
                 + ''.join(map(_trial_events, order.trials)) + '</ul>')
    parts.append(markup.picture(images[order.picture.file], f'{upper(order.name)}. {CAPTION}'))
  return ''.join([*parts, '</section>'])


def _trial_events(trial: TrialEvents) -> str:
  return (f'<li><b>{text(trial.trial)}</b>: {text(trial.sentences)} '
          f'<small>{html.escape(", ".join(trial.runs))}</small></li>')


def _synthetic(axis: SyntheticAxis, images: Mapping[str, bytes]) -> str:
  optimum = ''.join(f'<p class="note">The least possible loss is {value:.3f} nats on bigram '
                    'targets and 0 on back-copies.</p>' for value in axis.optimum)
  caption = 'Sink_1 and Sink_* by variant, on the Bigram-Backcopy task; * marks proxies.'
  drawn = markup.picture(images[axis.file], caption, 'single') if axis.file else ''
  terms = markup.definitions({heading: text(words) for heading, words in axis.columns.items()})
  return ('<section id="synthetic"><h2>Synthetic axis</h2><p>The paper\'s variants on the '
          'Bigram-Backcopy task, where one head has one thing to do; default is softmax.</p>'
          f'{_grid(synthetic_grid(axis))}{optimum}{drawn}'
          f'<details><summary>Columns</summary>{terms}</details></section>')


def _runs(report: PaperReport) -> str:
  return ('<section id="runs"><h2>All runs</h2><details><summary>'
          f'{len(report.runs)} folders</summary>{_grid(runs_grid(report))}</details></section>')


def _made(report: PaperReport) -> str:
  code = lambda values: '<br>'.join(map(markup.code, values))
  made = {upper(key): code(values) for key, values in report.provenance.items()}
  parts = ['<section id="made"><h2>How it was made</h2>', markup.definitions(made, 'made')]
  for group in report.groups:
    settings = [f'{key} = {value}' for key, value in group.settings.items()]
    parts.append(f'<p>{text(upper(group.name))}: {code(settings)}</p>')
  for name, rules in report.budgets.items():
    parts.append(f'<h3>Budget {text(name)}</h3><ul>'
                 + ''.join(f'<li>{text(rule)}</li>' for rule in rules) + '</ul>')
  if report.other_runs:
    parts.append(f'<p class="note">Not of the paper: {text(", ".join(report.other_runs))}.</p>')
  return ''.join([*parts, '</section>'])


def _grid(grid: Grid) -> str:
  head = '<tr>' + ''.join(
      f'<th scope="col"{_side(i, grid)}>{text(words)}</th>' for i, words in enumerate(grid.head))
  rows = []
  for row in grid.rows:
    # The first cell heads its row, for those who hear the page read.
    first, *others = [_cell(cell) for cell in row]
    rows.append(f'<th scope="row">{first}</th>' + ''.join(
        f'<td{_side(i, grid)}>{cell}</td>' for i, cell in enumerate(others, 1)))
  notes = ''.join(f'<p class="note">{text(note)}</p>' for note in grid.notes)
  return markup.table(head + '</tr>', rows) + notes


def _side(column: int, grid: Grid) -> str:
  return ' class="left"' if column in grid.left else ''


def _cell(cell: GridCell) -> str:
  if not isinstance(cell, tuple):
    return text(cell)
  words, small = cell
  # Small print names runs, trials and files, whose letters stay as they are.
  return f'{text(words)}<small>{html.escape(small)}</small>' if small else text(words)
