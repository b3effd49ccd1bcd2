"""Benchmarks as processes with a time limit that are never left behind.

Every part of a check is a process of its own, for three reasons. A kernel that hangs or crashes
takes its process with it and nothing else, and a process can be stopped in time where a call into
a compiler cannot. JAX and PyTorch keep the memory of the device that they once had, so that one
in the same process would leave too little for the next. And compiling uses a core: several
processes fill the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import sink_jax
from sink_jax.benchmark.records import Document, document_from_json

_SAY_EVERY = 10  # seconds


def start(arguments: list[str], folder: Path, log: Path | None,
          **environment: str) -> subprocess.Popen:
  """Starts a benchmark command in a folder, so that the options it records name no folder.

  Args:
    log: the file that its output is appended to; None leaves it on the terminal.
    environment: variables beside those of this process.
  """
  # The working folder is not the checkout, so the package has to be found by its path.
  root = str(Path(sink_jax.__file__).parents[1])
  paths = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
  with contextlib.nullcontext() if log is None else open(log, 'ab') as stream:
    return subprocess.Popen(
        # -P: nothing in the working folder can take the place of a module.
        [sys.executable, '-P', '-m', 'sink_jax.benchmark', *arguments], cwd=folder,
        env=os.environ | {'PYTHONPATH': paths} | environment, stdout=stream, stderr=stream,
        # A group of its own: stopping it also stops the compilers that it has started.
        stdin=subprocess.DEVNULL, process_group=0)


def wait(processes: list[subprocess.Popen], files: list[Path], seconds: float,
         save: Callable[[], None]) -> list[int | None]:
  """Waits for processes and returns their exit codes.

  A process that still runs when the time is up gets SIGTERM, and after a few seconds SIGKILL.
  Every few seconds `save` is called, and where there are several files, the number of rows in
  them is printed.

  Args:
    files: the documents that the processes write, which need not exist yet.
    seconds: that they may take.
  """
  began = said = time.monotonic()
  with _stopped_at_the_end(processes):
    while any(process.poll() is None for process in processes):
      now = time.monotonic()
      if now - began > seconds:
        break
      if now - said > _SAY_EVERY:
        said = now
        save()
      # A single process prints its own progress; several write to a log.
      if len(processes) > 1 and now == said:
        rows = sum(len(document.rows) for document in documents(files))
        print(f'  {rows} rows so far, at most {seconds - now + began:.0f} s left',
              file=sys.stderr, flush=True)
      time.sleep(0.1)
  return [process.returncode for process in processes]


def documents(files: list[Path]) -> list[Document]:
  """The documents that the processes have written so far."""
  return [document_from_json(json.loads(file.read_text())) for file in files if file.exists()]


@contextlib.contextmanager
def _stopped_at_the_end(processes: list[subprocess.Popen]) -> Iterator[None]:
  """Ends the processes that still run when the block is left, also by a SIGTERM."""
  # sys.exit raises, so a SIGTERM leaves the block by `finally` and takes the processes along.
  before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  try:
    yield
  finally:
    for stop in (signal.SIGTERM, signal.SIGKILL):
      for process in processes:
        if process.poll() is None:
          with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.killpg(process.pid, stop)
      deadline = time.monotonic() + 3
      for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(max(0.05, deadline - time.monotonic()))
    signal.signal(signal.SIGTERM, before)
