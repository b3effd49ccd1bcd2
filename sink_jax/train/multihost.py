"""Several processes as one job: how they find each other, and how they agree.

Every process runs the same program, and a collective waits until all have come to it. So whatever
could send one of them another way, such as an error in opening a file, is first made known to all.
Only process 0 writes the files of the workdir, except for checkpoints: each process writes its part
of the arrays.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
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
    ValueError: only some of the variables are set, or one of them is wrong.

  Where the others do not come within five minutes, the runtime ends the process with exit
  code 134 and a message. Until they come SIGTERM, Ctrl-C and SIGHUP end it at once: nothing
  has been begun.
  """
  for number in stop_signals():
    signal.signal(number, signal.SIG_DFL)  # a handler in Python would have to wait
  given = [f'{name}={os.environ[name]}' for name in _EXPLICIT if os.environ.get(name)]
  where: dict[str, Any] = {}
  if given:
    found = re.fullmatch(r'\w+=((.+):\d+) \w+=(\d+) \w+=(\d+)', ' '.join(given))
    if found is None:
      raise ValueError(f'{" ".join(given)}: set all of {", ".join(_EXPLICIT)}, to the host:port of '
                       'process 0, a number, and a number from 0; or none.')
    address, host, count, index = found.groups()
    if int(count) == 1:
      return
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


def gather(value: Value) -> list[Value]:
  """The values of all processes, in their order."""
  if jax.process_count() == 1:
    return [value]
  # The lengths first: a collective has arrays of one shape in all processes.
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  lengths = collective(multihost_utils.process_allgather, np.int32(len(data)))
  padded = np.zeros(lengths.max(), np.uint8)
  padded[:len(data)] = data
  # A pickle knows where it ends.
  return [pickle.loads(row.tobytes())
          for row in collective(multihost_utils.process_allgather, padded)]


def broadcast_from_process0(decide: Callable[[], Value]) -> Value:
  """Calls `decide` in process 0, and returns its result, or raises its error, in all of them."""
  value, error = None, None
  if is_first():
    try:
      value = decide()
    except Exception as caught:
      error = caught
  value, error = gather((value, error))[0]
  if error is not None:
    raise error
  return cast(Value, value)


def on_all_processes(prepare: Callable[[], Value]) -> Value:
  """Calls `prepare` in each process and returns its result; a ValueError of one is raised in all.

  For what depends on the machine of a process, such as its data.
  """
  value, error = None, None
  try:
    value = prepare()
  except ValueError as caught:
    error = caught
  failed = gather(error is not None)
  if any(failed):
    raise error or ValueError(f'Process {failed.index(True)} cannot begin; it says why.')
  return cast(Value, value)  # no process failed, so this one has a value


def check_same(what: str, text: str) -> None:
  """Raises a ValueError in all processes unless all of them give the same text."""
  digests = gather(hashlib.sha256(text.encode()).hexdigest())
  for i, digest in enumerate(digests):
    if digest != digests[0]:
      raise ValueError(f'Process {i} has another {what} than process 0: start all with the same '
                       'command, the same files and the same versions.')


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
