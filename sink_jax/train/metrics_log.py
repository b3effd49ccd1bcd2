"""Metrics on disk: one JSON line per event, and TensorBoard."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from sink_jax.io.files import named_in_errors, write_atomically
from sink_jax.io.paths import AnyPath, is_local, to_path
from sink_jax.train.multihost import is_first
from sink_jax.train.record import read_rows, settle_metrics
from sink_jax.train.tensorboard import Board

_SECONDS_BETWEEN_WRITES = 30  # to an object store, which cannot append


class MetricsWriter:
  """Writes `metrics.jsonl` and TensorBoard events of a workdir, in the first process.

  Lines look like {"kind": "train", "step": 100, "loss": 2.1, ...}; kinds are 'train',
  'valid' and 'probe', and 'graft' of a run that begins with one. Opened at a step, it first drops
  lines beyond it, and those that are not as they were written, so that a resumed run leaves the
  same file as one that was never interrupted. In an object store the file is written anew twice a
  minute, and TensorBoard's at each `flush`. In the other processes of a job every method does
  nothing: metrics are the same in all, and two writers would damage the file.

  whole_from, remark: of the rows that were there, see `record.SettledMetrics`.
  """

  def __init__(self, workdir: str | AnyPath, step: int = 0):
    """step: that of the checkpoint that the run resumes from, 0 without one."""
    self._outputs: _Outputs | None = None
    self.whole_from, self.remark = 0, ''
    if not is_first():
      return
    folder = to_path(workdir)
    content, self.whole_from, self.remark = settle_metrics(workdir, step)
    path = folder / 'metrics.jsonl'
    file = _AppendedFile(path) if is_local(folder) else _RewrittenFile(path, content.decode())
    # The board comes last: it makes a file of its own, which nothing would close.
    self._outputs = _Outputs(file, Board(folder / 'tensorboard', step))
    # The digest grows with the file, so that a checkpoint never has to read it again.
    self._size, self._digest = len(content), hashlib.sha256(content)

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Appends one event; values are numbers, texts, or lists and mappings of numbers.

    TensorBoard gets the numbers alone: the entries of a list, such as one per block, are no curve.
    """
    if self._outputs is None:
      return
    line = json.dumps({'kind': kind, 'step': step, **values}) + '\n'
    self._outputs.file.write(line)
    self._size += len(line)  # JSON is ASCII
    self._digest.update(line.encode())
    for name, value in values.items():
      if isinstance(value, (int, float)) and math.isfinite(value):
        self._outputs.board.write(f'{kind}/{name}', value, step)

  def record(self) -> dict[str, Any]:
    """The entry in a checkpoint's record for all rows so far; {} but for the first process."""
    if self._outputs is None:
      return {}
    return {'bytes': self._size, 'sha256': self._digest.hexdigest(),
            'whole_from': self.whole_from}

  def flush(self) -> None:
    """Puts everything so far where a lost machine does not take it along."""
    if self._outputs is not None:
      self._outputs.file.flush()
      self._outputs.board.flush()

  def abandon(self) -> None:
    """Writes nothing more: the file is another job's by now."""
    self._outputs = None

  def close(self) -> None:
    """Flushes and closes the files; called more than once it does nothing."""
    if self._outputs is not None:
      self.flush()
      self._outputs.file.close()
      self._outputs.board.close()
      self._outputs = None


class _AppendedFile:
  """A text file on a disk that grows by whole lines: each is in the system's hands once written."""

  def __init__(self, path: AnyPath):
    self._path, self._file = path, open(path, 'a', buffering=1)

  def write(self, line: str) -> None:
    with named_in_errors(self._path):
      self._file.write(line)

  def flush(self) -> None:
    with named_in_errors(self._path):
      self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


class _RewrittenFile:
  """A text file in an object store, which cannot append: it is written as a whole each time."""

  def __init__(self, path: AnyPath, content: str):
    self._path, self._lines, self._written = path, [content], time.monotonic()

  def write(self, line: str) -> None:
    self._lines.append(line)
    if time.monotonic() > self._written + _SECONDS_BETWEEN_WRITES:
      self.flush()

  def flush(self) -> None:
    with named_in_errors(self._path):
      write_atomically(self._path, ''.join(self._lines))
    self._written = time.monotonic()

  def close(self) -> None:
    """Nothing: what is flushed is in the store."""


@dataclasses.dataclass(frozen=True)
class _Outputs:
  """What the first process writes to."""

  file: _AppendedFile | _RewrittenFile
  board: Board


def read_metrics(workdir: str | AnyPath, kind: str | None = None) -> list[dict[str, Any]]:
  """The events of a run in order; lines that a kill or a fault made unreadable are left out.

  Args:
    kind: 'train', 'valid', 'probe' or 'graft'; None for all of them.
  """
  return [row for _, row in read_rows(to_path(workdir) / 'metrics.jsonl')
          if kind in (None, row['kind'])]
