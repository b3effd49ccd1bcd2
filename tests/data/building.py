"""`python -m sink_jax data.build` in the process of a test, which keeps its own signals."""

import signal

import pytest

from sink_jax.cli import command


def build(*words):
  """Runs the command; returns None, or the error that it ends with."""
  kept = signal.getsignal(signal.SIGTERM)
  try:
    with pytest.raises(SystemExit) as end:
      command.run('data.build', words)
  finally:
    signal.signal(signal.SIGTERM, kept)
  return end.value.code
