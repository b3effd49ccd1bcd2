"""TensorBoard's event files of a run, on a disk or in an object store."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
  # protobuf makes the two classes while it is imported, where no type checker sees them.
  Event,  # pyright: ignore[reportAttributeAccessIssue]
  SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.summary import scalar

from sink_jax.io.files import named_in_errors
from sink_jax.io.paths import AnyPath, is_local


class Board:
  """TensorBoard events of one start of a run, in a file for this start alone.

  They are written in this thread: tensorboardX's writer has a thread that a full disk ends, and
  whoever gives it more then waits for ever. An object store cannot append, so the file grows
  in a temporary folder here, and every `flush` copies it to the run's.
  """

  def __init__(self, folder: AnyPath, step: int):
    """folder: of the events. step: of the checkpoint that the run resumes from, 0 for none."""
    self._remote = None if is_local(folder) else folder
    self._folder = folder
    if self._remote is None:
      folder.mkdir(exist_ok=True)
    else:
      self._temporary = tempfile.TemporaryDirectory(prefix='sink_jax-tensorboard-')
      folder = Path(self._temporary.name)
    # tensorboardX names a file by its second, and a second start within it would overwrite it.
    # TensorBoard reads files by their names' order, which is that of these numbers.
    self._events = EventsWriter(str(folder / 'events'), f'.{time.time_ns()}')
    # TensorBoard then drops what a run that was killed had written at this step or beyond. Without
    # a checkpoint the run starts again, with step 0.
    self._event(step=step + 1 if step else 0, session_log=SessionLog(status=SessionLog.START))

  def write(self, name: str, value: float, step: int) -> None:
    """Adds a point to the curve of this name."""
    self._event(step=step, summary=scalar(name, value))

  def flush(self) -> None:
    """Puts everything so far where a lost machine does not take it along."""
    with named_in_errors(self._folder):
      self._events.flush()
    if self._remote is not None:
      for file in Path(self._temporary.name).iterdir():
        (self._remote / file.name).write_bytes(file.read_bytes())

  def close(self) -> None:
    """Ends the file; what is not flushed is lost where the run is in an object store."""
    with named_in_errors(self._folder):
      self._events.close()
    if self._remote is not None:
      self._temporary.cleanup()

  def _event(self, **content: Any) -> None:
    with named_in_errors(self._folder):
      self._events.write_event(Event(wall_time=time.time(), **content))
