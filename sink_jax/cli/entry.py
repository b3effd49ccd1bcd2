"""The one entry of every command.

`sink-jax COMMAND` and `python -m sink_jax COMMAND` call `main`; the older
`python -m sink_jax.COMMAND`, which launchers and stored results name, calls `start`. All three
have the same options, exit codes and treatment of signals.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from typing import NoReturn

from sink_jax.io.exit_code import exit_saved_until_training


def main() -> NoReturn:
  """Starts the command that the first argument names."""
  name = sys.argv[1] if len(sys.argv) > 1 else ''
  # The command sees its options alone, as under its older name; provenance reads sys.orig_argv.
  sys.argv = [f'{sys.argv[0]} {name}', *sys.argv[2:]]
  start(name)


def start(name: str) -> NoReturn:
  """Runs a command with the arguments in `sys.argv`, and ends the process with its exit code."""
  if name in ('train', 'sweep'):
    exit_saved_until_training()  # within milliseconds: the imports below and of jax take seconds
  from sink_jax.cli import command

  with contextlib.suppress(OSError):  # of a stderr without a file
    faulthandler.enable()  # a crash in compiled code says where it was
  command.run(name, sys.argv[1:])
