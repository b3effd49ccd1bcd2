"""The report of the paper: what it holds, as report.json has it, and its page part by part."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.paper import drawing, synthetic
from sink_jax.paper.claims import PLURAL, Claim, SecondLook
from sink_jax.paper.events import CAPTION, NOTE, EventOrder
from sink_jax.paper.metrics import METRICS, MeasuredRun
from sink_jax.paper.parts import Part
from sink_jax.paper.pictures import Figure
from sink_jax.paper.summary import NOTES, GroupSummary
from sink_jax.paper.tables import Table, add_runs, add_table
from sink_jax.report.markup import bold, code, joined, line, link, upper
from sink_jax.report.parts import Parts

_SWEEP = 'python -m sink_jax sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke'
# Of the paper, in its order.
_SECTIONS = {'3.1': 'what a sink is', '4': 'optimisation', '5': 'data', '6': 'loss',
             '7.1': 'position encodings', '7.2': 'pre-norm and post-norm', '7.3': 'biases',
             '7.4': 'attention operations', 'C.1': 'optimisation, further',
             'C.3': 'feed-forward networks', 'C.4': 'attention, further'}
_CLAIMS, _TABLES, _NUMBERS, _FIGURES = 'Claims', 'Tables', 'Numbers of the text', 'Figures'
# Unlike the name of the group of these runs, which is a heading as well.
_EVENTS, _SYNTHETIC = 'The order of events', 'The synthetic axis'
_STRIPS = ('The claims that were judged: a dot is a seed, the bar the interval of their mean, the '
           "upright line the level that is asked for, and the diamond the paper's number. Rates "
           'stand on an axis from 0 to 100 %, ratios on a logarithmic one. Of several numbers that '
           'a claim asks for, the one that decides it is drawn, or is the farthest from deciding '
           'it.')
_RUNS, _MADE = 'All runs', 'How it was made'


@dataclasses.dataclass(frozen=True)
class PaperReport:
  """The whole report.

  groups: of runs. open_models: lines; the first says how much there is of them. undecided: what
  second looks take. claims: with their verdicts. comparison: when numbers are compared with the
  paper's. budgets: their rules in words. runs: by name. analyses: how each file was made.
  other_runs: names of runs that are not of the paper. provenance: how runs, analyses and the report
  were made.
  """

  title: str
  paper: str
  groups: Sequence[GroupSummary]
  open_models: Sequence[str]
  undecided: Sequence[SecondLook]
  claims: Sequence[Claim]
  tables: Sequence[Table]
  figures: Sequence[Figure]
  events: Sequence[EventOrder]
  synthetic: synthetic.SyntheticAxis | None
  comparison: str
  budgets: Mapping[str, Sequence[str]]
  runs: Mapping[str, MeasuredRun]
  analyses: Mapping[str, Mapping[str, Any]]
  other_runs: Sequence[str]
  provenance: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def page(report: PaperReport) -> Parts:
  """The whole report: the answer first, names of claims and runs last."""
  parts = Parts(report.title)
  parts.paragraphs([line(bold(name), ': ', words) for name, words in answer(report)])
  _add_sections(parts, report)
  if rows := drawing.claim_rows(report.claims):
    parts.picture('claims.png', drawing.claims(rows), _STRIPS)
  # The course of training says more at a glance than any other picture.
  for order in report.events[:1]:
    _draw_events(parts, order)
  _add_contents(parts, report)
  parts.heading(_CLAIMS)
  parts.paragraphs(NOTES)
  for group in report.groups:
    _add_group(parts, group)
  for claim in report.claims:
    _add_claim(parts, claim)
  # Tables have a number; the numbers of the running text follow in their own chapter.
  for heading, numbered, words in ((_TABLES, True, report.comparison), (_NUMBERS, False, '')):
    parts.heading(heading)
    parts.paragraph(words)
    for table in report.tables:
      if bool(table.paper.number) is numbered:
        add_table(parts, table, sum(bool(group.protocol) for group in report.groups))
  parts.heading(_FIGURES)
  for figure in report.figures:
    _add_figure(parts, figure)
  if report.events:
    _add_events(parts, report.events)
  if report.synthetic:
    parts.heading(_SYNTHETIC)
    synthetic.add_axis(parts, report.synthetic)
  if report.runs:
    parts.heading(_RUNS)
    with parts.details(f'{len(report.runs)} folders'):
      add_runs(parts, report.runs)
  _add_made(parts, report)
  return parts


def answer(report: PaperReport) -> list[tuple[str, str]]:
  """The first sentences, for a terminal as well: (a group of runs, what it says to the claims)."""
  found = [(upper(group.name), ' '.join(group.answer)) for group in report.groups]
  # Those of fine-tuning, for one, or without a config that can be read.
  others = collections.Counter(run.status for run in report.runs.values())
  for group in report.groups:
    others -= collections.Counter(group.statuses)
  if others:
    found.append(('Other runs', ', '.join(f'{n} {status}' for status, n in others.items()) + '.'))
  if report.open_models:
    found.append(('Open models', report.open_models[0]))
  return found or [('Nothing has been run', f'begin with {_SWEEP}')]


def _add_sections(parts: Parts, report: PaperReport) -> None:
  """How many claims of each section of the paper have each verdict."""
  several, rows = len(report.groups) > 1, []
  for section, words in _SECTIONS.items():
    for group in report.groups:
      found = [verdict.verdict for claim in report.claims if claim.section == section
               for verdict in claim.verdicts if verdict.name == group.name]
      if found:
        rows.append([f'{section} {words}', *[group.name] * several, *map(found.count, PLURAL)])
  # Short, for the table to be as narrow as a phone.
  verdicts = [words.removeprefix('are ').replace('cannot be', 'not') for words in PLURAL.values()]
  if rows:
    parts.table(['section', *['runs'] * several, *verdicts], rows, (0, 1)[:1 + several])


def _add_contents(parts: Parts, report: PaperReport) -> None:
  short = lambda item: f'{item.number} {item.half}'.strip()
  papers = [table.paper for table in report.tables]
  chapters = {
      _TABLES: [link(short(table), table.name) for table in papers if table.number],
      _NUMBERS: [link(table.name, table.name) for table in papers if not table.number],
      _FIGURES: [link(short(of) + (f' ({of.paper})' if of.paper else ''), of.name)
                 for of in [figure.paper for figure in report.figures]]}
  parts.items([
      link(_CLAIMS, _CLAIMS),
      *(line(link(name, name), ': ', joined(links)) for name, links in chapters.items()),
      joined([link(words, words) for words, there in (
          (_EVENTS, report.events), (_SYNTHETIC, report.synthetic),
          (_RUNS, report.runs), (_MADE, True)) if there])])


def _add_group(parts: Parts, group: GroupSummary) -> None:
  """Which claims have which verdict, by their keys."""
  parts.heading(upper(group.name), 3)
  seeds = {key: f' (about {needed} seeds)' for key, needed in group.needed.items()}
  listed = lambda keys: ', '.join(key + seeds.get(key, '') for key in keys)
  # Many claims that cannot be judged share a reason.
  lines = [line(bold(upper(verdict)), ': ', '; '.join(
      f'{why} ({listed(keys)})' if why else listed(keys) for why, keys in of.items()), '.')
           for verdict, of in group.verdicts.items() if of]
  parts.items([*lines, *filter(None, [group.errors]), *group.warnings])


def _add_claim(parts: Parts, claim: Claim) -> None:
  parts.heading(claim.statement + claim.marks, 3)
  parts.paragraph(f'Section {claim.section}. Asked: {claim.criterion}')
  for verdict in claim.verdicts:
    parts.paragraph(line(bold(verdict.verdict), f' ({verdict.name}): {verdict.why}'))
    parts.items([part_words(part) for part in verdict.parts])


def part_words(part: Part) -> str:
  """'Sink_1 of default, at least 10 %: 29.79 [15.20, 44.38], n = 3 (34.25, 27.50, 27.62): holds'.

  A truth has no interval: how its seeds ended says it. * marks proxy scores, as in the tables. A
  seed in which no sink emerged counts as its last step, the least that it can be.
  """
  text = METRICS[part.metric].text
  interval = f' [{text(part.low)}, {text(part.high)}]' if part.low is not None else ''
  seeds = f' ({", ".join(map(text, part.values))})' if part.n > 1 else ''
  paper = f'; the paper {text(part.paper)}' if part.paper is not None else ''
  held = {True: 'so', False: 'not so', None: 'undecided'}[part.held]
  doubt = f', since {part.doubt}' if part.doubt else ''
  never = f'; no sink emerged in {", ".join(part.never)}' if part.never else ''
  return (f'{part.words}, asked {part.asked}: {text(part.mean)}{"*" * part.proxy}{interval}, '
          f'n = {part.n}{seeds}: {held}{doubt}{never}{paper}')


def _add_figure(parts: Parts, figure: Figure) -> None:
  parts.heading(figure.paper.name, 3)
  words = ' '.join(filter(None, [figure.paper.caption, figure.paper.note]))
  if figure.status != 'drawn':
    parts.paragraph(words)
    parts.paragraph(f'{upper(figure.status)}.')
  for picture in figure.pictures:
    missing = f'Without {", ".join(picture.missing)}.' if picture.missing else ''
    name = f'{upper(picture.name)}.' if picture.name else ''
    parts.picture(picture.file, picture.png or drawing.panels(picture),
                  ' '.join(filter(None, [name, words, picture.note, missing])))


def _add_events(parts: Parts, orders: Sequence[EventOrder]) -> None:
  parts.heading(_EVENTS)
  parts.paragraph(NOTE)
  for i, order in enumerate(orders):
    parts.heading(f'Events: {order.picture.name}', 3)
    parts.items([line(bold(of.trial), ': ', ' '.join(filter(None, (
        f'{upper(of.words)}.', of.order, ', '.join(of.runs))))) for of in order.trials])
    if i:  # the first one stands on the first screen
      _draw_events(parts, order)


def _draw_events(parts: Parts, order: EventOrder) -> None:
  picture = order.picture
  parts.picture(picture.file, drawing.panels(picture), f'{upper(picture.name)}. {CAPTION}')


def _add_made(parts: Parts, report: PaperReport) -> None:
  parts.heading(_MADE)
  parts.paragraph(f'Of {report.paper}: its claims, tables and figures, and what the runs say to '
                  'each.')
  parts.facts(report.provenance)
  parts.items(report.open_models[1:])
  for group in report.groups:
    settings = joined([code(f'{key} = {value}') for key, value in group.settings.items()])
    parts.paragraph(line(bold(upper(group.name)), ': ', settings))
  for name, rules in report.budgets.items():
    parts.heading(f'Budget {name}', 3)
    parts.items(rules)
  if report.other_runs:
    parts.paragraph(f'Not of the paper: {", ".join(report.other_runs)}.')
