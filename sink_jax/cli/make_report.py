"""Makes a report of the kind that its runs and analyses ask for."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.analyses.registry import ANALYSES
from sink_jax.benchmark.records import TrialRow, document_from_json
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.paper import report as paper
from sink_jax.paper.analysed import read_analyses
from sink_jax.paper.baseline_page import baseline_report
from sink_jax.paper.collect import is_of_the_paper, is_synthetic
from sink_jax.paper.tuning import is_fine_tuned
from sink_jax.paper.tuning_page import tuning_report
from sink_jax.remedies.graft_page import graft_report
from sink_jax.remedies.page import leaderboard
from sink_jax.remedies.step_times import COMMAND, FILE, StepTime, StepTimes
from sink_jax.report.comparison import as_text as comparison_text
from sink_jax.report.jsontext import from_json
from sink_jax.report.read_runs import find_runs
from sink_jax.report.write import compare

# Reports that need nothing but the runs of one config file.
_PAGES = {'baseline': baseline_report, 'fine-tuning': tuning_report, 'graft': graft_report}


def make_report(out: str | AnyPath, runs: str | AnyPath | None,
                analyses: Sequence[str] = (), kind: str | None = None,
                maps: bool | None = None) -> str:
  """Writes a report of the paper, or a comparison of runs, and returns its text.

  Args:
    out: the folder to write to.
    runs: a folder of runs; None where there are analyses alone.
    analyses: files, and folders of files, that analyses of published models wrote.
    kind: 'baseline' (the search of configs/baseline.py), 'fine-tuning' (configs/sft.py),
      'leaderboard' (the remedies of configs/remedies.py), 'graft' (configs/graft.py), 'paper' or
      'runs'; None for 'paper' where a run is one of its trials, there is no run, or there are
      analyses, and for 'runs' otherwise.
    maps: whether a comparison draws attention maps; it does by default.

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
  records = find_runs(runs) if runs else []
  if kind is None:
    of_paper = bool(analyses) or not records or any(
        is_of_the_paper(run) or is_synthetic(run) or is_fine_tuned(run) for run in records)
    kind = 'paper' if of_paper else 'runs'
  if maps is not None and kind != 'runs':
    raise ValueError('--maps is for a comparison of runs, --kind=runs, and this is a report '
                     f'--kind={kind}: leave it out.')
  if kind == 'paper':
    return paper.as_text(paper.paper_report(records, out, analysed))
  assert runs  # without them there are analyses, and the report is of the paper
  if kind == 'runs':
    return comparison_text(compare(runs, out, maps is not False))
  if kind == 'leaderboard':
    return leaderboard(records, out, _step_times(to_path(runs)))
  return _PAGES[kind](records, out)


def _step_times(folder: AnyPath) -> StepTimes:
  """What the benchmark has written beside the runs; empty without its file.

  Raises:
    ValueError: the file is none that it writes.
  """
  path = folder / FILE
  if not path.exists():
    return StepTimes()
  try:
    document = document_from_json(from_json(path.read_text()))
    machine = document.machine
    # Rows that failed, or for which there was no time, have no ratio.
    times = {(row.task, row.variant): StepTime(row.ratio, row.ratio_low, row.ratio_high, row.pairs)
             for row in document.rows_of(TrialRow) if row.ratio is not None
             and row.ratio_low is not None and row.ratio_high is not None and row.pairs is not None}
    return StepTimes(times, f'{machine["hardware"]}; jax {machine["jax"]}; '
                            f'{machine["date"].split("T")[0]}; {machine["code"]}')
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{path} cannot be read: {error}. Remove it, or measure again: '
                     f'{COMMAND}') from None
