"""Compares runs, or puts them beside the paper.

    python -m sink_jax report --runs=runs --analyses=analyses --out=paper

Runs of the paper's trials, and what `python -m sink_jax analyses` wrote about published models,
give a report of the whole paper: its claims, tables and figures beside the numbers of the runs.
Other runs give a comparison of all below the folder, side by side. Either writes index.html
(self-contained), report.md, report.json and pictures, and prints its text.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from sink_jax.cli import parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(parser.CommandOptions):
  """The options of a report.

  Attributes:
    runs: folder of runs, such as the --workdir of a sweep.
    analyses: folders, and files NAME.json, that python -m sink_jax analyses wrote: for the paper's
      rows and figures of open models.
    out: folder to write to.
    maps: in a comparison: load the checkpoints and draw maps; it does by default.
    kind: a report of the paper, a comparison of runs, what the search of configs/baseline.py found,
      the fine-tuning of configs/sft.py (Figure 30), the remedies of configs/remedies.py beside
      softmax, or the grafts of configs/graft.py beside training on and from scratch. By default
      that of the paper where a run is one of its trials at a budget or of the synthetic axis, there
      is no run yet, or --analyses is given.
  """

  runs: str | None = None
  analyses: tuple[str, ...] = ()
  out: str
  maps: bool | None = None
  kind: Literal['paper', 'runs', 'baseline', 'fine-tuning', 'leaderboard', 'graft'] | None = None


def main(options: Options) -> None:
  """Writes the report, and prints it with the names of its files."""
  from sink_jax.cli.make_report import make_report
  from sink_jax.io.paths import to_path

  out = to_path(options.out)
  print(make_report(out, options.runs, options.analyses, options.kind, options.maps), '',
        *(out / name for name in ('index.html', 'report.md', 'report.json')), sep='\n')
