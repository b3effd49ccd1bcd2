"""Trains every trial of a config file, each in its own folder of the workdir.

    python -m sink_jax sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke

A trial that is done or has diverged is skipped and an interrupted one continues; one that fails is
recorded and tried again next time, and the rest go on. WORKDIR/summary.md shows at any time how
far all of them are; --status prints the same.
"""

from __future__ import annotations

from sink_jax.io.exit_code import exit_saved_until_training

exit_saved_until_training()  # the imports below and in `main` take seconds

from sink_jax.cli import command
from sink_jax.sweep.options import Options as Options


def main(options: Options) -> int:
  """Runs the trials, or does what one of the other modes asks for; returns the exit code."""
  from sink_jax.cli.run_sweep import run_sweep

  with command.training_ends(options.workdir):
    return run_sweep(options)
