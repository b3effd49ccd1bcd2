"""Requests to stop: signals that every process of a job acts on at the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sink_jax.io.exit_code import stop_signals
from sink_jax.train.multihost import collective


class Interrupted(RuntimeError):
  """The run was asked to stop, and has saved its state."""

  def __init__(self, step: int, steps: int):
    self.step = step
    super().__init__(f'Stopped and saved at step {step} of {steps}; the same command resumes.')


class Unsaved(KeyboardInterrupt):
  """Ctrl-C was pressed a second time: the process ends before its state is saved."""

  def __init__(self):
    super().__init__('Ended by a second Ctrl-C before it had saved; the same command resumes.')


class StopHandler:
  """Turns the signals that ask to stop into a request, so that a step can end and be saved.

  A context, inside which it handles the signals; a second Ctrl-C raises Unsaved. A request that
  nothing acted on by the end of the context is passed on to the handler from before.
  asked: the signal that asked this process, or None.
  """

  def __init__(self):
    self.asked: int | None = None
    self._last_answer: jax.Array | None = None  # of all processes, to the poll before

  def poll(self, wait: bool = False) -> bool:
    """Whether any process was asked: the same in all, which must call it equally often.

    A scheduler signals one process, or all of them a little apart, and a step is saved by all or
    by none. So the processes combine their requests, in a computation of the devices, and read the
    result at the next call, when it is done, so that no step waits for it.

    Args:
      wait: for the answer to this call.
    """
    if jax.process_count() == 1:
      return self.asked is not None
    answer, self._last_answer = self._last_answer, collective(_any, self.asked is not None)
    if wait:
      answer = self._last_answer
    return answer is not None and collective(bool, answer)

  def __enter__(self) -> StopHandler:
    self._old = {}
    if threading.current_thread() is threading.main_thread():  # Python allows no other to
      for number in stop_signals():
        self._old[number] = signal.signal(number, self._request)
    return self

  def _request(self, number: int, frame: FrameType | None) -> None:
    # A handler may interrupt anything, such as a save: it leaves the rest to `poll`.
    if number == signal.SIGINT and self.asked == signal.SIGINT:
      raise Unsaved
    self.asked = number

  def __exit__(self, kind: object, *error: object) -> None:
    for number, handler in self._old.items():
      # None: a handler that is not Python's, which the distributed runtime installs.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if self.asked is not None and kind is None:
      signal.raise_signal(self.asked)


def _any(flag: bool) -> jax.Array:
  """Whether the flag is set in any process; computed by the devices after this has returned."""
  mesh = Mesh(np.array(jax.devices()), ('device',))
  # One element for each device of the job; a process fills those of its own devices.
  return _combined(jax.make_array_from_process_local_data(
      NamedSharding(mesh, PartitionSpec('device')), np.full(jax.local_device_count(), flag)))


_combined = jax.jit(jnp.any)
