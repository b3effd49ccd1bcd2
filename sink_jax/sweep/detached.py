"""A process that outlives the one that started it, known by a file that it keeps locked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def start(command: list[str], lock: Path, log: Path, environment) -> subprocess.Popen | None:
  """Starts a command in a session of its own; None where one that holds the lock is alive.

  The process writes its number into the lock file before it becomes the command, and holds the
  lock until it ends.

  log: file to which its output is added. environment: the variables of the process.
  """
  with _locked(lock) as file:
    if file is None:
      return None
    file.truncate(0)
    with open(log, 'ab') as output:
      return subprocess.Popen(
          ['bash', '-c', f'echo $$ >&{file.fileno()} && exec "$@"', 'bash', *command],
          env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
          start_new_session=True, pass_fds=[file.fileno()])


def alive(lock: Path) -> bool:
  """Whether a process holds the lock."""
  with _locked(lock) as file:
    return file is None


def holder(lock: Path) -> int:
  """The number of the process that holds the lock.

  ValueError: the file names none, or one that does not have the file open, as Linux lists the
  open files of a process.
  """
  text = lock.read_text().strip()
  if not text.isdecimal():
    raise ValueError(f'{lock} does not name the process that holds it.')
  with contextlib.suppress(OSError):  # it has ended, or belongs to someone else
    for name in os.listdir(f'/proc/{text}/fd'):
      with contextlib.suppress(OSError):  # closed meanwhile, or a pipe
        if os.path.samefile(f'/proc/{text}/fd/{name}', lock):
          return int(text)
  raise ValueError(f'{lock} names process {text}, which does not hold it.')


def ask_to_end(lock: Path) -> None:
  """Sends SIGTERM to the process that holds the lock; ValueError as `holder` raises it."""
  with contextlib.suppress(ProcessLookupError):
    os.kill(holder(lock), signal.SIGTERM)


@contextlib.contextmanager
def _locked(lock) -> Iterator[IO | None]:
  """The file, locked; None where another process holds it."""
  with open(lock, 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      yield None
    else:
      yield file
