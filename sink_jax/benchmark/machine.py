"""The machine that a benchmark runs on, and its limits: memory and rate of matrix products."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sink_jax.kernels.dispatch import platform
from sink_jax.train.provenance import provenance
from sink_jax.train.throughput import measured_matmul_rate


def describe(seed: int) -> dict[str, Any]:
  """Facts about this machine and this call: hardware, versions, date, command and seed."""
  device = jax.devices()[0]
  return provenance() | {
      'device_kind': device.device_kind,
      'device_count': jax.device_count(),
      'jaxlib': importlib.metadata.version('jaxlib'),
      # On a GPU it has several lines, and a fact is one.
      'platform_version': ' '.join(device.client.platform_version.split()),
      'driver': _driver(),
      'seed': seed,
  }


def accelerated() -> bool:
  """Whether there is a GPU or TPU for which sink_jax has kernels."""
  return platform() in ('cuda', 'tpu')


def default_dtype() -> str:
  """The dtype of inputs where none is given: CPUs compute slowly in bfloat16."""
  return 'bfloat16' if accelerated() else 'float32'


def matmul_rate(dtype: str) -> float | None:
  """FLOP/s of one device in large matrix products of random numbers, measured in this run."""
  return measured_matmul_rate(dtype)


def memory_limit() -> int:
  """Bytes that a program may use: the device's, or half of the memory of a host."""
  # A CPU has no statistics: half of the host's memory leaves the rest to whatever else runs there.
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get('bytes_limit') or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2


def held_by_jax() -> str:
  """A clause about the memory of a GPU that JAX keeps, for the error of another library."""
  held = (jax.devices()[0].memory_stats() or {}).get('pool_bytes')
  return f'; JAX holds {held / 1e9:.0f} GB' if held else ''


def compiled_bytes(compiled: jax.stages.Compiled) -> int | None:
  """Peak memory of a compiled program beside its inputs: results and temporary arrays.

  Results that take the place of donated inputs are not counted.
  """
  stats = compiled.memory_analysis()
  if stats is None:
    return None
  return (stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)


def random(seed: int, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
  """Standard normal numbers: matrix products of zeros run faster than those of data."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def _driver() -> str | None:
  """The version of NVIDIA's driver; None without one."""
  try:
    shown = subprocess.run(['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'],
                           capture_output=True, text=True, timeout=20, check=True).stdout
  except (OSError, subprocess.SubprocessError):
    return None
  # nvidia-smi prints a line per GPU, and all of them have one driver.
  return shown.split()[0] if shown.split() else None
