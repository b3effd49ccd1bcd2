"""Makes pages of runs: the results next to the paper's, or any runs side by side."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sink_jax.cli.results import writable_folder

if TYPE_CHECKING:
  from sink_jax.io.paths import AnyPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Makes pages of runs.

      python -m sink_jax report --runs=runs/quickstart --out=quickstart
      python -m sink_jax report --runs=results --out=results

  Runs of the paper's experiments, of remedies, grafts or fine-tuning make the results pages
  README.md and remedies.md; other runs are compared on one page, report.md, and index.html, which
  holds its pictures.
  """

  runs: str | None = None  # folder of runs, or of metrics.csv.gz and runs.csv.gz.
  #: folders, and files NAME.json, that python -m sink_jax analyses wrote.
  analyses: tuple[str, ...] = ()
  out: str  # folder to write to.
  evaluation: str | None = None  # a folder that evaluate wrote, with which a page of runs begins.
  maps: bool = True  # on a page of runs: load the checkpoints and draw attention maps.


def main(options: Options) -> None:
  """Writes the pages, and prints their first sentences and the names of the files."""
  files, summary = make_report(
    options.out, options.runs, options.analyses, options.evaluation, options.maps
  )
  print(*summary, '', *files, sep='\n')


def make_report(
  out: str | AnyPath,
  runs: str | AnyPath | None,
  analyses: Sequence[str | AnyPath] = (),
  evaluation: str | AnyPath | None = None,
  maps: bool = True,
) -> tuple[list[AnyPath], list[str]]:
  """Writes the pages that these options ask for; returns their files and first sentences.

  Raises:
    ValueError: neither runs nor analyses, no such folder, or an option that does not fit.
    OSError: `out` cannot be written.
  """
  from sink_jax.io.paths import inside, to_path
  from sink_jax.report import pages
  from sink_jax.report.runs import read_runs
  from sink_jax.train.workdir import read_object

  if not runs and not analyses:
    raise ValueError('name --runs=, a folder of runs, --analyses=, or both.')
  found: list[AnyPath] = []
  for path in map(to_path, analyses):
    files = [path]
    if path.is_dir():
      files = [inside(path, file.name) for file in sorted(path.glob('*.json'))]
    if not (written := [file for file in files if 'analysis' in read_object(file)]):
      raise ValueError(f'--analyses={path} holds nothing that python -m sink_jax analyses wrote.')
    found += written
  with tempfile.TemporaryDirectory() as empty:
    read = read_runs(runs or empty)
  return pages.write(
    read,
    writable_folder(out),
    to_path(runs) if runs and maps else None,
    found,
    to_path(evaluation) if evaluation else None,
  )
