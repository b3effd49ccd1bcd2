"""Metrics on disk: one JSON line per event, and TensorBoard."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from typing import Any

from sink_jax.io.files import named_in_errors, write_atomically
from sink_jax.io.paths import is_local, to_path
from sink_jax.train.multihost import is_first
from sink_jax.train.record import read_rows, settle_metrics
from sink_jax.train.tensorboard import Board

_SECONDS_BETWEEN_WRITES = 30  # to an object store, which cannot append


class MetricsWriter:
  """Writes `metrics.jsonl` and TensorBoard events of a workdir, in the first process.

  Lines look like {"kind": "train", "step": 100, "loss": 2.1, ...}; kinds are 'train',
  'valid' and 'probe'. Opened at a step, it first drops lines beyond it, and those that are not
  as they were written, so that a resumed run leaves the same file as one that was never
  interrupted. In an object store the file is written anew twice a minute, and TensorBoard's at
  each `flush`.

  whole_from, remark: of the rows that were there, see `record.SettledMetrics`.
  """

  def __init__(self, workdir, step: int = 0):
    self._file = self._board = None
    self.whole_from, self.remark = 0, ''
    if not is_first():
      return
    workdir = to_path(workdir)
    content, self.whole_from, self.remark = settle_metrics(workdir, step)
    self._bytes, self._digest = len(content), hashlib.sha256(content)
    self._path = workdir / 'metrics.jsonl'
    if is_local(workdir):
      self._file = open(self._path, 'a', buffering=1)
    else:
      self._file = _Rewritten(self._path, content.decode())
    self._board = Board(workdir / 'tensorboard', step)

  def write(self, kind: str, step: int, values: dict) -> None:
    """Appends one event; values are numbers, strings, or lists of numbers."""
    if self._file is None:
      return
    line = json.dumps({'kind': kind, 'step': step, **values}) + '\n'
    with named_in_errors(self._path):
      self._file.write(line)
    self._bytes += len(line)  # JSON is ASCII
    self._digest.update(line.encode())
    for name, value in values.items():
      if isinstance(value, (int, float)) and math.isfinite(value):
        self._board.write(f'{kind}/{name}', value, step)

  def record(self) -> dict[str, Any]:
    """What a checkpoint's record says of all rows so far; {} but for the first process."""
    if self._file is None:
      return {}
    return {'bytes': self._bytes, 'sha256': self._digest.hexdigest(),
            'whole_from': self.whole_from}

  def flush(self) -> None:
    """Puts everything so far where a lost machine does not take it along."""
    if self._file is not None:
      with named_in_errors(self._path):
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

  def __init__(self, path, content):
    self._path, self._lines, self._written = path, [content], time.monotonic()

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
  return [row for _, row in read_rows(to_path(workdir) / 'metrics.jsonl')
          if kind in (None, row['kind'])]
