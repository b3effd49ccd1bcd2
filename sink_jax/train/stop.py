"""Requests to stop: signals that every process of a job acts on at the same step."""

from __future__ import annotations

import functools
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
    super().__init__('Ended by a second Ctrl-C before it had saved; the same command resumes from '
                     'the newest checkpoint.')


class StopHandler:
  """Turns the signals that ask to stop into a request, so that a step can end and be saved.

  A context, inside which it handles the signals; a second Ctrl-C raises Unsaved. A request that
  nothing acted on by the end of the context is passed on to the handler from before. The schedulers
  of pods signal one process, or all of them a little apart; a step is saved by all or by none. So
  the processes combine their requests at every step, and read the result one step later: it is a
  computation of the devices like the step itself, and by then it is done, so that nothing waits for
  it. All processes read the same result at the same step.
  """

  def __init__(self):
    self._asked: int | None = None  # the signal that asked this process
    self._last_answer: jax.Array | None = None  # of all processes, to the poll before

  @property
  def asked(self) -> bool:
    """Whether this process was asked."""
    return self._asked is not None

  def poll(self, wait: bool = False) -> bool:
    """Whether any process was asked. All of them must call it equally often.

    Args:
      wait: for the answer of this moment. Otherwise, with more than one process, it is the answer
        to the call before.
    """
    if jax.process_count() == 1:
      return self.asked
    return collective(self._poll, wait)

  def _poll(self, wait: bool) -> bool:
    # This poll's question is sent off; the answer to the one before is there without waiting.
    answer, self._last_answer = self._last_answer, _any(self.asked)
    if wait:
      answer = self._last_answer
    return answer is not None and bool(answer)

  def __enter__(self) -> StopHandler:
    self._old = {}
    if threading.current_thread() is threading.main_thread():  # Python allows no other to
      for number in stop_signals():
        self._old[number] = signal.signal(number, self._request)
    return self

  def _request(self, number: int, frame: FrameType | None) -> None:
    # A handler may interrupt anything, such as a save: it leaves the rest to `poll`.
    if number == signal.SIGINT and self._asked == signal.SIGINT:
      raise Unsaved
    self._asked = number

  def __exit__(self, kind: object, *error: object) -> None:
    for number, handler in self._old.items():
      # None: a handler that is not Python's, which the distributed runtime installs.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if self._asked is not None and kind is None:
      signal.raise_signal(self._asked)


def _any(flag: bool) -> jax.Array:
  """Whether the flag is set in any process; computed by the devices after this has returned."""
  sharding, combine = _combination()
  # One element for each device of the job; a process fills those of its own devices.
  mine = np.full(jax.local_device_count(), flag)
  return combine(jax.make_array_from_process_local_data(sharding, mine))


@functools.cache
def _combination() -> tuple[NamedSharding, jax.stages.Wrapped]:
  mesh = Mesh(np.array(jax.devices()), ('device',))
  combine = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
  return NamedSharding(mesh, PartitionSpec('device')), combine
