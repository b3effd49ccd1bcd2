"""Where, when and with what a result was made."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys

import jax


_COMMAND = 'SINK_JAX_COMMAND'  # of the process that started this one to help it


def command() -> str:
  """The command that a person gave to start this process, or the one that started it."""
  mine = shlex.join(['python', *(w for w in sys.orig_argv[1:] if w != '-P')])
  return os.environ.get(_COMMAND, mine)


def pass_on_command() -> None:
  """Makes processes that this one starts name its command as their own."""
  os.environ[_COMMAND] = command()


def now() -> dict[str, str]:
  """Date and command; asks no device."""
  return {'date': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
          'command': command()}


def here_and_now() -> dict[str, str]:
  """Date, hardware, jax and Python version of this process, and the command that started it."""
  return {
      **now(),
      'hardware': hardware(),
      'jax': jax.__version__,
      'python': platform.python_version(),
  }


def _cores():
  """That this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def hardware() -> str:
  """The devices of this process, in words."""
  kind, count = jax.devices()[0].device_kind, jax.device_count()
  if jax.default_backend() == 'cpu':
    cores = _cores()
    return f'{kind}, {cores} core{"s" if cores > 1 else ""}'
  return f'{count} x {kind}'
