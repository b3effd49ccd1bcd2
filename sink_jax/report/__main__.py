"""python -m sink_jax.report --runs=runs/quickstart --out=results/quickstart

Sets all runs below a folder side by side: index.html (self-contained), report.md,
report.json and pictures. Prints the table and what it says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from absl import app, flags

from sink_jax.report.comparison import as_text, compare
from sink_jax.train.loop import quiet_logs

_RUNS = flags.DEFINE_string('runs', None, 'Folder of runs, such as the --workdir of a sweep.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write to.')
_MAPS = flags.DEFINE_bool('maps', True, 'Load the checkpoints and draw attention maps.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected argument {argv[1]!r}; options are written --name=value.')
  quiet_logs()
  runs, out = os.path.expanduser(_RUNS.value), os.path.expanduser(_OUT.value)
  try:
    report = compare(runs, out, _MAPS.value)
  except (ValueError, OSError) as error:
    sys.exit('error: ' + ' '.join(str(error).split()))
  print(as_text(report))
  print('\n' + '\n'.join(str(Path(out) / name) for name in ('index.html', 'report.md', 'report.json')))


if __name__ == '__main__':
  flags.mark_flags_as_required(['runs', 'out'])
  app.run(main)
