"""Predicted time of a step: computed from counts and datasheets, never measured.

A device computes, moves data between its main memory and the chip, and sends data over links.
Each of the three takes at least its amount over the rate of the datasheet, and, as they go on at
the same time, a step takes as long as the longest; this is a roofline. Two things make it a
prediction rather than a bound: matrix products reach a share of their peak alone, and some
traffic between devices is waited for, because nothing else is there to be computed.
"""

from __future__ import annotations

import dataclasses

from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import attention_flops, flops_per_token
from sink_jax.plan.chips import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds that a device takes for each of the parts of a step.

  compute: matrix products at a share of the peak; peak: at all of it. memory: bytes at the
  bandwidth of main memory. overlapped, exposed: traffic between devices while other work goes
  on, and while everything waits for it.
  """

  compute: float
  peak: float
  memory: float
  overlapped: float
  exposed: float

  @property
  def step(self) -> float:
    """The longest of what goes on at a time, and then the traffic that all wait for."""
    return max(self.compute, self.memory, self.overlapped) + self.exposed

  @property
  def floor(self) -> float:
    """Everything at its peak, and all at a time."""
    return max(self.peak, self.memory, self.overlapped + self.exposed)

  @property
  def bound(self) -> str:
    """Which takes longest: 'compute', 'memory' or 'links'."""
    parts = {'compute': self.compute, 'memory': self.memory,
             'links': self.overlapped + self.exposed}
    return max(parts, key=lambda name: parts[name])


def make(flops: float, bytes_: float, overlapped: float, exposed: float, chip: Chip,
         share: float, compute: float | None = None) -> Roofline:
  """The roofline of a step.

  Args:
    flops, bytes_: of a device in a step.
    overlapped, exposed: seconds of traffic between devices.
    share: of the peak that matrix products reach.
    compute: seconds that the computation was measured to take, in place of that share.
  """
  peak = flops / chip.peak
  return Roofline(peak / share if compute is None else compute, peak, bytes_ / chip.bandwidth,
                  overlapped, exposed)


def mfu(config: ModelConfig, length: int, tokens: int, devices: int, chip: Chip,
        seconds: float) -> float:
  """Share of the peak that a step of `seconds` would reach, counting the model's FLOPs."""
  return tokens * flops_per_token(config, length) / (devices * chip.peak * seconds)


def kernel_flops(config: ModelConfig, length: int, tokens: float, calls: int,
                 microbatches: int) -> float:
  """FLOPs of all attention kernels in a step, whose insides the program text does not contain.

  A forward pass has 2 products per score; the two kernels of the backward pass have 3 and 4, so
  together 3.5 times as much.

  Args:
    tokens: of a device.
    calls: of kernels in the compiled program: the two backward ones of every layer and
      micro-batch, and the forward one, which comes twice where the backward pass repeats it.
  """
  forward = tokens * attention_flops(config, length)
  # Of each layer with attention and micro-batch there are three calls, or four where the backward
  # pass repeats the forward one; without the two of the backward pass they are the forward passes.
  passes = max(0, calls / (len(config.attention_layers) * microbatches) - 2)
  return forward * (passes + 3.5) if calls else 0.0
