"""Makes a report of the kind that its runs and analyses ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from sink_jax.cli.results import writable_folder

if TYPE_CHECKING:
  from sink_jax.io.paths import AnyPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Compares runs, or puts them next to the paper.

      python -m sink_jax report --runs=runs --analyses=analyses --out=paper

  Runs of the paper's trials, and what `python -m sink_jax analyses` wrote about published models,
  give the claims, tables and figures of the paper next to these numbers. Other runs are compared
  side by side. Writes index.html (self-contained), report.md, report.json and pictures.
  """

  runs: str | None = None  # folder of runs, such as the --workdir of a sweep.
  #: folders, and files NAME.json, that python -m sink_jax analyses wrote.
  analyses: tuple[str, ...] = ()
  out: str  # folder to write to.
  #: in a comparison: a folder that python -m sink_jax evaluate wrote, with which the page begins.
  evaluation: str | None = None
  #: in a comparison: load the checkpoints and draw maps; it does by default.
  maps: bool | None = None
  #: runs compares any runs; the others are about the paper and configs/baseline.py, sft.py
  #: (Figure 30), remedies.py and graft.py. By default paper where a run is one of its trials, there
  #: is no run yet, or --analyses is given, else runs.
  kind: Literal['paper', 'runs', 'baseline', 'fine-tuning', 'leaderboard', 'graft'] | None = None


def main(options: Options) -> None:
  """Writes the report, and prints it with the names of its files."""
  out = writable_folder(options.out)
  print(make_report(out, options.runs, options.analyses, options.kind, options.maps,
                    options.evaluation), '',
        *(out / name for name in ('index.html', 'report.md', 'report.json')), sep='\n')


def make_report(out: str | AnyPath, runs: str | AnyPath | None, analyses: Sequence[str] = (),
                kind: str | None = None, maps: bool | None = None,
                evaluation: str | None = None) -> str:
  """Writes the report that these options ask for, and returns its text.

  Raises:
    ValueError: neither runs nor analyses, a folder that holds none, or options that do not fit.
    OSError: `out` cannot be written.
  """
  from sink_jax.analyses.registry import ANALYSES
  from sink_jax.io.paths import to_path
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

  if not runs and not analyses:
    raise ValueError('name --runs=, a folder of runs, --analyses=, or both.')
  if analyses and kind not in (None, 'paper'):
    raise ValueError(f'--analyses belongs to the report of the paper: leave out --kind={kind}.')
  analysed = read_analyses(analyses, {name: each.module for name, each in ANALYSES.items()})
  # Other reports name the command that makes their own runs.
  records = (read_runs if kind == 'runs' else find_runs)(runs) if runs else []
  if kind is None:
    of_paper = bool(analyses) or not records or any(map(paper.is_shown, records))
    kind = 'paper' if of_paper else 'runs'
  for option, value in (('maps', maps), ('evaluation', evaluation)):
    if value is not None and kind != 'runs':
      raise ValueError(f'--{option} is for --kind=runs, and this is --kind={kind}: leave it out.')
  if kind == 'paper':
    return paper.as_text(paper.paper_report(records, out, analysed))
  if kind == 'runs':
    return comparison_text(compare(records, out, maps is not False,
                                   to_path(evaluation) if evaluation else None))
  if kind == 'leaderboard':
    assert runs  # without them there are analyses, and the report is of the paper
    return leaderboard(records, out, read_step_times(to_path(runs)))
  pages = {'baseline': baseline_report, 'fine-tuning': tuning_report, 'graft': graft_report}
  return pages[kind](records, out)
