"""Metrics of a run: one JSON line per event, TensorBoard, Weights & Biases, and where time goes."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from sink_jax.io.files import named_in_errors, write_atomically
from sink_jax.io.paths import AnyPath, files_below, inside, is_local, to_path
from sink_jax.train.multihost import is_first

_PROTO: Any = event_pb2  # protobuf makes its classes on import, where no type checker sees them
_SECONDS_BETWEEN_COPIES = 30  # to an object store, which cannot append
# Dense bfloat16 FLOP/s of a device (for TPU7x of a core) from datasheets; the first key that is a
# part of `device_kind` counts.
PEAK_FLOPS = {
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v6': 918e12,
  'TPU7x': 1153.5e12,
  'B200': 2250e12,
  'H200 NVL': 835.5e12,
  'H200': 989e12,
  'H100 NVL': 835.5e12,
  'H100 PCIe': 756e12,
  'H100': 989e12,
  'A100': 312e12,
  'L40S': 362e12,
  'L40': 181e12,
  'L4': 121e12,
  'A10G': 70e12,
  'A10': 125e12,
  'V100': 125e12,
  'RTX 4090': 165e12,
}


class Metrics:
  """Writes `metrics.jsonl` and TensorBoard events of a workdir, in the first process.

  Lines look like {"kind": "train", "step": 100, "loss": 2.1, ...}; kinds are 'train', 'time',
  'valid' and 'probe', and 'graft' of a run that begins with one. For
  an object store the files grow in a temporary folder, and are copied at each `flush` and twice a
  minute. Before `resume`, and in the other processes of a job, every method does nothing.
  """

  def __init__(self, workdir: AnyPath, wandb: str = '', config: Mapping[str, Any] | None = None):
    self._workdir, self._project, self._config = workdir, wandb, config
    self._active, self._wandb = False, None

  def resume(self, step: int) -> None:
    """Opens the files, and drops lines beyond a step: that of the checkpoint, 0 without one.

    A resumed run thus leaves the same files as one that was never interrupted.
    """
    if not is_first():
      return
    workdir = self._workdir
    if is_local(workdir):
      self._local = workdir
    else:
      self._temporary = tempfile.TemporaryDirectory(prefix='sink_jax-metrics-')
      self._local = Path(self._temporary.name)
    rows = _rows(workdir / 'metrics.jsonl') if step else ()
    write_atomically(
      self._local / 'metrics.jsonl', b''.join(line for line, row in rows if row['step'] <= step)
    )
    self._file = open(self._local / 'metrics.jsonl', 'ab', buffering=0)
    # Not tensorboardX's SummaryWriter: a full disk ends its thread, and later writes wait forever.
    # It names a file by the second, so a second start within it would overwrite the file;
    # TensorBoard reads files in the order of their names, here of these numbers.
    (self._local / 'tensorboard').mkdir(exist_ok=True)
    self._events = EventsWriter(str(self._local / 'tensorboard' / 'events'), f'.{time.time_ns()}')
    # TensorBoard then drops what a run that was killed had written at this step or beyond.
    self._write_event(
      step=step + 1 if step else 0, session_log=_PROTO.SessionLog(status=_PROTO.SessionLog.START)
    )
    if self._project:
      self._wandb = _wandb_run(self._project, workdir, self._config)
    self._active = True
    self.flush()

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Appends one event; values are numbers, texts, or lists and mappings of numbers.

    TensorBoard gets only the numbers: the entries of a list, one per block, are not a curve.
    """
    if not self._active:
      return
    with named_in_errors(self._workdir / 'metrics.jsonl'):
      self._file.write((json.dumps({'kind': kind, 'step': step, **values}) + '\n').encode())
    points = {
      f'{kind}/{name}': value
      for name, value in values.items()
      if isinstance(value, (int, float)) and math.isfinite(value)
    }
    for name, value in points.items():
      self._write_event(step=step, summary=scalar(name, value))
    if self._wandb is not None:
      self._wandb.log(points, step=step)
    if self._local != self._workdir and time.monotonic() > self._copied + _SECONDS_BETWEEN_COPIES:
      self.flush()

  def flush(self) -> None:
    """Writes everything so far to storage that survives the loss of the machine."""
    if not self._active:
      return
    with named_in_errors(self._workdir):
      os.fsync(self._file.fileno())
      self._events.flush()
    if self._local != self._workdir:
      for file in files_below(self._local):
        (self._workdir / file.relative_to(self._local)).write_bytes(file.read_bytes())
      self._copied = time.monotonic()

  def abandon(self) -> None:
    """Writes nothing more: the files belong to another job, or the process must end at once."""
    self._active = False

  def close(self) -> None:
    """Flushes and closes the files; called more than once it does nothing."""
    if not self._active:
      return
    self.flush()
    self._active = False
    self._events.close()
    self._file.close()
    if self._wandb is not None:
      self._wandb.finish()

  def _write_event(self, **content: Any) -> None:
    with named_in_errors(self._workdir / 'tensorboard'):
      self._events.write_event(_PROTO.Event(wall_time=time.time(), **content))


