"""Compiled programs on disk, so that the next process need not compile them again."""

from __future__ import annotations

import os
from typing import Any

import jax

from sink_jax.io.paths import cache_root, expanded


def enable() -> None:
  """Makes JAX store every program it compiles, and load those that an earlier process stored.

  Process 0 of a job stores them, so its hosts need a folder that all of them see. The folder is
  $SINK_JAX_COMPILE_CACHE, which may be gs://bucket/folder, or empty for no cache; by
  default `compiled` in the folder of all caches. A cache that the user configured in JAX is not
  changed.
  """
  folder = os.environ.get('SINK_JAX_COMPILE_CACHE')
  options: Any = jax.config  # gets its attributes at import, unseen by type checkers
  if folder == '' or options.jax_compilation_cache_dir is not None:
    return
  least_seconds = 1.0  # in an object store each program is an upload
  if '://' not in (folder or ''):  # an object store keeps no access times
    folder = str((expanded(folder) if folder else cache_root() / 'compiled').absolute())
    jax.config.update('jax_compilation_cache_max_size', 4 << 30)
    least_seconds = 0.0
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', least_seconds)
