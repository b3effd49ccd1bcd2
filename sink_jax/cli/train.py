"""Trains one model; the folder of a run that was stopped is resumed.

    python -m sink_jax train --config=configs/quickstart.py:text-softmax --workdir=runs/first

Every key of the config can be set: --config.steps=100 --config.attention.similarity="Sigmoid()".
Exit codes: 0 done; 42 stopped and saved, the same command resumes; 1 an error that starting again
does not remove; anything from 128 on: died, the same command resumes.
"""

from __future__ import annotations

from sink_jax.io.exit_code import exit_saved_until_training

exit_saved_until_training()  # the imports below and in `main` take seconds

import dataclasses

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
  from sink_jax.train.loop import train
  from sink_jax.train.multihost import init_distributed

  with command.training_ends(options.workdir):
    init_distributed()
    exit_saved_until_training()  # again: the distributed runtime takes SIGTERM over
    compile_cache.enable()
    # A plain dict, since a run stores it as JSON and compares it when it is resumed.
    train(config, options.workdir, open_source=open_source)
