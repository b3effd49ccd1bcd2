"""Where, when and with what a result was made."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Mapping

import jax


def here_and_now() -> dict[str, str]:
  """Date, hardware, jax and Python version of this process."""
  return {
      'date': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
      'hardware': _hardware(),
      'jax': jax.__version__,
      'python': platform.python_version(),
  }


def provenance(command: str) -> dict[str, str]:
  """The same, and the command that repeats what was made."""
  return {**here_and_now(), 'command': command}


def command(module: str, options: Mapping[str, object]) -> str:
  """'python -m MODULE --name=value ...', ready to be pasted into a shell."""
  words = [f'--{name}={value}' for name, value in options.items() if value is not None]
  return shlex.join(['python', '-m', module, *words])


def _hardware():
  kind, count = jax.devices()[0].device_kind, jax.device_count()
  if jax.default_backend() == 'cpu':
    return f'{kind}, {os.cpu_count()} cores'
  return f'{count} x {kind}'
