"""Trains one model, and gives every end of a training its exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from sink_jax.arguments import check_least
from sink_jax.cli.main import memory_is_full
from sink_jax.io.terminal import say

if TYPE_CHECKING:
  from sink_jax.train.config import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Trains one model; the folder of a run that was stopped is resumed.

  python -m sink_jax train --config=configs/quickstart.py:text-softmax --workdir=runs/first

  --config.KEY=VALUE sets a key, such as --config.steps=100 or
  --config.attention.similarity="Sigmoid()".
  Exit codes: 0 done; 42 stopped and saved, the same command resumes; 1 an error that starting again
  does not remove; 175 a failure that may pass, such as a lost connection, and anything from 128 on:
  died; the same command resumes.
  """

  workdir: str  # folder of the run; a folder with the same config is resumed.
  config: str = ''  # FILE or FILE:TRIAL; by default configs/base.py.
  dry_run: bool = False  # check the config, without data, and stop.
  devices: int = 0  # with --dry_run: the devices that the job will have; 0: not known.
  remote: bool = False  # with --dry_run: other machines run the job and need its data.

  def __post_init__(self):
    check_least(self, devices=0)
    if self.remote and not self.dry_run:
      raise ValueError('--remote is for --dry_run.')
    if self.devices and not self.dry_run:
      raise ValueError(f'--devices={self.devices} is for --dry_run: a training takes all devices.')


def main(options: Options, experiment: Experiment) -> None:
  """Trains; every way to end has its exit code."""
  if options.dry_run:
    print(_checked(experiment, options))
    return
  from sink_jax.devices import keep_freed_memory, refuse_silent_cpu
  from sink_jax.io import compile_cache
  from sink_jax.io.process import exit_saved_until_training
  from sink_jax.train.loop import train
  from sink_jax.train.multihost import init_distributed, is_first
  from sink_jax.train.workdir import read_status

  with training_ends(options.workdir):
    init_distributed()
    refuse_silent_cpu()
    exit_saved_until_training()  # again: the distributed runtime takes SIGTERM over
    compile_cache.enable()
    keep_freed_memory()
    train(experiment, options.workdir)
    if is_first():
      status = read_status(options.workdir)
      numbers = {
        'valid': ('validation loss', '.3f'),
        'sink_1': ('Sink_1 %', '.1f'),
        'sink_bias_slot': ('Sink_* %', '.1f'),
      }
      shown = ''.join(
        f', {words} {status[key]:{form}}'
        for key, (words, form) in numbers.items()
        if isinstance(status.get(key), float)
      )
      say(f'done: step {status.get("step")}{shown}, in {options.workdir}')
      say(f'next: python -m sink_jax evaluate --workdir={options.workdir}')


def _checked(experiment: Experiment, options: Options) -> str:
  """Describes a job in a line; raises a ValueError if its config does not fit the machines."""
  devices = options.devices
  if devices and experiment.sizes_are_known:
    experiment.check_devices(devices)
  if options.remote:
    experiment.data.check_remote()
  return (
    f'{experiment.label.trial or "the config"}: {experiment.steps:,} steps of '
    f'{experiment.batch_size} sequences, devices: {devices or "not known"}'
  )


@contextlib.contextmanager
def training_ends(workdir: str | None) -> Iterator[None]:
  """Ends the process as the training in the block ends: every way has its exit code.

  workdir: the folder of the run, or of the sweep; None where nothing is trained.
  """
  from sink_jax.io.process import EXIT_SAVED, EXIT_UNSAVED
  from sink_jax.train.failures import passes
  from sink_jax.train.multihost import Interrupted, Unsaved, end_to_start_again

  try:
    yield
  except Unsaved as error:  # a KeyboardInterrupt, too
    print(error, file=sys.stderr, flush=True)
    os._exit(EXIT_UNSAVED)  # without waiting for threads that save
  except (Interrupted, KeyboardInterrupt) as ended:  # Ctrl-C between the trials of a sweep
    print(str(ended) or 'Stopped and saved; the same command resumes.', file=sys.stderr)
    sys.exit(EXIT_SAVED)
  except Exception as error:
    if passes(error):
      end_to_start_again(
        f'error: {str(error)[:500]}. It may pass: the same command goes on from the last '
        'checkpoint.'
      )
    _fail(error, workdir)


def _fail(error: Exception, workdir: str | None) -> NoReturn:
  """Ends the process with exit code 1 for an error that stays."""
  from sink_jax.train.checkpoint import CheckpointError
  from sink_jax.train.evaluation import Diverged
  from sink_jax.train.failures import Repeated
  from sink_jax.train.memory import REMEDY
  from sink_jax.train.multihost import fail

  # All processes of a job have raised it; after Repeated the next start is refused in all of them.
  if isinstance(error, (ValueError, Diverged, Repeated)):
    fail(f'error: {error}')
  if isinstance(error, CheckpointError):  # perhaps only one has met it, in its part of a checkpoint
    fail(f'error: {error}', alone=True)
  if isinstance(error, OSError):  # a full disk, a lost mount
    kept = (
      f'. Checkpoints that were complete are kept in {workdir}; once this is solved, the same '
      'command resumes.'
    )
    fail(f'error: {error}{kept if workdir else ""}', alone=True)
  if memory_is_full(error):
    said = f'error: {str(error)[:500]}. Where the memory of the device is full, these help: '
    fail(f'{said}{REMEDY}', alone=True)
  fail(''.join(traceback.format_exception(error)), alone=True)
