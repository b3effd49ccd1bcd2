"""Commands in the process of a test, which spares the seconds in which a process begins."""

import contextlib
import io
import sys

from sink_jax.cli import command


def run_here(name, *words, text=''):
  """(exit code, stdout, stderr) of a command; not of train and sweep, which take over signals."""
  piped = sys.stdin
  sys.stdin = io.StringIO(text)
  try:
    with (contextlib.redirect_stdout(io.StringIO()) as out,
          contextlib.redirect_stderr(io.StringIO()) as err):
      try:
        command.run(name, words)
      except SystemExit as end:
        code = end.code
  finally:
    sys.stdin = piped
  # What `sys.exit` does with words.
  failed = isinstance(code, str)
  return 1 if failed else code or 0, out.getvalue(), err.getvalue() + (code if failed else '')
