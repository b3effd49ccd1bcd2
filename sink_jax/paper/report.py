"""The report of the whole paper: its content, and the files that it is written to."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from textwrap import fill
from typing import TypeVar

from sink_jax.io.paths import AnyPath, to_path
from sink_jax.paper import drawing, numbers, open_protocol, synthetic
from sink_jax.paper.all_claims import CLAIMS
from sink_jax.paper.analysed import Analysed
from sink_jax.paper.budgets import BUDGETS
from sink_jax.paper.claims import UNKNOWN, Claim, Verdict, judge, second_look
from sink_jax.paper.collect import Group, groups_of, is_of_the_paper, is_synthetic, synthetic_groups
from sink_jax.paper.curves import figure_data
from sink_jax.paper.events import event_orders
from sink_jax.paper.metrics import MeasuredRun
from sink_jax.paper.numbers import PaperFigure
from sink_jax.paper.open_models import figure_of
from sink_jax.paper.page import PaperReport, answer, page
from sink_jax.paper.pictures import Figure, Picture
from sink_jax.paper.spread import spread_of
from sink_jax.paper.summary import open_lines, summarize
from sink_jax.paper.tables import tables
from sink_jax.paper.tuning import COMMAND, is_fine_tuned
from sink_jax.paper.tuning_page import tuned_pictures
from sink_jax.report.jsontext import finite, mapped, rounded, to_json
from sink_jax.report.markup import upper
from sink_jax.report.records import RunRecord, made_by

T = TypeVar('T')
# An absolute path in a command or an error: all but its end is this machine's business.
_ROOT = r'(?:file://[\w.-]*)?(?:~[\w.-]*)?/'
_PART = r'(?:\\.|[^\s/\\\'"`=,;:<>()\[\]{}|])+'
_PATH = re.compile(rf'(?<![^\s\'"`=,;:<>()\[\]{{}}|]){_ROOT}(?:{_PART}/+)*({_PART})/?')
# In quotes a path may hold spaces.
_QUOTED = re.compile(rf'([\'"`])([\w.-]*=)?{_ROOT}(?:[^\'"`\n/]+/+)*([^\'"`\n/]+)/?\1')


def is_shown(run: RunRecord) -> bool:
  """Whether the report has a place for a run."""
  return is_of_the_paper(run) or is_synthetic(run) or is_fine_tuned(run)


def paper_report(runs: Sequence[RunRecord], out: str | AnyPath,
                 analysed: Analysed = Analysed()) -> PaperReport:
  """Writes index.html, report.md, report.json and PNGs about runs and analyses.

  Raises:
    OSError: `out` cannot be written.
  """
  analysed_by = sorted({f'{made["command"]} ({made["date"]}; {made["hardware"]}; {made["code"]})'
                        for made in analysed.files.values()})
  report = dataclasses.replace(build(runs, analysed), provenance=without_paths(
      ({'analysed by': analysed_by} if analysed_by else {}) | made_by(runs)))
  page(report).write(to_path(out), to_json(report))
  return report


def build(runs: Sequence[RunRecord], analysed: Analysed = Analysed()) -> PaperReport:
  """The content of a report.

  It is plain: its numbers are finite or None, and have six digits; no text in it names a
  path of this machine.
  """
  groups, tuned = groups_of(runs), groups_of(runs, is_fine_tuned)
  figures = [_figure(figure, groups, tuned, analysed) for figure in numbers.FIGURES]
  # The synthetic axis answers claims, but has no place in tables and figures: the paper has no such
  # runs.
  asked = [(_verdicts(group), group) for group in groups + synthetic_groups(runs)]
  looks = [second_look(*of) for of in asked]
  # A page without runs lists every claim all the same.
  nothing = Verdict(UNKNOWN, 'nothing has been run', 'nothing has been run', name='no runs')
  claims = [dataclasses.replace(claim, verdicts=[
      verdict for of, _ in asked for its, verdict in of if its is claim] or [nothing])
            for claim in CLAIMS]
  shown = tables(groups, analysed)
  report = PaperReport(
      title='The paper beside our runs',
      paper=numbers.TITLE,
      groups=[summarize(*of, look) for of, look in zip(asked, looks)],
      open_models=open_lines(shown, figures, analysed),
      undecided=[look for look in looks if look],
      claims=claims,
      tables=shown,
      figures=figures,
      events=event_orders(groups),
      synthetic=synthetic.section(runs),
      comparison=f'{numbers.CRITERION} {open_protocol.CRITERION}',
      budgets={name: list(budget.rules) for name, budget in BUDGETS.items()},
      runs={run.name: MeasuredRun.of(run) for run in runs},
      analyses=analysed.files,
      other_runs=[run.name for run in runs if not is_shown(run)],
  )
  # Last, so that pages and JSON show the same numbers and no text escapes.
  return rounded(finite(without_paths(report)))


def as_text(report: PaperReport) -> str:
  """What the first screen says, and what else a person has to know, for a terminal."""
  drawn = sum(bool(figure.pictures) for figure in report.figures)
  lines = [*(f'{name}: {words}' for name, words in answer(report)),
           *(f'{upper(group.name)}: {words}' for group in report.groups
             for words in group.warnings),
           *report.open_models[1:], f'{drawn} of {len(report.figures)} figures are drawn.']
  return '\n'.join(fill(line, 100, subsequent_indent='  ') for line in lines)


def without_paths(value: T) -> T:
  """The same with '.../NAME' in place of absolute paths, in every text."""
  # Quoted paths first: they may hold blanks, at which the other pattern would stop and leave the
  # rest.
  return mapped(value, lambda leaf: (
      _PATH.sub(r'.../\1', _QUOTED.sub(r'\1\2.../\3\1', leaf)) if isinstance(leaf, str) else leaf))


def _verdicts(group: Group) -> list[tuple[Claim, Verdict]]:
  """The claims that a group is asked, with its verdict on each."""
  spread = spread_of(group)
  # The synthetic axis has a part of the trials, and answers what it can answer.
  return [(claim, judge(claim, group, spread)) for claim in CLAIMS
          if group.protocol or set(claim.trials) <= set(group.trials)]


def _figure(figure: PaperFigure, groups: Sequence[Group], tuned: Sequence[Group],
            analysed: Analysed) -> Figure:
  """A figure of the paper with its pictures."""
  if figure.needs == 'open models':
    return figure_of(figure, analysed)
  if figure.kind == 'schematic':
    return Figure(figure, [], 'no data: a schematic')
  if figure.kind == 'mask':  # of the masks themselves, without any run
    mask = drawing.masks('prefix' if figure.number == '5' else 'window')
    return Figure(figure, [Picture(f'{figure.key}.png', png=mask)], 'drawn')
  if figure.needs == 'fine-tuning':
    pictures, missing = tuned_pictures(tuned), f'not run: {COMMAND} --workdir=runs/sft/paper'
  else:
    pictures = [picture for group in groups if (picture := figure_data(figure, group))]
    trials = [f'{trial} ({group.status(trial)})' for group in groups for trial in figure.trials
              if group.runs(trial)]
    missing = f'nothing to draw: {", ".join(trials)}' if trials else 'not run'
  return Figure(figure, pictures, 'drawn' if pictures else missing)
