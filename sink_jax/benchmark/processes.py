"""Commands of this package as processes with a time limit that are never left behind."""

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
  """A benchmark command that works in a folder, so that its options name none.

  log: where its output goes; None leaves it on the terminal.
  """
  root = str(Path(sink_jax.__file__).parents[1])
  paths = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
  with contextlib.nullcontext() if log is None else open(log, 'ab') as stream:
    return subprocess.Popen(
        [sys.executable, '-P', '-m', 'sink_jax.benchmark', *arguments], cwd=folder,
        env=os.environ | {'PYTHONPATH': paths} | environment, stdout=stream, stderr=stream,
        stdin=subprocess.DEVNULL, process_group=0)


def wait(processes: list[subprocess.Popen], files: list[Path], seconds: float,
         save: Callable[[], None]) -> list[int | None]:
  """Exit codes; what still runs when the time is up is asked to end, then made to.

  Every few seconds it calls `save`, and says how many rows the files hold, where there are
  several.
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
      if len(processes) > 1 and now == said:
        rows = sum(len(document.rows) for document in documents(files))
        print(f'  {rows} rows so far, at most {seconds - now + began:.0f} s left',
              file=sys.stderr, flush=True)
      time.sleep(0.1)
  return [process.returncode for process in processes]


def documents(files: list[Path]) -> list[Document]:
  """What the processes have written so far."""
  return [document_from_json(json.loads(file.read_text())) for file in files if file.exists()]


@contextlib.contextmanager
def _stopped_at_the_end(processes) -> Iterator[None]:
  """Ends what is still running, also when this process is told to end."""
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