def read_metrics(workdir: str | AnyPath) -> list[dict[str, Any]]:
  """The events of a run in order; lines that a kill or a fault made unreadable are left out.

  Raises a ValueError if the file is a link that leads out of the folder.
  """
  return [row for _, row in _rows(inside(to_path(workdir), 'metrics.jsonl'))]


def _rows(path: AnyPath) -> Iterator[tuple[bytes, dict[str, Any]]]:
  """The readable lines of a metrics file, and their rows."""
  if not path.is_file():  # it may be missing, or a device, which has no end
    return
  with path.open('rb') as file:
    for line in file:
      try:
        row = json.loads(line)
        if isinstance(row['kind'], str) and row['step'] >= 0 and line.endswith(b'\n'):
          yield line, row
      except (ValueError, RecursionError, TypeError, KeyError):
        pass


def _wandb_run(project: str, workdir: AnyPath, config: Mapping[str, Any] | None) -> Any:
  import wandb  # pyright: ignore[reportMissingImports]  an optional package

  # One W&B run per workdir, which a resumed run continues.
  name = re.sub(r'\W', '-', str(workdir))[-100:]
  return wandb.init(project=project, name=workdir.name, id=name, resume='allow', config=config)


class Clock:
  """Counts the seconds of a run by their use, from the end of its first step, which compiles."""

  def __init__(self, tokens_per_step: int, flops_per_token: float):
    kind = jax.devices()[0].device_kind
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)
    self._tokens, self._flops = tokens_per_step, flops_per_token
    # The peak rate is the sum over all devices of the job, as the tokens are.
    self._peak = peak and peak * jax.device_count()
    self._since: float | None = None
    self._steps, self._spent = 0, collections.defaultdict(float)

  @contextlib.contextmanager
  def spent_on(self, what: str) -> Iterator[None]:
    """Counts the block: 'data', 'probe' or 'save'."""
    began = time.perf_counter()
    yield
    self._spent[what] += time.perf_counter() - began

  def step(self) -> None:
    """Counts a step that the devices have done."""
    if self._since is None:
      self._restart()
    else:
      self._steps += 1

  def read(self) -> tuple[dict[str, float | str], dict[str, float]]:
    """Since the last reading: (tokens per second and MFU, or 'n/a'; seconds of a step by part).

    MFU is the share of the datasheet's peak; neither number counts probes and saves. Parts are in
    seconds per step: `step` on the devices, which includes `data`, the wait for a batch; next to it
    `probe` (with validation) and `save`.
    """
    if not self._steps or self._since is None:
      return {'tokens_per_second': 'n/a', 'mfu': 'n/a'}, {}
    parts = {what: self._spent[what] for what in ('data', 'probe', 'save')}
    parts['step'] = time.perf_counter() - self._since - parts['probe'] - parts['save']
    rate = self._steps * self._tokens / parts['step']
    mfu = rate * self._flops / self._peak if self._peak else 'n/a'
    parts = {f'{what}_seconds': seconds / self._steps for what, seconds in parts.items()}
    self._restart()
    return {'tokens_per_second': rate, 'mfu': mfu}, parts

  def _restart(self) -> None:
    self._since, self._steps = time.perf_counter(), 0
    self._spent.clear()
