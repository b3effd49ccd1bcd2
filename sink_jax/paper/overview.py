"""The first screen of the page: how many claims hold, and every claim in a line with a picture."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.paper.claims import FAILS, HOLDS, PLURAL, UNDECIDED, UNKNOWN
from sink_jax.paper.content import JudgedClaim, JudgedPart, PaperReport, Verdict
from sink_jax.paper.metrics import METRICS
from sink_jax.paper.strips import LEGEND, strip
from sink_jax.report import markup
from sink_jax.report.markup import text, upper

_CLASSES = {HOLDS: 'yes', FAILS: 'no', UNDECIDED: 'maybe', UNKNOWN: 'open'}


def overview(report: PaperReport) -> str:
  """Counts of the four outcomes for each group of runs, then the claims in plain words."""
  names = list(dict.fromkeys(
      verdict.name for claim in report.claims for verdict in claim.verdicts))
  counts = ''.join(_counts(report, name) for name in names)
  head = '<tr><th scope="col">claim</th>' + ''.join(
      f'<th scope="col" class="left">{text(name if len(names) > 1 else "verdict")}</th>'
      for name in names) + '</tr>'
  rows = [_row(claim, names) for claim in report.claims]
  return (f'<section id="overview"><h2>Every claim in a line</h2>{counts}'
          f'{markup.table(head, rows)}<p class="note">{text(LEGEND)} Of several numbers that a '
          'claim asks for, the one that decides it is drawn, or is the farthest from deciding it.'
          '</p></section>')


def chip(verdict: Verdict) -> str:
  """The verdict in its colour, with the seeds that would decide it."""
  more = f' <small>about {verdict.needed} seeds would decide</small>' if verdict.needed else ''
  return f'<span class="verdict {_CLASSES[verdict.verdict]}">{verdict.verdict}</span>{more}'


def deciding(parts: Sequence[JudgedPart]) -> JudgedPart | None:
  """The part that was decided against the claim; else an open one; else that with least room."""
  drawn = [part for part in parts if METRICS[part.metric].unit != 'truth']
  order = {False: 0, None: 1, True: 2}
  return min(drawn, key=lambda part: (order[part.held], _room(part)), default=None)


def _room(part: JudgedPart) -> float:
  """How far the mean lies beyond its level, in widths of the interval where there is one."""
  metric = METRICS[part.metric]
  gap = abs(metric.scaled(part.mean) - metric.scaled(part.level))
  if part.low is None or part.high is None:
    return gap
  return gap / ((metric.scaled(part.high) - metric.scaled(part.low)) or 1.0)


def _counts(report: PaperReport, name: str) -> str:
  found = [verdict.verdict for claim in report.claims for verdict in claim.verdicts
           if verdict.name == name]
  items = ''.join(f'<li><b>{found.count(verdict)}</b> '
                  f'<span class="verdict {_CLASSES[verdict]}">{words}</span></li>'
                  for verdict, words in PLURAL.items())
  return f'<p>{text(upper(name))}, {len(found)} claims:</p><ul class="counts">{items}</ul>'


def _row(claim: JudgedClaim, names: Sequence[str]) -> str:
  by_name = {verdict.name: verdict for verdict in claim.verdicts}
  cells = ''.join(f'<td class="left">{_cell(by_name.get(name))}</td>' for name in names)
  return (f'<th scope="row"><a href="#claim-{claim.key}">{text(claim.statement)}</a>'
          f'{claim.marks}</th>{cells}')


def _cell(verdict: Verdict | None) -> str:
  """'-' where a group of runs was not asked, as the synthetic axis is not asked everything."""
  if verdict is None:
    return '-'
  part = deciding(verdict.parts)
  return chip(verdict) + (f' {strip(part)}' if part else '')
