"""Metrics on disk: one JSON line per event, and TensorBoard."""

from __future__ import annotations

import io
import json
import math
import os
import time

from sink_jax.train.distributed import is_first
from sink_jax.train.storage import folder, is_local, write_atomically
from sink_jax.train.tensorboard import Board

_LONGEST = 1 << 20  # bytes of a line; what is longer is none of ours
_SECONDS_BETWEEN_WRITES = 30  # to an object store, which cannot append


class MetricsWriter:
  """Writes `metrics.jsonl` and TensorBoard events of a workdir, in the first process.

  Lines look like {"kind": "train", "step": 100, "loss": 2.1, ...}; kinds are 'train',
  'valid' and 'probe'. Opened at a step, it first drops lines beyond it, so that a
  resumed run leaves the same file as one that was never interrupted. In an object store
  the file is written anew twice a minute, and TensorBoard's at each `flush`.
  """

  def __init__(self, workdir, step: int = 0):
    self._file = self._board = None
    if not is_first():
      return
    workdir = folder(workdir)
    kept = [row for row in read_metrics(workdir) if row['step'] <= step] if step else []
    kept = [json.dumps(row) + '\n' for row in kept]
    self._path = workdir / 'metrics.jsonl'
    write_atomically(self._path, ''.join(kept))
    if is_local(workdir):
      self._file = open(self._path, 'a', buffering=1)
    else:
      self._file = _Rewritten(self._path, kept)
    self._board = Board(workdir / 'tensorboard', step)

  def write(self, kind: str, step: int, values: dict) -> None:
    """Appends one event; values are numbers, strings, or lists of numbers."""
    if self._file is None:
      return
    self._file.write(json.dumps({'kind': kind, 'step': step, **values}) + '\n')
    for name, value in values.items():
      if isinstance(value, (int, float)) and math.isfinite(value):
        self._board.write(f'{kind}/{name}', value, step)

  def flush(self) -> None:
    """Puts everything so far where a lost machine does not take it along."""
    if self._file is not None:
      self._file.flush()
      if is_local(self._path):
        os.fsync(self._file.fileno())
      self._board.flush()

  def abandon(self) -> None:
    """Writes nothing more: the file is another job's by now."""
    self._file = self._board = None

  def close(self) -> None:
    if self._file is not None:
      self.flush()
      self._file.close()
      self._board.close()


class _Rewritten:
  """A text file that is written as a whole each time."""

  def __init__(self, path, lines):
    self._path, self._lines, self._written = path, lines, time.monotonic()

  def write(self, line):
    self._lines.append(line)
    if time.monotonic() > self._written + _SECONDS_BETWEEN_WRITES:
      self.flush()

  def flush(self):
    write_atomically(self._path, ''.join(self._lines))
    self._written = time.monotonic()

  def close(self):
    pass


def read_metrics(workdir, kind: str | None = None) -> list[dict]:
  """The events of a run in order; lines that a kill or a fault made unreadable are left out."""
  path, rows = folder(workdir) / 'metrics.jsonl', []
  if not path.is_file():  # a device has no end
    return rows
  # A file of an object store reads lines of any length only, without a buffer around it.
  with io.BufferedReader(path.open('rb')) as file:
    for line in iter(lambda: file.readline(_LONGEST), b''):
      try:
        row = json.loads(line)
        if kind in (None, row['kind']) and row['step'] >= 0:
          rows.append(row)
      except (ValueError, RecursionError, TypeError, KeyError):
        continue
  return rows
