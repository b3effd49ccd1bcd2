"""This machine: what it is, how fast it multiplies matrices and moves bytes, its memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sink_jax.benchmark.rows import Rates
from sink_jax.benchmark.timing import Program, compare
from sink_jax.devices import platform
from sink_jax.train.memory import device_memory, memory
from sink_jax.train.provenance import provenance


def measured_rates(dtype: str, seconds: float) -> Rates:
  """The rates of a large matrix product, and of reading and writing a large array.

  seconds: for each of the two measurements.
  """
  size, count = (8192, 2**28) if accelerated() else (1024, 2**24)
  # Random numbers: GPUs draw less power on zeros, and run faster than on data.
  a, x = random(0, (size, size), dtype), random(1, (count,), 'float32')
  product, moved = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
  times, _ = compare({'product': Program(lambda: product(a, a)),
                      'moved': Program(lambda: moved(x))}, seconds)
  return Rates(2 * size**3 / min(times['product']), 8 * count / min(times['moved']))


def describe(rates: Rates, dtype: str) -> dict[str, Any]:
  """Hardware, versions, date, command and code, with the rates as numbers that JSON can hold."""
  device = jax.devices()[0]
  return provenance() | {
      'device_kind': device.device_kind,
      'platform_version': ' '.join(device.client.platform_version.split()),
      'matmul_tflops': rates.flops / 1e12, 'memory_gb_per_second': rates.bytes / 1e9, 'dtype': dtype}


def accelerated() -> bool:
  """True if there is a GPU or TPU for which sink_jax has kernels."""
  return platform() in ('cuda', 'tpu')


def compiled(row: dict[str, Any], f: Callable[..., Any], *arrays: Any, repeats: int = 1) -> Program:
  """Compiles a function for some arrays; adds to the row the megabytes that it needs besides these.

  repeats: operations that f makes.

  Raises:
    MemoryError: the program and its arrays exceed the device, or half of the memory of a host. Starting
      such a program can end the process.
  """
  program = jax.jit(f).lower(*arrays).compile()
  needed = memory(program)
  row['mb'] = (needed.temporaries + needed.outputs) / 1e6
  limit = device_memory() or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2
  if needed.total > limit:
    raise MemoryError(f'out of memory: needs {needed.total / 1e9:.0f} of {limit / 1e9:.0f} GB')
  return Program(functools.partial(program, *arrays), repeats=repeats)


def random(seed: int, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
  """Standard normal numbers."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
