"""Pages with pictures, made from tables of runs: the paper's results, or any runs side by side."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from sink_jax.io.paths import AnyPath
from sink_jax.report import (
  claims,
  events,
  figures,
  grafts,
  paper,
  remedies,
  reproduction,
  results_figures,
  sections,
  side_by_side,
)
from sink_jax.report.markdown import joined
from sink_jax.report.files import write_files
from sink_jax.report.paper_claims import CLAIMS
from sink_jax.report.runs import Runs, table

Page = tuple[list[AnyPath], list[str]]  # files that were written, and the first sentences
_OF_PAPER = {'paper', 'synthetic', 'graft', 'sft', *remedies.TASKS}  # tasks
_SHOWN = {'paper', 'graft', 'grid', 'sft', *remedies.TASKS}  # by sections of their own


def write(
  runs: Runs,
  out: AnyPath,
  root: AnyPath | None = None,
  analyses: Sequence[AnyPath] = (),
  evaluation: AnyPath | None = None,
) -> Page:
  """Writes the results pages if a run has a task of the paper, else a page that compares the runs.

  Args:
    root: the folder of the runs' workdirs, whose checkpoints give the maps; None draws none.
    analyses: files that `python -m sink_jax analyses` wrote.
    evaluation: a folder that `evaluate` wrote.

  Raises:
    ValueError: an evaluation next to results or analyses.
  """
  of_paper = _OF_PAPER & set(runs.runs.task)
  if of_paper or analyses or runs.runs.empty and not evaluation:
    if evaluation:
      raise ValueError(
        f'--evaluation={evaluation} begins a page of runs: leave it out with results and analyses.'
      )
    return _results(runs, out, analyses)
  return side_by_side.write(runs, out, root, evaluation)


def _results(runs: Runs, out: AnyPath, analyses: Sequence[AnyPath]) -> Page:
  """Writes the pages of the paper's trials, remedies, grafts and fine-tuning; see `write`."""
  results = _prepared(runs, analyses)
  drawn = _drawn(runs, results)
  pictures = {key: f'{key}.png' for key, figure in drawn.items() if figure is not None}
  stored = (out / 'metrics.csv.gz').exists()
  first = _results_page(results, pictures, stored)
  pages = {'README.md': first}
  if results.tasks:
    pages['remedies.md'] = remedies.page(results.tasks, pictures)
  pages['reproduction.md'] = reproduction.page(results.full, out, analyses, pictures)
  return write_files(out, pages | figures.files_of(drawn)), _first_sentences(first)


class _Results(NamedTuple):
  """Tables and verdicts of which the sections and pictures of the results are made.

  full: of `runs.table`; shown: its runs of the paper's trials at the budget of most of them; timed:
  of `events.events`; beside, agreement: of `paper`.
  """

  full: pd.DataFrame
  shown: pd.DataFrame
  judged: sections.Judged
  beside: pd.DataFrame
  agreement: sections.Agreement
  timed: pd.DataFrame
  courses: grafts.Courses
  tasks: list[remedies.Task]

  def of_task(self, task: str) -> pd.DataFrame:
    return self.full[self.full.task == task]


def _prepared(runs: Runs, analyses: Sequence[AnyPath]) -> _Results:
  full = _with_usual_settings(table(runs))
  of_paper = full[full.task == 'paper']
  budget, protocol = _most_frequent(of_paper)
  shown = of_paper[of_paper.budget.eq(budget) & of_paper.protocol.eq(protocol)]
  measured = pd.concat([shown, paper.open_models(analyses)])
  beside = paper.beside(shown)
  return _Results(
    full,
    shown,
    judged=[(claim, claims.judge(claim, measured)) for claim in CLAIMS],
    beside=beside,
    agreement=paper.agreement(beside[beside.trial.isin(_different(shown))]),
    timed=events.events(runs, shown),
    courses=grafts.courses_of(runs, full[full.task == 'graft']),
    tasks=remedies.tasks_of(full[full.budget.isin([budget, ''])] if budget else full),
  )


def _drawn(runs: Runs, results: _Results) -> dict[str, Figure | None]:
  """{key: a picture of the results}; None of what was not run."""
  shown = results.shown
  drawn: dict[str, Figure | None] = {
    f'remedies-{task.key}': remedies.draw(task) for task in results.tasks
  }
  drawn['dynamics'] = results_figures.dynamics(runs, shown)
  drawn['events'] = figures.events(results.timed) if len(results.timed) else None
  drawn['scatter'] = results_figures.scatter(shown, results.beside, results.agreement)
  drawn['grafts'] = grafts.draw(runs, results.of_task('graft'), results.courses)
  for item in paper.FIGURES:
    drawn[item['key']] = results_figures.of_paper(item, runs, shown, results.of_task('sft'))
  return drawn


def _results_page(results: _Results, pictures: sections.Pictures, stored: bool) -> str:
  full, shown = results.full, results.shown
  begun = full[~full.status.isin(['not run', 'not expressible'])]
  return joined(
    [
      '# Results',
      sections.first_screen(shown, results.judged, results.agreement, pictures),
      sections.how_to_read(shown),
      sections.order_of_events(results.timed, pictures),
      sections.remedies(results.tasks, pictures),
      grafts.section(results.of_task('graft'), results.courses, pictures),
      sections.fine_tuning(results.of_task('sft'), pictures),
      sections.tables_of_the_paper(results.beside),
      sections.figures_of_the_paper(pictures),
      sections.all_claims(results.judged),
      sections.learning_rates(results.of_task('grid')),
      sections.other_runs(begun[~begun.task.isin(_SHOWN)]),
      sections.how_made(begun, stored),
    ]
  )


def _with_usual_settings(full: pd.DataFrame) -> pd.DataFrame:
  """The table with `same`, the settings without seeds, and a column `valid` that uses them.

  A run with other settings than most runs of its trial is not a seed of it.
  """
  seeds = r'"seed": \d+, |(, )?"seed": \d+|(?<=seed-)\d+'
  same = full.settings.fillna('').astype(str).str.replace(seeds, '', regex=True)
  trials = same.groupby([full[key] for key in ('task', 'trial', 'budget', 'protocol')])
  usual = trials.transform(lambda settings: settings.value_counts().index[0])
  differs = full.valid.eq('') & same.ne(usual)
  return full.assign(same=same, valid=full.valid.mask(differs, 'of other settings'))


def _most_frequent(of_paper: pd.DataFrame) -> tuple[str, str]:
  """The budget and the protocol that the pages show, those of most runs."""
  expressible = of_paper[of_paper.status != 'not expressible']
  counts = expressible[['budget', 'protocol']].value_counts()
  return counts.index[0] if len(counts) else ('', '')


def _different(shown: pd.DataFrame) -> pd.Series:
  """Trials, one of those that a budget makes the same experiment, such as fixed-1 and default."""
  first = shown.drop_duplicates('trial')
  return first.trial[first.same.eq('') | ~first.same.duplicated()]


def _first_sentences(page: str) -> list[str]:
  """The sentences with which the page of results begins, without Markdown."""
  begins = r'^\*\*(?:Run|Reproduced|Not reproduced|Open).*'
  lines = re.findall(begins, page, re.MULTILINE)
  return [line.replace('*', '').replace('\\', '') for line in lines]
