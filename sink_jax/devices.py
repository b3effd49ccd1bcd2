"""The platform that programs run on, the cores of a CPU, and the memory that a process keeps."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import jax

hardware_utils: Any  # private, so that a release of jax may lack it: then nothing is refused
try:
  from jax._src import hardware_utils
except ImportError:
  hardware_utils = None

# Parameters of mallopt(3), from glibc's malloc.h, and their values in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_AT_MOST, _KEPT_BLOCK = 2**31 - 1, 2**30


def platform() -> str:
  """Returns 'cpu', 'tpu', 'cuda' (NVIDIA from Ampere on), 'gpu' (without kernels) or another name.

  It is the platform of the mesh in context (`kernels.shard.mesh_context`), whose devices may be
  simulated; without a mesh it is the platform of the default device.
  """
  devices_of_mesh = jax.sharding.get_abstract_mesh().abstract_device
  of_mesh = getattr(devices_of_mesh, 'platform', None)  # jax before 0.10 does not say
  if of_mesh not in (None, 'gpu'):  # 'gpu' does not tell which generation
    return of_mesh
  # Options of jax.config become attributes when JAX is imported.
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  device = device or jax.devices()[0]
  device = jax.devices(device)[0] if isinstance(device, str) else device
  if device.platform != 'gpu':
    return device.platform if of_mesh is None else 'cuda'  # simulated GPUs are NVIDIA's newest
  runs = 'cuda' in device.client.platform_version.lower() and float(device.compute_capability) >= 8
  return 'cuda' if runs else 'gpu'


def emulates_bfloat16() -> bool:
  """True on an NVIDIA GPU before Ampere, such as a T4 or V100, where float32 is faster."""
  device = jax.devices()[0]
  if device.platform != 'gpu' or 'cuda' not in device.client.platform_version.lower():
    return False
  return float(device.compute_capability) < 8


def cores() -> int:
  """The cores that this process may use: a container or `taskset` may leave it only some."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def refuse_silent_cpu() -> None:
  """Raises a ValueError where JAX fell back to the CPU of a machine with a GPU or a TPU chip.

  It passes where JAX_PLATFORMS asks for the CPU, or CUDA_VISIBLE_DEVICES hides the GPUs.
  """
  # Options of jax.config become attributes when JAX is imported.
  asked = jax.config.jax_platforms or ''  # pyright: ignore[reportAttributeAccessIssue]
  if jax.default_backend() != 'cpu' or 'cpu' in asked.split(','):
    return
  if _has_tpu():
    found, extra = 'a TPU chip', 'tpu'
  elif _has_gpu() and os.environ.get('CUDA_VISIBLE_DEVICES') not in ('', '-1'):
    found, extra = 'an NVIDIA GPU', _cuda_extra()
  else:
    return
  raise ValueError(
    f'this machine has {found}, and JAX runs on its CPU: pip install '
    f'"jax[{extra}]=={jax.__version__}", or JAX_PLATFORMS=cpu for the CPU.'
  )


def _has_gpu() -> bool:
  return hardware_utils is not None and hardware_utils.has_visible_nvidia_gpu()


def _has_tpu() -> bool:
  return (
    hardware_utils is not None and hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0
  )


def _cuda_extra() -> str:
  """The extra of jax for the driver: CUDA 13 needs 580 or newer."""
  try:
    words = Path('/proc/driver/nvidia/version').read_text()
  except OSError:
    return 'cuda13'
  version = re.search(r'Module\D+(\d+)\.', words)
  return 'cuda12' if version and int(version[1]) < 580 else 'cuda13'


def keep_freed_memory() -> None:
  """Lets this process keep the memory that it frees, where JAX runs on a CPU with glibc.

  XLA allocates the temporary memory of a program in every call. glibc returns large blocks to the
  kernel, so that each training step begins with pages that the kernel has to clear. Call it once,
  in a process that is ours: it holds for the whole process.
  """
  if jax.default_backend() != 'cpu':
    return
  libc = ctypes.CDLL(None)
  if hasattr(libc, 'gnu_get_libc_version') and hasattr(libc, 'mallopt'):
    libc.mallopt(_MMAP_THRESHOLD, _KEPT_BLOCK)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_AT_MOST)
