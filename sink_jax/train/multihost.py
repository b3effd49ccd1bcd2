"""Several processes as one job: how they find each other, and how they agree.

Every process runs the same program, and a collective waits until all have come to it. So whatever
could send one of them another way, such as an error in opening a file, is first made known to all,
by the functions below. Only process 0 writes the files of the workdir: the others would write
the same content over it, at other times. Checkpoints are the exception: each process writes its
part of the arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from sink_jax.io.exit_code import stop_signals

# A process that is silent for so long is dead, and the others end as well: with exit code
# 134, and the words of the coordination service on stderr.
HEARTBEAT_SECONDS = 60
_EXPLICIT = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
_CLUSTERS = ('TPU_WORKER_HOSTNAMES', 'SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE')
_STARTUP_SECONDS = 300
_PATIENCE_SECONDS = HEARTBEAT_SECONDS + 30  # after which a dead process has been missed
_LAST_WORDS_SECONDS = 3  # that process 0 gives the others for their messages
Value = TypeVar('Value')


def init_distributed() -> None:
  """Makes this process a part of its job; called once, before anything asks for a device.

  Taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID where they are set,
  else from what runs the job (Cloud TPU, SLURM's srun, Open MPI), else it is one process.

  Raises:
    ValueError: only some of the variables are set, or one is not a number.

  Where the others do not come within five minutes, the runtime ends the process with exit
  code 134 and a message. Until they come SIGTERM, Ctrl-C and SIGHUP end it at once: nothing
  has been begun.
  """
  for number in stop_signals():
    signal.signal(number, signal.SIG_DFL)  # a handler in Python would have to wait
  given = {name: os.environ[name] for name in _EXPLICIT if os.environ.get(name)}
  if given and len(given) < len(_EXPLICIT):
    missing = ', '.join(name for name in _EXPLICIT if name not in given)
    raise ValueError(f'{", ".join(given)} is set and {missing} is not: set all three, or none.')
  where: dict[str, Any] = {}
  if given:
    address, count, index = given.values()
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
      raise ValueError(f'JAX_NUM_PROCESSES={count} and JAX_PROCESS_ID={index}: write the number of '
                       'processes, and which of them this one is, counted from 0.')
    if int(count) == 1:
      return
    host, colon, port = address.rpartition(':')
    if not (host and colon and port.isdecimal()):
      raise ValueError(f'JAX_COORDINATOR_ADDRESS={address}: write host:port, of process 0.')
    where = {'coordinator_address': address, 'num_processes': int(count), 'process_id': int(index)}
    if host in ('127.0.0.1', 'localhost'):  # else it listens at all addresses of the machine
      where['coordinator_bind_address'] = address
  try:
    jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                               initialization_timeout=_STARTUP_SECONDS)
  except ValueError:
    if given or any(map(os.environ.get, _CLUSTERS)):
      raise
    return  # not a cluster that jax knows: one process
  if jax.process_count() > 1:
    # On CPUs the first collective has to begin within 30 seconds in all processes.
    collective(multihost_utils.sync_global_devices, 'begun')


def is_first() -> bool:
  """Whether this is process 0, which writes, prints and decides for all."""
  return jax.process_index() == 0


def broadcast_from_process0(decide: Callable[[], Value], *errors: type[Exception]) -> Value:
  """Calls `decide` in the first process, and returns its result in all of them.

  The result is a value that JSON can hold. An error of one of the types `errors` is raised in all
  processes, with its message; another one in the first process only.
  """
  if jax.process_count() == 1:
    return decide()
  value, error = None, None
  if is_first():
    try:
      value = decide()
    except errors as caught:
      error = caught
  which = next((i for i, kind in enumerate(errors) if isinstance(error, kind)), None)
  # The error's place in `errors`, with its message or the value.
  which, sent = _broadcast([which, str(error) if error else value])
  if error is not None:
    raise error
  if which is not None:
    raise errors[which](sent)
  return cast(Value, value if is_first() else sent)  # the value that was sent has been through JSON


def on_all_processes(prepare: Callable[[], Value]) -> Value:
  """Calls `prepare` in each process and returns its result; a ValueError of one is raised in all.

  For what depends on the machine of a process, such as its data.
  """
  try:
    value, error = prepare(), None
  except ValueError as caught:
    value, error = None, caught
  failed = process_allgather(error is not None)
  if any(failed):
    raise error or ValueError(f'Process {failed.index(True)} cannot begin; it says why.')
  return cast(Value, value)  # no process failed, so this one has a value


def check_same(what: str, text: str) -> None:
  """Raises a ValueError in all processes unless all of them give the same text."""
  if jax.process_count() == 1:
    return
  # A digest has 32 bytes in every process, and a collective takes arrays of one shape only.
  digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
  digests = collective(multihost_utils.process_allgather, digest)
  others = [i for i, other in enumerate(digests) if (other != digests[0]).any()]
  if others:
    raise ValueError(f'Process {others[0]} has another {what} than process 0: start all with the '
                     'same command, the same files and the same versions.')


def process_allgather(flag: bool) -> list[bool]:
  """Returns the flags of all processes, in their order."""
  if jax.process_count() == 1:
    return [flag]
  flags = collective(multihost_utils.process_allgather, np.array(flag))
  return [bool(x) for x in flags.ravel()]


def fail(message: str, alone: bool = False) -> NoReturn:
  """Prints what is wrong and ends this process with exit code 1.

  alone: the other processes may not know of it. They are not waited for; they end when this
    one is missed. And where it was rather another process that died, which breaks what is
    under way between them, this one waits to be ended for that: with another exit code, for
    then starting the job again is right.
  """
  if jax.process_count() == 1:
    sys.exit(message)
  print(f'process {jax.process_index()}: {message}', file=sys.stderr, flush=True)
  signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # it stays an error
  if alone:
    print(f'process {jax.process_index()}: if another process has died, this one ends for it '
          f'within {_PATIENCE_SECONDS} seconds.', file=sys.stderr, flush=True)
    time.sleep(_PATIENCE_SECONDS)
  elif is_first():
    time.sleep(_LAST_WORDS_SECONDS)  # without the coordinator the others cannot say theirs
  os._exit(1)  # sys.exit would wait for the others


def collective(call: Callable[..., Value], *arguments: Any) -> Value:
  """Calls what all processes do together, and returns its result.

  Raises:
    RuntimeError: another process has died. JAX raises a ValueError, which would be a mistake
      in the config anywhere else.
  """
  try:
    return call(*arguments)
  except ValueError as error:
    raise RuntimeError(f'process {jax.process_index()} cannot go on: {error}') from error


def _broadcast(value: Any) -> Any:
  # The length first: a collective has arrays of one shape in all processes.
  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  send = lambda x: np.asarray(collective(multihost_utils.broadcast_one_to_all, x))
  padded = np.zeros(int(send(np.int32(len(data)))), np.uint8)
  if is_first():
    padded[:] = data
  return json.loads(send(padded).tobytes())
