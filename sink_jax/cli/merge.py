"""Adds the rows of finished runs to a table of stored runs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Adds rows of finished runs to metrics.csv.gz and runs.csv.gz: a lost machine then loses little.

      python -m sink_jax merge --runs=runs/desk --into=results
      python -m sink_jax sweep --config=configs/paper.py --budget=desk --seeds=1,2,3 \\
        --done=results --workdir=runs/desk

  A run takes the place of a stored one of the same task, budget, protocol, trial and seed. The
  second command goes on with the trials that are not stored, on this machine or another.
  """

  runs: str  # folder of runs.
  into: str  # folder of metrics.csv.gz and runs.csv.gz.


def main(options: Options) -> None:
  """Merges, and prints how many runs there are."""
  from sink_jax.io.paths import to_path
  from sink_jax.report.runs import merged, no_runs, read_runs, write_runs

  new, folder = read_runs(options.runs), to_path(options.into)
  stored = read_runs(folder) if folder.is_dir() else no_runs()
  both = merged(stored, new, to_path(options.runs).name)
  write_runs(both, folder)
  print(f'{len(both.runs)} runs in {folder}, {len(both.runs) - len(stored.runs)} more than before.')
