"""Trains every trial of a config file, each in its own folder of the workdir.

    python -m sink_jax sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke

A trial that is done or has diverged is skipped and an interrupted one continues; one that fails is
recorded and tried again next time, and the rest go on. WORKDIR/summary.md shows at any time how
far all of them are; --status prints the same.
"""

from __future__ import annotations

from sink_jax.io.exit_code import EXIT_SAVED, EXIT_UNSAVED, exit_saved_until_training

exit_saved_until_training()  # the imports below and in `main` take seconds

import os
import sys
import traceback

from sink_jax.cli import command
from sink_jax.sweep.options import Options as Options


def main(options: Options) -> None:
  """Runs the trials, or does what one of the other modes asks for."""
  from sink_jax.cli.run_sweep import run_sweep
  from sink_jax.sweep.pool import SweepStopped
  from sink_jax.train.multihost import fail
  from sink_jax.train.outcome import Interrupted
  from sink_jax.train.stop_handler import Unsaved

  command.quiet_logs()
  try:
    sys.exit(run_sweep(options))
  except Unsaved as error:
    print(error, file=sys.stderr, flush=True)
    # After three signals, without waiting for threads that save.
    os._exit(EXIT_UNSAVED)
  except (Interrupted, SweepStopped, KeyboardInterrupt):
    print('Stopped and saved; the same command resumes.', file=sys.stderr)
    sys.exit(EXIT_SAVED)
  except ValueError as error:
    # All processes of a job have raised it, since all have the same options.
    fail(f'error: {error}')
  except Exception:
    fail(traceback.format_exc(), alone=True)
