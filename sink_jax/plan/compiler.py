"""The compilers for TPUs and NVIDIA GPUs, on machines without them, and how they are loaded."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

# XLA normally reads these constants from the device that it compiles for. No device is present
# here.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150121545728
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 8 patch: 0 }
"""


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


def gpu_devices(count: int) -> Sequence[Any]:
  """The jax.Devices of so many H200 of one machine, to compile for; descriptions, as above.

  Raises:
    ValueError: the compiler is not installed.
  """
  return _gpu_topologies()(
    '', topology=f'1x1x{count}', target_config=_H200
  )._make_compile_only_devices()


def tracing_for_gpus() -> contextlib.AbstractContextManager:
  """Names an H200 to JAX from 0.11 on, which lowers Triton kernels for the default device."""
  if jax.__version_info__ < (0, 11):
    return contextlib.nullcontext()
  from jax._src.pallas.triton import gpu_info  # pyright: ignore[reportAttributeAccessIssue]

  return mock.patch.object(gpu_info, 'get_device_kind', lambda: 'NVIDIA H200')


def cuda_directory() -> pathlib.Path:
  """The folder with the CUDA plug-in of jax and ptxas; raises a ValueError if it is missing."""
  folder = pathlib.Path(_folder()) / 'cuda'
  if not folder.is_dir():
    raise ValueError(
      f'there is no compiler for NVIDIA GPUs in {folder.parent}: bash launch/test.sh '
      '--compile=h200 --collect-only installs it (0.6 GB), or name its folder with COMPILERS=DIR.'
    )
  return folder


@functools.cache
def _gpu_topologies() -> Any:
  from jax._src import xla_bridge

  directory = cuda_directory()
  fresh_compiles()
  jax.devices()  # finishes the search for plug-ins before this one becomes visible
  sys.path.append(str(directory))
  [plugin] = (directory / 'jax_plugins').glob('xla_cuda*')
  importlib.import_module(f'jax_plugins.{plugin.name}').initialize()
  for library in directory.glob('jax_cuda*_plugin/libmosaic_gpu_runtime.so'):
    # Programs with Mosaic GPU kernels link to it.
    os.environ['MOSAIC_GPU_RUNTIME_LIB_PATH'] = str(library)
  return xla_bridge._topology_factories['cuda']


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
  folder = _folder()
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


def _folder() -> str | os.PathLike:
  return os.environ.get('COMPILERS') or pathlib.Path(sys.prefix) / 'compilers'
