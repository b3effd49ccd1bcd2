"""The one entry of every command.

`sink-jax COMMAND` and `python -m sink_jax COMMAND` call `main`; the older
`python -m sink_jax.COMMAND`, which launchers and stored results name, calls `start`. All three
have the same options, exit codes and treatment of signals.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import sys
from typing import NoReturn

# In the order of a user's day. `python -m sink_jax.NAME` is the same command.
COMMANDS = {
    'train': 'trains one model',
    'evaluate': 'probes a run or a published model for attention sinks',
    'generate': 'continues a text',
    'sweep': 'trains every trial of a config file',
    'report': 'compares runs, or puts them beside the paper',
    'analyses': 'carries out an analysis of the paper on models',
    'lm_eval': 'scores a model on tasks of lm-evaluation-harness',
    'export': 'writes a run as a checkpoint that transformers loads',
    'plan': 'predicts the memory and the speed of a run on TPUs',
    'benchmark': 'times kernels and training steps on this machine',
    'data.build': 'tokenizes and packs a corpus ahead of a run',
    'data.build_tfds': 'prepares a corpus of TensorFlow Datasets without TensorFlow',
}


def main() -> NoReturn:
  """Starts the command that the first argument names."""
  name = sys.argv[1] if len(sys.argv) > 1 else ''
  if name not in COMMANDS:
    from sink_jax.cli import command, parser

    try:
      parser.chosen(sys.argv[1:], 'python -m sink_jax', COMMANDS)
    except ValueError as error:
      command.stop(error)
  # The command sees its options alone, as under its older name; provenance reads sys.orig_argv.
  sys.argv = [f'{sys.argv[0]} {name}', *sys.argv[2:]]
  start(name)


def start(name: str) -> NoReturn:
  """Runs a command with the arguments in `sys.argv`, and ends the process with its exit code."""
  # Neither this module nor a command's imports what takes long, and the command's comes first:
  # train and sweep take over signals within milliseconds.
  module = importlib.import_module(f'sink_jax.cli.{name.replace(".", "_")}')
  from sink_jax.cli import command

  with contextlib.suppress(OSError):  # of a stderr without a file
    faulthandler.enable()  # a crash in compiled code says where it was
  command.run(module, sys.argv[1:], name)
