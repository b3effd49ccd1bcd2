"""Where, when and with what a result was made."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys

import jax


def here_and_now() -> dict[str, str]:
  """Date, hardware, jax and Python version of this process, and the command that started it."""
  return {
      'date': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
      'hardware': _hardware(),
      'jax': jax.__version__,
      'python': platform.python_version(),
      'command': shlex.join(['python', *(w for w in sys.orig_argv[1:] if w != '-P')]),
  }


def _hardware():
  kind, count = jax.devices()[0].device_kind, jax.device_count()
  if jax.default_backend() == 'cpu':
    return f'{kind}, {os.cpu_count()} cores'
  return f'{count} x {kind}'
