"""Tokens per second, and the share of the matrix-multiplication rate they use."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp


def measured_matmul_rate(dtype: str) -> float | None:
  """FLOP/s that one device reaches on square matrices; None if it cannot be measured.

  The best of a few tries on random data; takes about half a second.
  """
  size = 1024 if jax.default_backend() == 'cpu' else 8192
  # Random numbers: GPUs draw less power on zeros, and so run faster than in training.
  try:
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()  # compiles
    best = float('inf')
    for _ in range(5):
      start = time.perf_counter()
      product(a, a).block_until_ready()
      best = min(best, time.perf_counter() - start)
  except jax.errors.JaxRuntimeError:  # no memory left for it
    return None
  return 2 * size**3 / best


class Throughput:
  """A clock of training steps that can be stopped while something else runs."""

  def __init__(self, tokens_per_step: int, flops_per_token: float, matmul_rate: float | None):
    """matmul_rate: FLOP/s of one device, of which MFU is the share in use; None where unknown."""
    self._tokens, self._flops = tokens_per_step, flops_per_token
    # Tokens are counted over the whole job, and so is the rate of its devices.
    self._rate = matmul_rate and matmul_rate * jax.device_count()
    self._seconds, self._steps = 0.0, 0
    self._since: float | None = None  # when the step before was done; None while stopped

  def step(self) -> None:
    """Counts a step that is done; the first after a pause starts the clock and counts nothing."""
    now = time.perf_counter()
    if self._since is not None:
      self._seconds += now - self._since
      self._steps += 1
    self._since = now

  def timed(self, seconds: float) -> None:
    """Counts a step that took so long."""
    self._seconds += seconds
    self._steps += 1

  def pause(self) -> None:
    """Stops the clock until the next step is done."""
    self._since = None

  def read(self) -> dict[str, float | str]:
    """tokens_per_second and mfu since the last reading; 'n/a' where unknown."""
    if not self._steps:
      return {'tokens_per_second': 'n/a', 'mfu': 'n/a'}
    rate = self._steps * self._tokens / self._seconds
    self._seconds, self._steps = 0.0, 0
    mfu = rate * self._flops / self._rate if self._rate else 'n/a'
    return {'tokens_per_second': rate, 'mfu': mfu}
