"""TPU chips and GPUs: the table of their constants, and names such as v5e:16x16 and h100:8.

The numbers are those of the Google Cloud TPU documentation, in its pages on TPU v5e, v5p, v6e and
TPU7x; `usable` is from their compiler. Those of GPUs are from NVIDIA's datasheets; `usable` is 92 %
of the memory that their driver shows, which JAX takes.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from sink_jax.arguments import check_known
from sink_jax.train.metrics import PEAK_FLOPS

GIB = 2**30


class Chip(NamedTuple):
  """Constants of one device: a chip, but on v7x one of its two cores. Rates are per second."""

  prefix: str  # in the compiler's names of topologies; of a GPU the one that it compiles for
  peak: float  # dense bfloat16 FLOPs
  usable: float  # bytes of its memory that the compiler lets a program use
  bandwidth: float  # bytes of its memory
  link: float  # bytes of one link to a neighbour, in one direction
  network: float  # bytes of its share of the network between slices
  dimensions: int  # of the torus
  cores: int  # of a chip that are devices
  max_chips: int  # of the largest slice, or GPUs of a machine

  @property
  def is_gpu(self) -> bool:
    """True for a GPU, False for a TPU."""
    return self.prefix == 'h200'


CHIPS = {
  'v5e': Chip('v5e', PEAK_FLOPS['TPU v5e'], 15.75 * GIB, 819e9, 50e9, 3.125e9, 2, 1, 256),
  'v5p': Chip('v5p', PEAK_FLOPS['TPU v5'], 95.7 * GIB, 2765e9, 100e9, 6.25e9, 3, 1, 6144),
  'v6e': Chip('v6e', PEAK_FLOPS['TPU v6'], 31.2 * GIB, 1638e9, 100e9, 12.5e9, 2, 1, 256),
  # Half of a chip's: JAX sees its two cores as two devices.
  'v7x': Chip('tpu7x', PEAK_FLOPS['TPU7x'], 94.7 * GIB, 3690e9, 100e9, 6.25e9, 3, 2, 9216),
  # Half of NVLink's rate in one direction: the estimate counts two links. Programs are those of an
  # H200, which an A100 and a T4 would compile otherwise: their memory is an estimate.
  'h200': Chip('h200', PEAK_FLOPS['H200'], 128.6 * GIB, 4800e9, 225e9, 50e9, 1, 1, 8),
  'h100': Chip('h200', PEAK_FLOPS['H100'], 73.2 * GIB, 3350e9, 225e9, 50e9, 1, 1, 8),
  'a100-80': Chip('h200', PEAK_FLOPS['A100'], 72.8 * GIB, 2039e9, 150e9, 25e9, 1, 1, 8),
  'a100-40': Chip('h200', PEAK_FLOPS['A100'], 36.2 * GIB, 1555e9, 150e9, 25e9, 1, 1, 8),
  't4': Chip('h200', 65e12, 13.4 * GIB, 320e9, 8e9, 3e9, 1, 1, 8),
}


class Slices(NamedTuple):
  """Equal slices of TPUs, or machines with GPUs: the kind of the chips, the shape, how many."""

  kind: str
  shape: tuple[int, ...]
  count: int = 1

  @property
  def chip(self) -> Chip:
    """Constants of a device."""
    return CHIPS[self.kind]

  @property
  def chips(self) -> int:
    """Chips of all slices."""
    return math.prod(self.shape) * self.count

  @property
  def devices(self) -> int:
    """Devices that JAX sees in all slices."""
    return self.chips * self.chip.cores

  @property
  def name(self) -> str:
    """The name in options and text, such as '2 x v5e:16x16'."""
    count = f'{self.count} x ' if self.count > 1 else ''
    return f'{count}{self.kind}:{"x".join(map(str, self.shape))}'

  @property
  def compiler_name(self) -> str:
    """The compiler's name of one of the slices, such as 'tpu7x:4x4x4'."""
    return f'{self.chip.prefix}:{"x".join(map(str, self.shape))}'


# Accelerator types of Google Cloud, which end in a number of chips, or of cores.
_CORES_IN_TYPE = {
  'v5litepod': ('v5e', 1),
  'v6e': ('v6e', 1),
  'v5p': ('v5p', 2),
  'tpu7x': ('v7x', 2),
}


def parse(topology: str, count: int = 1) -> Slices:
  """Slices of a topology such as 'v5e:16x16', or of an accelerator type such as 'v5litepod-256'.

  'h100:8' is a machine with eight GPUs, of which `count` are as many.

  Raises:
    ValueError: the chip is unknown, or its slices do not have that shape; lists the choices.
  """
  kind, _, shape = topology.lower().partition(':')
  accelerator = re.fullmatch(r'(\w+)-(\d+)', topology.lower())
  if accelerator and accelerator[1] in _CORES_IN_TYPE:
    kind, cores = _CORES_IN_TYPE[accelerator[1]]
    shape = _default_shape(topology, int(accelerator[2]) / cores, CHIPS[kind].dimensions)
  check_known(kind, CHIPS, f'--topology={topology}: unknown chip')
  chip = CHIPS[kind]
  if chip.is_gpu:
    if not re.fullmatch(r'[1-8]', shape):
      raise ValueError(f'--topology={topology}: write the GPUs of a machine, as in {kind}:8.')
    return Slices(kind, (int(shape),), count)
  if not re.fullmatch(rf'\d+(x\d+){{{chip.dimensions - 1}}}', shape):
    raise ValueError(
      f'--topology={topology}: write the chips along each of the {chip.dimensions} '
      f'dimensions, as in {kind}:{"x".join("4" * chip.dimensions)}.'
    )
  sizes = tuple(map(int, shape.split('x')))
  chips = math.prod(sizes)
  # The compiler knows hosts of 2 x 2 chips, and of one.
  if chips != 1 and (sizes[0] % 2 or sizes[1] % 2) or not 1 <= chips <= chip.max_chips:
    raise ValueError(
      f'--topology={topology}: a slice of {kind} has one chip, or up to '
      f'{chip.max_chips:,} with even numbers along the first two dimensions.'
    )
  return Slices(kind, sizes, count)


def _default_shape(topology: str, chips: float, dimensions: int) -> str:
  """The shape of an accelerator type: the most equal powers of two, such as 2x2x4 or 8x16."""
  sides = [1] * dimensions
  while math.prod(sides) < chips:
    sides[sides.index(min(sides))] *= 2
  if math.prod(sides) != chips:
    raise ValueError(
      f'--topology={topology}: accelerator types have a power of two of chips; '
      'write a topology such as v5e:4x4.'
    )
  return 'x'.join(map(str, sorted(sides, key=lambda side: (side == 1, side))))
