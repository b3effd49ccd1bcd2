"""Trains one model, and gives every end of a training its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from sink_jax.cli.command import memory_is_full
from sink_jax.cli.options import Train
from sink_jax.io import compile_cache
from sink_jax.io.exit_code import EXIT_SAVED, EXIT_UNSAVED, exit_saved_until_training
from sink_jax.pretrained.source import open_source
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import train
from sink_jax.train.multihost import fail, init_distributed
from sink_jax.train.outcome import Diverged, Interrupted
from sink_jax.train.stop_handler import Unsaved


def main(options: Train) -> None:
  """Trains; every way to end has its exit code."""
  with training_ends(options.workdir):
    init_distributed()
    exit_saved_until_training()  # again: the distributed runtime takes SIGTERM over
    compile_cache.enable()
    # A plain dict, since a run stores it as JSON and compares it when it is resumed.
    train(options.settings, options.workdir, open_source=open_source)


@contextlib.contextmanager
def training_ends(workdir: str | None) -> Iterator[None]:
  """Ends the process as the training in the block ends: every way has its exit code.

  workdir: the folder of the run, or of the sweep; None where nothing is trained.
  """
  try:
    yield
  except Unsaved as error:  # a KeyboardInterrupt, too
    print(error, file=sys.stderr, flush=True)
    os._exit(EXIT_UNSAVED)  # after three signals, without waiting for threads that save
  except (Interrupted, KeyboardInterrupt) as ended:  # Ctrl-C between the trials of a sweep
    print(str(ended) or 'Stopped and saved; the same command resumes.', file=sys.stderr)
    sys.exit(EXIT_SAVED)
  except (ValueError, Diverged) as error:  # all processes of a job have raised it
    fail(f'error: {error}')
  except CheckpointError as error:
    # One process alone may have met it, with its part of a checkpoint.
    fail(f'error: {error}', alone=True)
  except OSError as error:  # a full disk, a lost mount
    fail(f'error: {error}. Checkpoints that were complete are kept in {workdir}; once this is '
         'solved, the same command resumes.' if workdir else f'error: {error}', alone=True)
  except Exception as error:
    fail(f'error: {str(error)[:500]}. Where the memory of the device is full, these help: a '
         'smaller batch_size or more microbatches, model.remat=blocks, mesh.fsdp over several '
         'devices.' if memory_is_full(error) else traceback.format_exc(), alone=True)
