"""The one entry of every command.

`sink-jax COMMAND` and `python -m sink_jax COMMAND` call `main`; the older
`python -m sink_jax.COMMAND`, which launchers and stored results name, calls `start`. All three
have the same options, exit codes and treatment of signals.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from sink_jax.arguments import nearest

# In the order of a user's day. `python -m sink_jax.NAME` is the same command.
COMMANDS = {
    'train': 'trains one model',
    'sweep': 'trains every trial of a config file',
    'report': 'compares runs, or puts them beside the paper',
    'evaluate': 'probes a run or a published model for attention sinks',
    'analyses': 'carries out an analysis of the paper on models',
    'lm_eval': 'scores a model on tasks of lm-evaluation-harness',
    'generate': 'continues a text',
    'export': 'writes a run as a checkpoint that transformers loads',
    'plan': 'predicts the memory and the speed of a run on TPUs',
    'benchmark': 'times kernels and training steps on this machine',
    'data.build': 'tokenizes and packs a corpus ahead of a run',
    'data.build_tfds': 'prepares a corpus of TensorFlow Datasets without TensorFlow',
}
HELP = ('-h', '-?', '--help', '-help', '--helpshort', '--helpfull')
# The module of the command that this process is. It stays empty where another program, such as a
# test or a process that multiprocessing has spawned, imports the module of a command.
running = ''


def main() -> NoReturn:
  """Starts the command that the first argument names."""
  name = sys.argv[1] if len(sys.argv) > 1 else ''
  if name in ('', *HELP):
    width = max(map(len, COMMANDS))
    lines = [f'  {command:<{width}}  {line}' for command, line in COMMANDS.items()]
    print('usage: python -m sink_jax COMMAND [options]\n\n' + '\n'.join(lines)
          + '\n\npython -m sink_jax COMMAND --help lists the options of a command.')
    sys.exit(0 if name else 2)
  if name not in COMMANDS:
    close = nearest(name, COMMANDS)
    hint = f'did you mean {close}? ' if close else ''
    sys.exit(f'error: there is no command {name!r}: {hint}It is one of {", ".join(COMMANDS)}.')
  # The command sees its options alone, as under its older name; provenance reads sys.orig_argv.
  sys.argv = [f'{sys.argv[0]} {name}', *sys.argv[2:]]
  start(name)


def start(name: str) -> NoReturn:
  """Runs a command with the arguments in `sys.argv`, and ends the process with its exit code."""
  global running
  running = f'sink_jax.cli.{name.replace(".", "_")}'
  # This module imports nothing that takes long, so that what a command's module does first happens
  # within milliseconds: train and sweep take over signals before they import jax.
  sys.exit(importlib.import_module(running).start())
