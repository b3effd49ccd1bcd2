"""Commands in the process of a test, which spares the seconds in which a process begins."""

import contextlib
import io
import signal
import sys

from sink_jax.cli import main
from sink_jax.io.process import stop_signals


def run_here(name, *words, text=''):
  """(exit code, stdout, stderr) of a command; not of a sweep, whose processes need the devices."""
  piped, handlers = sys.stdin, {number: signal.getsignal(number) for number in stop_signals()}
  sys.stdin = io.StringIO(text)
  try:
    with (contextlib.redirect_stdout(io.StringIO()) as out,
          contextlib.redirect_stderr(io.StringIO()) as err):
      try:
        main.run(name, words)
      except SystemExit as end:
        code = end.code
  finally:
    sys.stdin = piped
    for number, handler in handlers.items():  # training takes them over
      signal.signal(number, handler)
  # What `sys.exit` does with words.
  failed = isinstance(code, str)
  return 1 if failed else code or 0, out.getvalue(), err.getvalue() + (code if failed else '')
