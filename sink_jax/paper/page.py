"""The report of the paper, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sink_jax.paper import drawing, strips
from sink_jax.paper.cells import Table
from sink_jax.paper.claims import PLURAL
from sink_jax.paper.content import EventOrder, JudgedClaim, PaperReport
from sink_jax.paper.events import CAPTION, NOTE
from sink_jax.paper.pictures import Figure, Picture
from sink_jax.paper.summary import LIMITS
from sink_jax.paper.table_grid import (
  Grid,
  part_words,
  runs_grid,
  synthetic_grid,
  table_grid,
  verdict_words,
)
from sink_jax.report.markup import bold, code, joined, line, link, upper
from sink_jax.report.origins import add_made_by
from sink_jax.report.parts import Parts

_SWEEP = 'python -m sink_jax.sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke'
# Of the paper, in its order.
_SECTIONS = {'3.1': 'what a sink is', '4': 'optimisation', '5': 'data', '6': 'loss',
             '7.1': 'position encodings', '7.2': 'pre-norm and post-norm', '7.3': 'biases',
             '7.4': 'attention operations', 'C.1': 'optimisation, further',
             'C.3': 'feed-forward networks', 'C.4': 'attention, further'}
_CLAIMS, _TABLES, _NUMBERS, _FIGURES = 'Claims', 'Tables', 'Numbers of the text', 'Figures'
_EVENTS, _SYNTHETIC, _SHORT = 'The order of events', 'Synthetic axis', 'In short'
_RUNS, _MADE = 'All runs', 'How it was made'


def page(report: PaperReport) -> Parts:
  """The whole report: the answer first, names of claims and runs last."""
  parts = _Page(report.title)
  for words in answer(report):
    parts.paragraph(words)
  parts.table(*_by_section(report))
  if strips.rows(report.claims):
    parts.draw(strips.FILE, strips.CAPTION, lambda: strips.picture(report.claims))
  # The course of training says more at a glance than any other picture.
  if report.events:
    _draw_events(parts, report.events[0])
  _add_contents(parts, report)
  parts.heading(_CLAIMS)
  parts.paragraphs(report.summary.notes)
  for claim in report.claims:
    _add_claim(parts, claim)
  parts.heading(_TABLES)
  parts.paragraph(report.comparison)
  # Tables have a number; the numbers of the running text follow in their own chapter.
  tables = sorted(report.tables, key=lambda table: not table.paper.number)
  for i, table in enumerate(tables):
    if i and not table.paper.number and tables[i - 1].paper.number:
      parts.heading(_NUMBERS)
    _add_table(parts, table, report)
  parts.heading(_FIGURES)
  for figure in report.figures:
    _add_figure(parts, figure)
  _add_events(parts, report)
  _add_synthetic(parts, report)
  parts.heading(_SHORT)
  for part in report.summary.parts:
    parts.heading(upper(part.name), 3)
    parts.items(part.lines)
  if report.runs:
    parts.heading(_RUNS)
    with parts.details(f'{len(report.runs)} folders'):
      parts.grid(runs_grid(report))
  _add_made(parts, report)
  return parts


class _Page(Parts):
  """With pictures that are drawn when their place on the page is come to."""

  def __init__(self, title: str):
    super().__init__(title)
    self._drawn: set[str] = set()

  def draw(self, file: str, caption: str, png: Callable[[], bytes]) -> None:
    """A picture, which stands on the page once."""
    if file not in self._drawn:
      self._drawn.add(file)
      self.picture(file, png(), caption)

  def show(self, picture: Picture, caption: str) -> None:
    self.draw(picture.file, caption, lambda: picture.png or drawing.panels(picture))

  def grid(self, grid: Grid) -> None:
    self.table(grid.head, grid.rows, grid.left)
    self.paragraphs(grid.notes)

  def paragraphs(self, lines: Sequence[str]) -> None:
    for words in lines:
      self.paragraph(words)


def answer(report: PaperReport) -> list[str]:
  """What the runs say of the claims, a paragraph for every group of runs."""
  if not (report.runs or report.analyses):
    return [line('Nothing has been run. Begin with ', code(_SWEEP), '.')]
  groups = {group.name: group for group in report.groups}
  lines = []
  for part in report.summary.parts:
    verdicts = [verdict.verdict for claim in report.claims for verdict in claim.verdicts
                if verdict.name == part.name]
    if not verdicts:  # of open models
      files = len(report.analyses)
      lines.append(f'{upper(part.name)} ({files} file{"s" if files > 1 else ""} of analyses): '
                   f'{part.lines[0]}')
      continue
    counts = joined([f'{n} {words if n != 1 else verdict}' for verdict, words in PLURAL.items()
                     for n in [verdicts.count(verdict)]])
    group = groups.get(part.name)
    about = '' if group is None else (
        f' ({group.runs} runs of {group.trials} trials: '
        + ', '.join(f'{n} {status}' for status, n in group.statuses.items()) + ')')
    lines.append(line(
        f'{upper(part.name)}{about}: of {len(verdicts)} claims of the paper, ', bold(counts),
        f'. {upper(part.lines[0])} ',
        *(words for words in part.lines if words in LIMITS.values())))
  return lines


def _by_section(report: PaperReport) -> tuple[list[str], list[list[str]], tuple[int, ...]]:
  """How many claims of each section of the paper have each verdict."""
  names = list(dict.fromkeys(
      verdict.name for claim in report.claims for verdict in claim.verdicts))
  several, rows = len(names) > 1, []
  for section in sorted({claim.section for claim in report.claims}, key=list(_SECTIONS).index):
    for name in names:
      found = [verdict.verdict for claim in report.claims if claim.section == section
               for verdict in claim.verdicts if verdict.name == name]
      if found:
        rows.append([f'{section} {_SECTIONS[section]}', *[name] * several,
                     *(str(found.count(verdict)) for verdict in PLURAL)])
  # Short, for the table to be as narrow as a phone.
  verdicts = [words.removeprefix('are ').replace('cannot be', 'not') for words in PLURAL.values()]
  return ['section', *['runs'] * several, *verdicts], rows, (0, 1)[:1 + several]


def _add_contents(parts: Parts, report: PaperReport) -> None:
  papers = [table.paper for table in report.tables]
  short = lambda item: f'{item.number} {item.half}'.strip()
  figures = [figure.paper for figure in report.figures]
  lines = [link(_CLAIMS, _CLAIMS),
           line(link(_TABLES, _TABLES), ': ', joined([
               link(short(table), table.name) for table in papers if table.number])),
           line(link(_NUMBERS, _NUMBERS), ': ', joined([
               link(table.name, table.name) for table in papers if not table.number])),
           line(link(_FIGURES, _FIGURES), ': ', joined([
               link(short(figure) + (f' ({figure.paper})' if figure.paper else ''), figure.name)
               for figure in figures]))]
  parts.items([*lines, joined([link(words, words) for words, there in (
      (_EVENTS, report.events), (_SYNTHETIC, report.synthetic), (_SHORT, True),
      (_RUNS, report.runs), (_MADE, True)) if there])])


def _add_claim(parts: Parts, claim: JudgedClaim) -> None:
  parts.heading(claim.statement + claim.marks, 3)
  parts.paragraph(f'Section {claim.section}. Asked: {claim.criterion}')
  for verdict in claim.verdicts:
    parts.paragraph(line(bold(verdict_words(verdict)), f' ({verdict.name}): {verdict.why}'))
    parts.items([part_words(part) for part in verdict.parts])


def _add_table(parts: _Page, table: Table, report: PaperReport) -> None:
  grid, paper = table_grid(table, report.groups), table.paper
  parts.heading(paper.name, 3)
  parts.paragraph(f'{paper.title} (Section {paper.section}).' if paper.number else
                  f'Section {paper.section}.')
  parts.paragraph(upper(table.status) + '.' if table.status else '')
  if grid:
    parts.grid(grid)
  else:
    parts.paragraph(paper.note)


def _add_figure(parts: _Page, figure: Figure) -> None:
  paper = figure.paper
  parts.heading(paper.name, 3)
  words = ' '.join(filter(None, [paper.caption, paper.note]))
  if figure.status != 'drawn':
    parts.paragraph(words)
    parts.paragraph(f'{upper(figure.status)}.')
  for picture in figure.pictures:
    missing = f' Without {", ".join(picture.missing)}.' if picture.missing else ''
    name = f'{upper(picture.name)}. ' if picture.name else ''
    parts.show(picture, f'{name}{words}{" " * bool(picture.note)}{picture.note}{missing}')


def _add_events(parts: _Page, report: PaperReport) -> None:
  if not report.events:
    return
  parts.heading(_EVENTS)
  parts.paragraph(NOTE)
  for order in report.events:
    parts.heading(f'Events: {order.picture.name}', 3)
    parts.items([line(bold(trial.trial), f': {trial.sentences} {", ".join(trial.runs)}')
                 for trial in order.trials])
    _draw_events(parts, order)


def _draw_events(parts: _Page, order: EventOrder) -> None:
  parts.show(order.picture, f'{upper(order.picture.name)}. {CAPTION}')


def _add_synthetic(parts: _Page, report: PaperReport) -> None:
  axis = report.synthetic
  if axis is None:
    return
  parts.heading(_SYNTHETIC)
  parts.paragraph("The paper's variants on the Bigram-Backcopy task, where one head has one thing "
                  'to do; default is softmax.')
  parts.grid(synthetic_grid(axis))
  parts.paragraphs([f'The least possible loss is {value:.3f} nats on bigram targets and 0 on '
                    'back-copies.' for value in axis.optimum])
  if any('Sink_1 %' in row.cells for row in axis.rows):
    parts.draw('synthetic.png', 'Sink_1 and Sink_* by variant, on the Bigram-Backcopy task; * '
               'marks proxies.', lambda: drawing.rates(axis))
  with parts.details('Columns'):
    parts.items([line(bold(heading), ': ', words) for heading, words in axis.columns.items()])


def _add_made(parts: _Page, report: PaperReport) -> None:
  parts.heading(_MADE)
  parts.paragraph(line(f'Of {report.paper}: its claims, tables and figures, and what the runs say '
                       'to each.'))
  add_made_by(parts, report.provenance)
  for group in report.groups:
    settings = joined([code(f'{key} = {value}') for key, value in group.settings.items()])
    parts.paragraph(line(bold(upper(group.name)), f': {group.runs} runs; ', settings))
  for name, rules in report.budgets.items():
    parts.heading(f'Budget {name}', 3)
    parts.items(rules)
  if report.other_runs:
    parts.paragraph(f'Not of the paper: {", ".join(report.other_runs)}.')
