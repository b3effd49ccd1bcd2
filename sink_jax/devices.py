"""The platform that programs run on, the cores of a CPU, and the memory that a process keeps there."""

from __future__ import annotations

import ctypes
import os

import jax

# Parameters of mallopt(3), from glibc's malloc.h, and their values in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_AT_MOST, _KEPT_BLOCK = 2**31 - 1, 2**30


def platform() -> str:
  """Returns 'cpu', 'tpu', 'cuda' (NVIDIA, from Ampere on), 'gpu' (without kernels here), or another name.

  It is the platform of the mesh in context (`kernels.shard.mesh_context`), whose devices may be simulated;
  without a mesh it is the platform of the default device.
  """
  of_mesh = jax.sharding.get_abstract_mesh().abstract_device
  if of_mesh is not None and of_mesh.platform != 'gpu':  # 'gpu' does not tell which generation
    return of_mesh.platform
  # Options of jax.config become attributes when JAX is imported.
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  device = device or jax.devices()[0]
  device = jax.devices(device)[0] if isinstance(device, str) else device
  if device.platform != 'gpu':
    return device.platform if of_mesh is None else 'cuda'  # simulated GPUs are NVIDIA's newest
  runs = 'cuda' in device.client.platform_version.lower() and float(device.compute_capability) >= 8
  return 'cuda' if runs else 'gpu'


def cores() -> int:
  """The cores that this process may use: a container or `taskset` may leave it fewer than there are."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def keep_freed_memory() -> None:
  """Lets this process keep the memory that it frees, where JAX runs on a CPU and glibc is the C library.

  XLA allocates the temporary memory of a program in every call. glibc returns large blocks to the kernel, so
  that each training step begins with pages that the kernel has to clear. Call it once, in a process that is
  ours: it holds for the whole process.
  """
  if jax.default_backend() != 'cpu':
    return
  libc = ctypes.CDLL(None)
  if hasattr(libc, 'gnu_get_libc_version') and hasattr(libc, 'mallopt'):
    libc.mallopt(_MMAP_THRESHOLD, _KEPT_BLOCK)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_AT_MOST)
