"""Compiled programs on disk, so that the next process need not compile them again."""

from __future__ import annotations

import os
from typing import Any

import jax

from sink_jax.io.paths import cache_root, expanded

VARIABLE = 'SINK_JAX_COMPILE_CACHE'
MAX_BYTES = 4 << 30


def enable() -> None:
  """Makes JAX store every program it compiles, and load those that an earlier process stored.

  The folder is $SINK_JAX_COMPILE_CACHE, which may be gs://bucket/folder, else `compiled` below that
  of all caches; an empty value stores nothing. A cache that the user configured in JAX stays as it
  is. Beyond 4 GiB the least recently used programs make room for new ones.
  """
  given = os.environ.get(VARIABLE)
  options: Any = jax.config  # gets its attributes while jax is imported, so that no type has them
  if given == '' or options.jax_compilation_cache_dir is not None:
    return
  remote = '://' in (given or '')
  folder = given if remote else str((expanded(given) if given else cache_root() / 'compiled').absolute())
  jax.config.update('jax_compilation_cache_dir', folder)
  if not remote:  # an object store has no times of use
    jax.config.update('jax_compilation_cache_max_size', MAX_BYTES)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def usable_cores() -> int:
  """How many cores of the CPU this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # a container or `taskset` may leave it fewer than there are
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
