"""Runs commands inside the process of a test: a new process takes seconds to start."""

import contextlib
import io
import signal
import sys

from sink_jax.cli import main
from sink_jax.io.process import stop_signals


def run_here(name, *words, piped=b''):
  """(exit code, stdout, stderr) of a command, with bytes that are piped in.

  Sweeps need --processes=1 here: other processes would need the devices of this one.
  """
  before, handlers = sys.stdin, {number: signal.getsignal(number) for number in stop_signals()}
  sys.stdin = io.TextIOWrapper(io.BytesIO(piped))
  try:
    with (
      contextlib.redirect_stdout(io.StringIO()) as out,
      contextlib.redirect_stderr(io.StringIO()) as err,
    ):
      try:
        main.run(name, words)
      except SystemExit as end:
        code = end.code
  finally:
    sys.stdin = before
    for number, handler in handlers.items():  # training replaces them
      signal.signal(number, handler)
  # `sys.exit` with a message prints it and returns 1.
  failed = isinstance(code, str)
  return 1 if failed else code or 0, out.getvalue(), err.getvalue() + (code if failed else '')
