"""python -m sink_jax.report --runs=runs/quickstart --out=results/quickstart

Of runs of the paper's trials, a report of the whole paper: its claims, tables and figures
beside our numbers. Of other runs, a comparison of all below the folder, side by side. Either
writes index.html (self-contained), report.md, report.json and pictures, and prints what it
says.
"""

from __future__ import annotations

import sys

from absl import app, flags

from sink_jax.report import comparison
from sink_jax.report.paper import report as paper
from sink_jax.report.paper.collect import is_of_the_paper, is_synthetic
from sink_jax.report.runs import find_runs
from sink_jax.train.loop import quiet_logs
from sink_jax.train.storage import folder

_RUNS = flags.DEFINE_string('runs', None, 'Folder of runs, such as the --workdir of a sweep.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write to.')
_MAPS = flags.DEFINE_bool('maps', True, 'In a comparison: load the checkpoints and draw maps.')
_KIND = flags.DEFINE_enum(
    'kind', None, ['paper', 'runs'], 'A report of the paper, or a comparison of runs. By default '
    'that of the paper where a run is one of its trials at a budget or of the synthetic axis, or '
    'there is no run yet.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected argument {argv[1]!r}; options are written --name=value.')
  quiet_logs()
  try:
    runs, out = folder(_RUNS.value), folder(_OUT.value)
    print(_report(runs, out))
  except (ValueError, OSError) as error:
    sys.exit('error: ' + ' '.join(str(error).split()))
  files = ('index.html', 'report.md', 'report.json')
  print('\n' + '\n'.join(str(out / name) for name in files))


def _report(runs, out):
  """Writes the report and returns its text."""
  found = find_runs(runs)
  of_paper = not found or any(is_of_the_paper(run) or is_synthetic(run) for run in found)
  kind = _KIND.value or ('paper' if of_paper else 'runs')
  if kind == 'paper':
    return paper.as_text(paper.paper_report(found, out))
  return comparison.as_text(comparison.compare(runs, out, _MAPS.value))


if __name__ == '__main__':
  flags.mark_flags_as_required(['runs', 'out'])
  app.run(main)
