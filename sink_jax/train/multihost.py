"""Several processes as one job: how they find each other, agree, and stop at the same step.

Every process runs the same program, and a collective waits until all reach it. So anything that
could make one process act differently, such as an error in opening a file, is first made known to
all. Only process 0 writes the files of the workdir, except for checkpoints: each process writes its
part of the arrays.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sink_jax.io.process import stop_signals
from sink_jax.train.failures import EXIT_PASSING, passes

# A process that is silent for this time counts as dead, and the others end as well.
HEARTBEAT_SECONDS = 60
_EXPLICIT = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
_CLUSTERS = ('TPU_WORKER_HOSTNAMES', 'SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE')
_PATIENCE_SECONDS = HEARTBEAT_SECONDS + 30  # after which a dead process has been noticed
Value = TypeVar('Value')


def init_distributed() -> None:
  """Makes this process a part of its job; called once, before anything asks for a device.

  The job is read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID if they are
  set, else from its launcher (Cloud TPU, SLURM's srun, Open MPI); otherwise this process is the
  job, with all devices of the machine. In SLURM a task takes its share of the GPUs. Until the
  others connect, SIGTERM, Ctrl-C and SIGHUP end it at once; after five minutes the
  runtime ends it, with exit code 134 and a message.

  Raises:
    ValueError: only some of the variables are set, or one of them is wrong. ConnectionError: the
      TPU's metadata server does not answer.
  """
  for number in stop_signals():
    signal.signal(number, signal.SIG_DFL)  # a Python handler would wait until they connect
  given = [f'{name}={os.environ[name]}' for name in _EXPLICIT if os.environ.get(name)]
  where: dict[str, Any] = {}
  if given:
    found = re.fullmatch(r'\w+=((.+):\d+) \w+=(\d+) \w+=(\d+)', ' '.join(given))
    if found is None or int(found[4]) >= int(found[3]):
      raise ValueError(
        f'{" ".join(given)}: set JAX_COORDINATOR_ADDRESS=host:port of process 0, '
        'JAX_NUM_PROCESSES, and a JAX_PROCESS_ID below it; or none of them.'
      )
    address, host, count, index = found.groups()
    if int(count) == 1:
      return
    where = {'coordinator_address': address, 'num_processes': int(count), 'process_id': int(index)}
    if host in ('127.0.0.1', 'localhost'):  # else it listens on all addresses of the machine
      where['coordinator_bind_address'] = address
  elif _launched_alone():
    return
  else:
    where = {'local_device_ids': _gpus_of_task(os.environ)}
  try:
    jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
  except ValueError:
    if given or any(map(os.environ.get, _CLUSTERS)):
      raise
    return  # not a cluster that jax knows: one process
  except OSError as error:  # of a request to the metadata server
    if given:
      raise
    raise ConnectionError(
      f'JAX cannot ask which other hosts are in this TPU job ({error}). Where there are none, set '
      'TPU_WORKER_HOSTNAMES=localhost.'
    ) from error
  if jax.process_count() > 1:
    # On CPUs the first collective has to begin within 30 seconds in all processes.
    collective(multihost_utils.sync_global_devices, 'begun')


def _launched_alone() -> bool:
  """True if a launcher says that it has started one process.

  JAX would then wait minutes for a TPU host named 'local', or take one GPU of eight.
  """
  if os.environ.get('OMPI_COMM_WORLD_SIZE'):  # mpirun, also within SLURM, where it is one task
    return False
  tasks = os.environ.get('SLURM_STEP_NUM_TASKS') or os.environ.get('SLURM_NTASKS')
  hosts = os.environ.get('TPU_PROCESS_ADDRESSES') or os.environ.get('TPU_WORKER_HOSTNAMES') or ','
  slices = os.environ.get('MEGASCALE_NUM_SLICES') or '1'
  return tasks == '1' or len(hosts.split(',')) == 1 and slices in ('0', '1')


def _gpus_of_task(environment: Mapping[str, str]) -> list[int] | None:
  """The GPUs of this SLURM task, by their places among those that it sees; None: JAX decides.

  JAX takes the GPU whose place is the task's place on its node, which is not there where SLURM
  shows each task only its own GPUs (--gpus-per-task), and leaves GPUs idle where there are more
  GPUs than tasks.
  """
  visible, place = environment.get('CUDA_VISIBLE_DEVICES'), environment.get('SLURM_LOCALID')
  if not visible or place is None or environment.get('OMPI_COMM_WORLD_SIZE'):
    return None
  count = len(visible.split(','))
  tasks = _tasks_of_node(environment)
  own = environment.get('SLURM_GPUS_PER_TASK') or 'gpu' in environment.get(
    'SLURM_TRES_PER_TASK', ''
  )
  if own or count < tasks:
    return list(range(count))
  share = count // tasks
  return list(range(int(place) * share, (int(place) + 1) * share))


def _tasks_of_node(environment: Mapping[str, str]) -> int:
  """How many tasks of the step run on this node; SLURM writes 8,8,4 as '8(x2),4'."""
  tasks = []
  for count, nodes in re.findall(
    r'(\d+)(?:\(x(\d+)\))?', environment.get('SLURM_STEP_TASKS_PER_NODE', '1')
  ):
    tasks += [int(count)] * int(nodes or 1)
  return tasks[int(environment.get('SLURM_NODEID', 0)) % len(tasks)]


def is_first() -> bool:
  """True if this is process 0, which writes, prints and decides for all."""
  return jax.process_index() == 0


def gather(value: Value) -> list[Value]:
  """The values of all processes, in their order; values that JSON can hold."""
  if jax.process_count() == 1:
    return [value]
  # The lengths first: a collective has arrays of one shape in all processes.
  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  lengths = collective(multihost_utils.process_allgather, np.int32(len(data)))
  padded = np.zeros(lengths.max(), np.uint8)
  padded[: len(data)] = data
  return [
    json.loads(row.tobytes().rstrip(b'\0'))
    for row in collective(multihost_utils.process_allgather, padded)
  ]


def on_all_processes(prepare: Callable[[], Value]) -> Value:
  """Calls `prepare` in each process and returns its result; an error of one is raised in all.

  Raises:
    ValueError: the error of another process, with its message. ConnectionError: likewise, of a
      failure that may pass.
  """
  value, error = None, None
  try:
    value = prepare()
  except Exception as caught:
    error = caught
  said = gather(None if error is None else [str(error), passes(error)])
  if error is not None:
    raise error
  for i, of_process in enumerate(said):
    if of_process is not None:
      message, passing = of_process
      kind = ConnectionError if passing else ValueError
      raise kind(f'process {i}: {message}')
  return cast(Value, value)  # no process failed, so this one has a value


def broadcast_from_process0(decide: Callable[[], Value]) -> Value:
  """Calls `decide` in process 0 and returns its result, or raises its error, in all of them."""
  value = on_all_processes(lambda: decide() if is_first() else None)
  sent = gather(value)[0]
  return cast(Value, value if is_first() else sent)


def fail(message: str, alone: bool = False) -> NoReturn:
  """Prints what is wrong and ends this process with exit code 1.

  alone: whether the other processes may not know of the error; they end when they notice that this
  one is gone. The death of another process may have caused the error, by breaking an operation
  between them. So this process first waits for the runtime to end it, with an exit code after which
  the job is started again.
  """
  if not _is_one_of_several():
    sys.exit(message)
  print(f'process {jax.process_index()}: {message}', file=sys.stderr, flush=True)
  signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # the exit code stays 1
  if alone:
    print(
      f'process {jax.process_index()}: if another process has died, this one ends for it '
      f'within {_PATIENCE_SECONDS} seconds.',
      file=sys.stderr,
      flush=True,
    )
    time.sleep(_PATIENCE_SECONDS)
  elif is_first():
    time.sleep(3)  # the others cannot print their message without the coordinator
  os._exit(1)  # sys.exit would wait for the others


def end_to_start_again(message: str) -> NoReturn:
  """Prints a failure that may pass, and ends this process at once with EXIT_PASSING."""
  name = f'process {jax.process_index()}: ' if _is_one_of_several() else ''
  print(f'{name}{message}', file=sys.stderr, flush=True)
  os._exit(EXIT_PASSING)  # sys.exit would wait for other processes, and for threads that save


def _is_one_of_several() -> bool:
  try:
    return jax.process_count() > 1
  except Exception:  # there are no devices: that is the failure
    return False


def collective(call: Callable[..., Value], *arguments: Any) -> Value:
  """Calls an operation of all processes together, and returns its result.

  Raises:
    RuntimeError: another process has died. JAX raises a ValueError, but elsewhere a ValueError is a
      mistake in the config.
  """
  try:
    return call(*arguments)
  except ValueError as error:
    raise RuntimeError(f'process {jax.process_index()} cannot go on: {error}') from error


class Interrupted(RuntimeError):
  """The run was asked to stop, and has saved its state."""

  def __init__(self, step: int, steps: int):
    self.step = step
    super().__init__(f'Stopped and saved at step {step} of {steps}; the same command resumes.')


class Unsaved(KeyboardInterrupt):
  """Ctrl-C was pressed a second time: the process ends before its state is saved."""

  def __init__(self):
    super().__init__('Ended by a second Ctrl-C before it had saved; the same command resumes.')


class Asked(NamedTuple):
  """The request to the processes of a job: to stop, or to save a checkpoint."""

  stop: bool
  save: bool


class StopHandler:
  """Records the signals that ask to stop as a request, so that a step can end and be saved.

  As a context it handles the signals; a second Ctrl-C raises Unsaved. A request that was not acted
  on by the end of the context is passed to the previous handler.
  asked: the signal that asked this process, or None.
  """

  def __init__(self):
    self.asked: int | None = None
    self._last_answer: jax.Array | None = None  # of all processes, to the previous poll
    self._save_is_left = False  # a checkpoint that was asked for and not yet made

  def poll(self, save: bool = False, wait: bool = False) -> Asked:
    """The request to any process; the same in all processes, which must call it equally often.

    A scheduler may signal one process, or all of them at slightly different times, but a step must
    be saved by all or by none. So the devices combine the requests of all processes, and the next
    call reads the result: no step waits for it.

    Args:
      save: whether a checkpoint is due by the clock of this process; only that of process 0 counts.
      wait: whether to wait for the answer to this call.
    """
    asked = Asked(self.asked is not None, save and is_first())
    if jax.process_count() > 1:
      answer, self._last_answer = self._last_answer, collective(_any, asked)
      if wait:
        answer = self._last_answer
      flags = (False, False) if answer is None else collective(np.asarray, answer)
      asked = Asked(*map(bool, flags))
    left, self._save_is_left = self._save_is_left, False
    return asked._replace(save=asked.save or left)

  def poll_to_stop(self) -> bool:
    """`poll`, where nothing can be saved: the next `poll` returns that a checkpoint is due."""
    asked = self.poll()
    self._save_is_left = asked.save
    return asked.stop

  def __enter__(self) -> StopHandler:
    self._old = {}
    if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
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


def _any(flags: Asked) -> jax.Array:
  """Which flags (2,) are set in any process; computed by the devices after this has returned."""
  mesh = Mesh(np.array(jax.devices()), ('device',))
  # One row for each device of the job; a process fills those of its devices.
  return _combined(
    jax.make_array_from_process_local_data(
      NamedSharding(mesh, PartitionSpec('device')), np.tile(flags, (jax.local_device_count(), 1))
    )
  )


_combined = jax.jit(functools.partial(jnp.any, axis=0))
