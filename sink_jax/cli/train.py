"""Trains one model; the folder of a run that was stopped is resumed.

    python -m sink_jax train --config=configs/quickstart.py:text-softmax --workdir=runs/first

Every key of the config can be set: --config.steps=100 --config.attention.similarity="Sigmoid()".
Exit codes: 0 done; 42 stopped and saved, the same command resumes; 1 an error that starting again
does not remove; anything from 128 on: died, the same command resumes.
"""

from __future__ import annotations

from sink_jax.io.exit_code import EXIT_SAVED, EXIT_UNSAVED, exit_saved_until_training

exit_saved_until_training()  # the imports below and in `main` take seconds

import dataclasses
import os
import sys
import traceback

from sink_jax.cli import command, parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(parser.ConfigOptions):
  """The options of a run."""

  config: str
  """Config file, such as configs/base.py or configs/quickstart.py:text-sigmoid."""
  workdir: str
  """Folder of the run. A folder with the same config is resumed."""


def main(options: Options) -> None:
  """Trains; every way to end has its exit code."""
  config = command.read_config(options.config, options)

  from sink_jax.io import compile_cache
  from sink_jax.pretrained.source import open_source
  from sink_jax.train.checkpoint import CheckpointError
  from sink_jax.train.loop import train
  from sink_jax.train.multihost import fail, init_distributed
  from sink_jax.train.outcome import Diverged, Interrupted
  from sink_jax.train.stop_handler import Unsaved

  command.quiet_logs()
  try:
    init_distributed()
    exit_saved_until_training()  # again: the distributed runtime takes SIGTERM over
    compile_cache.enable()
    # A plain dict, since a run stores it as JSON and compares it when it is resumed.
    train(config, options.workdir, open_source=open_source)
  except Interrupted as stop:
    print(stop, file=sys.stderr)
    sys.exit(EXIT_SAVED)
  except Unsaved as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(EXIT_UNSAVED)  # after three signals, without waiting for threads that save
  except (ValueError, Diverged) as error:  # all processes have raised it
    fail(f'error: {error}')
  except CheckpointError as error:
    # One process alone may have met it, with its part of a checkpoint.
    fail(f'error: {error}', alone=True)
  except OSError as error:  # a full disk, a lost mount
    fail(f'error: {error}. Checkpoints that were complete are kept in {options.workdir}; once '
         'this is solved, the same command resumes.', alone=True)
  except Exception:
    fail(traceback.format_exc(), alone=True)
