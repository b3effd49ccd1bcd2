"""Predicted time of a step: computed from counts and datasheets, never measured."""

from __future__ import annotations

import dataclasses
import math

import jax

from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import flops_per_token, parameter_shapes
from sink_jax.plan.chips import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds of a step, on every device.

  compute: at the share of the peak; peak: at all of it. memory: bytes at the bandwidth of
  the device's memory. overlapped, exposed: traffic while other work goes on, and not.
  """

  compute: float
  peak: float
  memory: float
  overlapped: float
  exposed: float

  @property
  def step(self) -> float:
    """The largest of what goes on at a time, and then the traffic that all wait for."""
    return max(self.compute, self.memory, self.overlapped) + self.exposed

  @property
  def floor(self) -> float:
    """Everything at its peak, and all at a time."""
    return max(self.peak, self.memory, self.overlapped + self.exposed)

  @property
  def bound(self) -> str:
    """What takes longest."""
    parts = {'compute': self.compute, 'memory': self.memory,
             'links': self.overlapped + self.exposed}
    return max(parts, key=parts.get)


def make(flops: float, bytes_: float, overlapped: float, exposed: float, chip: Chip,
         share: float, compute: float | None = None) -> Roofline:
  """Args: flops, bytes_: of a device and step. compute: seconds that were measured, if any."""
  peak = flops / chip.peak
  return Roofline(peak / share if compute is None else compute, peak, bytes_ / chip.bandwidth,
                  overlapped, exposed)


def mfu(config: ModelConfig, length: int, tokens: int, devices: int, chip: Chip,
        seconds: float) -> float:
  """Share of the peak that a step of `seconds` would reach, counting the model's FLOPs."""
  return tokens * flops_per_token(config, length) / (devices * chip.peak * seconds)


def attention_flops(config: ModelConfig, length: int) -> float:
  """Per token, of the forward pass: what kernels do, in `flops_per_token`."""
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  linear = sum(math.prod(x.shape) for path, x in leaves if path[-1].key == 'kernel')
  return flops_per_token(config, length) / 3 - 2 * linear


def kernel_flops(config: ModelConfig, length: int, tokens: float, calls: int,
                 microbatches: int) -> float:
  """Of attention kernels: a forward pass has 2 products of scores, the backward ones 3 and 4.

  Args:
    calls: of kernels in the compiled program; above 3 per layer the forward pass is repeated.
  """
  forward = tokens * attention_flops(config, length)
  passes = max(0, calls / (config.layers * microbatches) - 2)
  return forward * (passes + 3.5) if calls else 0.0
