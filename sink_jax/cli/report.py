"""python -m sink_jax.report --runs=runs --analyses=analyses --out=paper

Runs of the paper's trials, and what `python -m sink_jax.analyses` wrote about published models,
give a report of the whole paper: its claims, tables and figures beside the numbers of the runs.
Other runs give a comparison of all below the folder, side by side. Either writes index.html
(self-contained), report.md, report.json and pictures, and prints its text.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from sink_jax.cli import command

_RUNS = flags.DEFINE_string('runs', None, 'Folder of runs, such as the --workdir of a sweep.')
_ANALYSES = flags.DEFINE_list(
    'analyses', [], 'Folders, and files NAME.json, that python -m sink_jax.analyses wrote, '
    "separated by commas: for the paper's rows and figures of open models.")
_OUT = flags.DEFINE_string('out', None, 'Folder to write to.')
_MAPS = flags.DEFINE_bool(
    'maps', None, 'In a comparison: load the checkpoints and draw maps. Default: yes.')
_KIND = flags.DEFINE_enum(
    'kind', None, ['paper', 'runs', 'baseline', 'fine-tuning', 'leaderboard', 'graft'],
    'A report of the paper, a comparison of runs, what the search of configs/baseline.py found, the '
    'fine-tuning of configs/sft.py (Figure 30), the remedies of configs/remedies.py beside '
    'softmax, or the grafts of configs/graft.py beside training on and from scratch. By default '
    'that of the paper where a run is one of its trials at a budget or of the synthetic axis, '
    'there is no run yet, or --analyses is given.')

command.answer_help(__name__)  # the imports below take seconds

from sink_jax.cli.make_report import make_report
from sink_jax.io.paths import to_path
from sink_jax.train.loop import quiet_logs


def main(argv: Sequence[str]) -> None:
  """Writes the report, and prints it with the names of its files."""
  quiet_logs()
  try:
    command.no_arguments(argv)
    assert _OUT.value is not None  # absl requires the option
    out = to_path(_OUT.value)
    runs = to_path(_RUNS.value) if _RUNS.value else None
    print(make_report(out, runs, _ANALYSES.value or [], _KIND.value, _MAPS.value))
  except (ValueError, OSError) as error:
    command.stop(error)
  files = ('index.html', 'report.md', 'report.json')
  print('\n' + '\n'.join(str(out / name) for name in files))


def start() -> None:
  flags.mark_flags_as_required(['out'])
  command.run(main)
