"""Makes a report of the kind that its runs and analyses ask for."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.analyses.registry import ANALYSES
from sink_jax.cli.options import Report
from sink_jax.cli.results import check_folder
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.paper import report as paper
from sink_jax.paper.analysed import read_analyses
from sink_jax.paper.baseline import baseline_report
from sink_jax.paper.tuning_page import tuning_report
from sink_jax.remedies.graft_page import graft_report
from sink_jax.remedies.page import leaderboard
from sink_jax.remedies.step_times import read_step_times
from sink_jax.report.comparison import as_text as comparison_text
from sink_jax.report.comparison import compare
from sink_jax.report.read_runs import find_runs, read_runs

# Reports that need nothing but the runs of one config file.
_PAGES = {'baseline': baseline_report, 'fine-tuning': tuning_report, 'graft': graft_report}


def main(options: Report) -> None:
  """Writes the report, and prints it with the names of its files."""
  check_folder(options.out)
  out = to_path(options.out)
  print(make_report(out, options.runs, options.analyses, options.kind, options.maps,
                    options.evaluation), '',
        *(out / name for name in ('index.html', 'report.md', 'report.json')), sep='\n')


def make_report(out: str | AnyPath, runs: str | AnyPath | None,
                analyses: Sequence[str] = (), kind: str | None = None,
                maps: bool | None = None, evaluation: str | None = None) -> str:
  """Writes a report of the paper, or a comparison of runs, and returns its text.

  It takes what `options.Report` has; `runs` is None where there are analyses alone.

  Raises:
    ValueError: neither runs nor analyses, a folder that holds none, analyses in a report of runs,
      or maps in another than a comparison.
    OSError: `out` cannot be written.
  """
  if not runs and not analyses:
    raise ValueError('name --runs=, a folder of runs, or --analyses=, what python -m '
                     'sink_jax.analyses wrote, or both.')
  if analyses and kind not in (None, 'paper'):
    raise ValueError('--analyses belongs to the report of the paper: leave it or '
                     f'--kind={kind} out.')
  analysed = read_analyses(analyses, {name: each.module for name, each in ANALYSES.items()})
  # Other reports name the command that makes their own runs.
  records = (read_runs if kind == 'runs' else find_runs)(runs) if runs else []
  if kind is None:
    of_paper = bool(analyses) or not records or any(map(paper.is_shown, records))
    kind = 'paper' if of_paper else 'runs'
  for option, value in (('maps', maps), ('evaluation', evaluation)):
    if value is not None and kind != 'runs':
      raise ValueError(f'--{option} is for a comparison of runs, --kind=runs, and this is a report '
                       f'--kind={kind}: leave it out.')
  if kind != 'runs':  # a comparison says it beside the numbers
    records = [run.trusted() for run in records]
  if kind == 'paper':
    return paper.as_text(paper.paper_report(records, out, analysed))
  if kind == 'runs':
    return comparison_text(compare(records, out, maps is not False,
                                   to_path(evaluation) if evaluation else None))
  if kind == 'leaderboard':
    assert runs  # without them there are analyses, and the report is of the paper
    return leaderboard(records, out, read_step_times(to_path(runs)))
  return _PAGES[kind](records, out)
