"""Where, when and with what a result was made."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import jax

import sink_jax
from sink_jax.devices import cores

_COMMAND = 'SINK_JAX_COMMAND'  # of the process that started this one as a worker


def command() -> str:
  """The command that a person gave to start this process, or the one that started it."""
  words = ['python', *(word for word in sys.orig_argv[1:] if word != '-P')]
  if len(words) > 1 and Path(words[1]).name == 'sink-jax':  # the console script, which python runs
    words[:2] = ['sink-jax']
  return os.environ.get(_COMMAND, shlex.join(words))


def pass_on_command() -> None:
  """Makes the processes that this one starts record its command, which a person gave."""
  os.environ[_COMMAND] = command()


@functools.cache
def code() -> str:
  """The source code that runs: 'commit 1f3a...', '-dirty' with changes, or 'sink_jax 0.1.0'.

  An archive that git made has its commit in sink_jax/train/commit.txt.
  """
  package = Path(sink_jax.__file__).parent
  if (package.parent / '.git').exists():
    try:
      # Without optional locks, which could block a commit that a person makes.
      found = subprocess.run(
        [
          'git',
          '--no-optional-locks',
          '-C',
          package.parent,
          'describe',
          '--always',
          '--dirty',
          '--abbrev=40',
          '--exclude=*',
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
      )
      return f'commit {found.stdout.strip()}'
    except (OSError, subprocess.SubprocessError):
      pass
  archived = (package / 'train' / 'commit.txt').read_text().strip()
  return f'sink_jax {sink_jax.__version__}' if '$' in archived else f'commit {archived}'


def provenance(devices: bool = True) -> dict[str, str]:
  """The date, the command and the source code of this process, and what it runs on.

  devices: with the hardware and the versions of jax and Python; a process that only starts others
  must not ask for a device, which it would occupy.
  """
  made = {
    'date': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
    'command': command(),
    'code': code(),
  }
  return (
    made
    if not devices
    else made
    | {'hardware': hardware(), 'jax': jax.__version__, 'python': platform.python_version()}
  )


def hardware() -> str:
  """The devices of this process, in words."""
  kind = jax.devices()[0].device_kind
  if jax.default_backend() == 'cpu':
    return f'{kind}, {cores()} core{"s" if cores() > 1 else ""}'
  return f'{jax.device_count()} x {kind}'
