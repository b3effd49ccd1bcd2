"""Compiled programs on disk, so that the next process need not compile them again.

JAX stores and finds them; this file chooses the folder and guards the entries. The private parts
of JAX that this takes are all here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from sink_jax.io.paths import cache_root, expanded

VARIABLE = 'SINK_JAX_COMPILE_CACHE'
MAX_BYTES = 4 << 30
_PARTS = 64  # of MAX_BYTES; a process looks for old entries once per part that it writes
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger('sink_jax')


def enable() -> None:
  """Makes JAX store every program it compiles, and load those that an earlier process stored.

  The folder is $SINK_JAX_COMPILE_CACHE, else `compiled` below that of all caches; an empty value
  stores nothing. In it, programs that another machine could not run have a folder of their own; see
  `kind`. Beyond 4 GiB, the least recently used programs make room for new ones. In a job of several
  processes the first one writes.

  A process calls it before it compiles, once its devices and cores are settled: it initialises the
  devices. A compilation cache that the user configured in JAX stays as it is. Where the folder
  cannot be used, there is a warning of one line, and programs are compiled as without it.
  """
  given = os.environ.get(VARIABLE)
  options: Any = jax.config  # gets its attributes while jax is imported, so that no type has them
  if given == '' or not options.jax_enable_compilation_cache or (
      options.jax_compilation_cache_dir is not None):
    return
  try:
    if '://' in (given or ''):
      raise ValueError(f'{given} is no folder of this machine')
    folder = expanded(given) if given else cache_root() / 'compiled'
    programs = Programs(folder.absolute() / kind())
    with programs.locked():
      pass
  except (OSError, RuntimeError, ValueError) as error:
    if jax.process_index() == 0:
      _log.warning('compiled programs are not kept: %s; %s=/FOLDER names another place, an empty '
                   'value stores none.', str(error).rstrip('.'), VARIABLE)
    return
  compilation_cache.reset_cache()
  jax.config.update('jax_compilation_cache_dir', str(programs.path))
  jax.config.update('jax_compilation_cache_max_size', MAX_BYTES)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  compilation_cache._cache, compilation_cache._cache_initialized = programs, True


def kind() -> str:
  """The name of the folder for programs of these devices, such as 0.10.2-cpu-5f3a....

  It holds the version of jaxlib, the platform and, on a CPU, a hash of the CPU's features and of
  how many cores the process may use: programs are machine code for the one, divided for the other.
  """
  platform_name = jax.default_backend()
  name = f'{jaxlib.version.__version__}-{platform_name}'
  if platform_name != 'cpu':
    return name
  digest = hashlib.sha256(f'{_cpu_features()} {usable_cores()}'.encode()).hexdigest()
  return f'{name}-{digest[:16]}'


def usable_cores() -> int:
  """How many cores of the CPU this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # a container or `taskset` may leave it fewer than there are
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Programs(LRUCache):
  """JAX's folder of programs of bounded size, in which every entry ends with its SHA-256.

  JAX writes entries in place. One that a killed process, a full disk or a lost mount left in part
  is removed when it is read, and the program is compiled and stored again.
  """

  def __init__(self, folder: str | os.PathLike, max_size: int = MAX_BYTES):
    super().__init__(os.fspath(folder), max_size=max_size)
    self._room = 0  # bytes that this process may write before it looks for old entries again
    self._usable = True

  def locked(self) -> contextlib.AbstractContextManager:
    """A context in which no other process reads or writes; a TimeoutError after ten seconds."""
    return self.lock.acquire(timeout=self.lock_timeout_secs)

  def get(self, key: str) -> bytes | None:
    """The program of a key; None where there is none, or a damaged one."""
    return self._while_usable(functools.partial(self._whole, key))

  def put(self, key: str, value: bytes) -> None:
    """Stores the program of a key that has none."""
    entry = value + hashlib.sha256(value).digest()
    self._while_usable(functools.partial(super().put, key, entry))

  def _while_usable(self, action: Callable[[], bytes | None]) -> bytes | None:
    """Returns `action()`; after a failure, None without calling anything again.

    A full disk, or a lock that a stopped process holds, would otherwise cost a warning or ten
    seconds for every program.
    """
    if not self._usable:
      return None
    try:
      with self.locked():
        return action()
    except OSError as error:  # among them the TimeoutError of the lock
      self._usable = False
      _log.warning('compiled programs are neither kept nor looked for any more: %s; empty %s to '
                   'work without them.', str(error).rstrip('.'), VARIABLE)
      return None

  def _whole(self, key: str) -> bytes | None:
    entry = super().get(key)
    if entry is None:
      return None
    program, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
    if hashlib.sha256(program).digest() == digest:
      return program
    self._remove(key)
    return None

  def _evict_if_needed(self, *, additional_size: int = 0) -> None:
    # JAX looks at all entries whenever it writes one, which takes 0.1 ms for each of them. Here,
    # room for many is made at once, and none is looked at until it is used up.
    if additional_size > self._room:
      for entry in self.path.glob('*-cache'):
        key = entry.name.removesuffix('-cache')
        # The time of use is written last. Without it, the process that wrote the entry was killed,
        # and JAX 0.10 fails.
        if not (self.path / f'{key}-atime').exists():
          self._remove(key)
      self._room = max(additional_size, self.max_size // _PARTS)
      super()._evict_if_needed(additional_size=self._room)
    self._room -= additional_size

  def _remove(self, key: str) -> None:
    for suffix in ('cache', 'atime'):
      (self.path / f'{key}-{suffix}').unlink(missing_ok=True)


def _cpu_features() -> tuple[str, object]:
  """What distinguishes the instructions of this CPU from those of others."""
  with contextlib.suppress(OSError):
    first = pathlib.Path('/proc/cpuinfo').read_text().split('\n\n')[0]
    fields = dict(line.split(':', 1) for line in first.splitlines() if ':' in line)
    values = {name.strip(): sorted(value.split()) for name, value in fields.items()}
    # Other fields, such as the frequency, change from one moment to the next.
    return platform.machine(), [values.get(name) for name in (
        'vendor_id', 'cpu family', 'model', 'flags',  # x86
        'CPU implementer', 'CPU architecture', 'CPU variant', 'CPU part', 'Features')]  # ARM
  return platform.machine(), platform.processor()


