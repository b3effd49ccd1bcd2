"""`python -m sink_jax data.build` in the process of a test, which keeps its own signals."""

import types

import pytest

from sink_jax.cli import command, data_build

_COMMAND = types.SimpleNamespace(Options=data_build.Options, main=data_build.build, __doc__='')


def build(*words):
  """Runs the command; returns None, or the error that it ends with."""
  with pytest.raises(SystemExit) as end:
    command.run(_COMMAND, words, 'data.build')
  return end.value.code
