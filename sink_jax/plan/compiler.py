"""The compiler for TPUs, on machines without a TPU: libtpu, and what it needs to be loaded."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies


def topology_devices(name: str, slices: int = 1) -> Sequence[Any]:
  """The jax.Devices of so many slices of a topology such as 'v5e:16x16', to compile for.

  They are descriptions: nothing can be put on them or run.

  Raises:
    ValueError: libtpu is not installed, or does not know the topology.
  """
  _load()
  options: dict[str, Any] = {'num_slices': slices} if slices > 1 else {}
  if not set(name.partition(':')[2]) - set('1x'):  # by default a host has 2 x 2 chips
    options['chips_per_host_bounds'] = (1, 1, 1)
  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=name, **options).devices
  except Exception as error:  # of private classes
    message = ' '.join(str(error).split())
    raise ValueError(f'The compiler has no topology {name}: {message[:200]}') from None


def fresh_compiles() -> None:
  """Makes JAX compile with default flags and without its cache.

  The flags with which tests compile for CPUs are not for this compiler.
  """
  os.environ['XLA_FLAGS'] = ''
  jax.config.update('jax_enable_compilation_cache', False)
  # JAX decides once, at its first compilation, whether it uses the cache, and the option
  # comes too late for a process that has compiled; reset_cache lets it decide again.
  from jax.experimental.compilation_cache import compilation_cache

  compilation_cache.reset_cache()


@functools.cache
def _load():
  fresh_compiles()
  # libtpu reads these when it is loaded, so they are set before the first topology is asked for.
  os.environ |= {
    'TPU_LIBRARY_PATH': str(_library()),
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # several processes compile at a time
    'TPU_SKIP_MDS_QUERY': '1',  # no question to a metadata server
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_LOG_DIR': 'disabled',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
  }


def _library() -> pathlib.Path:
  folder = os.environ.get('COMPILERS') or pathlib.Path(sys.prefix) / 'compilers'
  libraries = [pathlib.Path(folder) / 'tpu' / 'libtpu' / 'libtpu.so']
  installed = importlib.util.find_spec('libtpu')
  if installed and installed.origin:
    libraries.append(pathlib.Path(installed.origin).parent / 'libtpu.so')
  for library in libraries:
    if library.is_file():
      return library
  raise ValueError(
    f'there is no compiler for TPUs in {folder}: pip install --no-deps -r '
    'launch/compilers/tpu.txt (0.7 GB), or name its folder with COMPILERS=DIR.'
  )
