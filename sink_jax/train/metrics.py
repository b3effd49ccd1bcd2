"""Metrics on disk: one JSON line per event, and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from tensorboardX import SummaryWriter

from sink_jax.train.checksums import write_atomically


class MetricsWriter:
  """Writes `metrics.jsonl` and TensorBoard events of a workdir.

  Lines look like {"kind": "train", "step": 100, "loss": 2.1, ...}; kinds are 'train',
  'valid' and 'probe'. Opened at a step, it first drops lines beyond it, so that a
  resumed run leaves the same file as one that was never interrupted.
  """

  def __init__(self, workdir, step: int = 0):
    path = Path(workdir) / 'metrics.jsonl'
    kept = [row for row in read_metrics(workdir) if row['step'] <= step] if step else []
    write_atomically(path, ''.join(json.dumps(row) + '\n' for row in kept))
    self._file = open(path, 'a', buffering=1)
    self._board = SummaryWriter(str(Path(workdir) / 'tensorboard'), purge_step=step + 1)

  def write(self, kind: str, step: int, values: dict) -> None:
    """Appends one event; values are numbers, strings, or lists of numbers."""
    self._file.write(json.dumps({'kind': kind, 'step': step, **values}) + '\n')
    for name, value in values.items():
      if isinstance(value, (int, float)) and math.isfinite(value):
        self._board.add_scalar(f'{kind}/{name}', value, step)

  def close(self) -> None:
    self._file.flush()
    os.fsync(self._file.fileno())
    self._file.close()
    self._board.close()


def read_metrics(workdir, kind: str | None = None) -> list[dict]:
  """The events of a run in order; lines that a kill or a fault made unreadable are left out."""
  path, rows = Path(workdir) / 'metrics.jsonl', []
  if not path.exists():
    return rows
  for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
    try:
      row = json.loads(line)
      if kind in (None, row['kind']) and row['step'] >= 0:
        rows.append(row)
    except (json.JSONDecodeError, TypeError, KeyError):
      continue
  return rows
