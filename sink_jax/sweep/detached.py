"""A process that outlives the one that started it, known by a file that it keeps locked.

A number in a file may be that of a dead process, or of another that has got the number since. A
lock is not: the kernel holds it for the open file that the process inherits, and releases it when
the process ends, however it ends. So the lock says whether the process lives, and the number in
the file is only believed of a process that has the file open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO


def start(command: list[str], lock: Path, log: Path,
          environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
  """Starts a command in a session of its own, unless a process that holds the lock is alive.

  Args:
    command: the program and its arguments.
    lock: the file that the process locks until it ends. It writes its number into the file before
      it becomes the command.
    log: the file to which its output is appended.
    environment: all variables of the process.

  Returns:
    The process; None where one is alive already.
  """
  with _locked(lock) as file:
    if file is None:
      return None
    # The lock is free, so the number that is there belongs to a process that has ended.
    file.truncate(0)
    with open(log, 'ab') as output:
      # bash becomes the command by `exec`, so number and lock are those of the command itself. In a
      # session of its own it gets no signal that is meant for the terminal of this process.
      return subprocess.Popen(
          ['bash', '-c', f'echo $$ >&{file.fileno()} && exec "$@"', 'bash', *command],
          env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
          start_new_session=True, pass_fds=[file.fileno()])


def is_alive(lock: Path) -> bool:
  """Says whether a process holds the lock."""
  with _locked(lock) as file:
    return file is None


def holder_pid(lock: Path) -> int:
  """Returns the number of the process that holds the lock.

  Raises:
    ValueError: the file names no process, or one that does not have the file open, by the list of
      open files in /proc.
  """
  text = lock.read_text().strip()
  if not text.isdecimal():
    raise ValueError(f'{lock} does not name the process that holds it.')
  with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
    for name in os.listdir(f'/proc/{text}/fd'):
      with contextlib.suppress(OSError):  # it was closed meanwhile, or is a pipe
        if os.path.samefile(f'/proc/{text}/fd/{name}', lock):
          return int(text)
  raise ValueError(f'{lock} names process {text}, which does not hold it.')


def ask_to_end(lock: Path) -> None:
  """Sends SIGTERM to the process that holds the lock.

  Raises:
    ValueError: as `holder_pid`.
  """
  with contextlib.suppress(ProcessLookupError):
    os.kill(holder_pid(lock), signal.SIGTERM)


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[IO[str] | None]:
  """Opens the file and locks it; yields None where another process holds the lock."""
  # 'a' creates a missing file, and unlike 'w' leaves the number that the holder of the lock has
  # written.
  with open(lock, 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      yield None
    else:
      yield file
