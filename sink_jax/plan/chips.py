"""TPU chips and slices: the table of their constants, and names such as v5e:16x16.

Peaks, memory and bandwidths are those of the Google Cloud TPU documentation, in its pages on
TPU v5e, v5p, v6e and TPU7x. The bandwidth of a link is a chip's bidirectional bandwidth there,
halved for one direction and divided among the ports: two for every dimension of the torus.
What v5p has of memory is what its compiler says; the documentation says 95 GiB.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

GIB = 2**30
SOURCE = 'Google Cloud TPU documentation, pages on v5e, v5p, v6e and TPU7x'
# Per hop: an order of magnitude, which no page of the documentation states.
HOP_SECONDS = 1e-6
# Of the peak, in matrix products and attention kernels: an assumption, see --share.
SHARE = 0.6


class Chip(NamedTuple):
  """Constants of one device: a chip, but on v7x one of its two cores.

  prefix: of the compiler's topology names. peak: dense bfloat16 FLOP/s. memory, usable: bytes
  of its memory, and those that the compiler lets a program use. bandwidth: of that memory, in
  bytes per second. link: bytes per second of one link in one direction, between chips.
  dimensions: of the torus. wraps: dimensions that are a multiple of it are closed to rings.
  cores: of a chip that are devices. max_chips: of the largest slice. example: a shape.
  """

  prefix: str
  peak: float
  memory: float
  usable: float
  bandwidth: float
  link: float
  dimensions: int
  wraps: int
  cores: int
  max_chips: int
  example: str


CHIPS = {
    'v5e': Chip('v5e', 197e12, 16 * GIB, 15.75 * GIB, 819e9, 50e9, 2, 16, 1, 256, '16x16'),
    'v5p': Chip('v5p', 459e12, 96 * GIB, 95.7 * GIB, 2765e9, 100e9, 3, 4, 1, 6144, '4x4x8'),
    'v6e': Chip('v6e', 918e12, 32 * GIB, 31.2 * GIB, 1638e9, 100e9, 2, 16, 1, 256, '16x16'),
    # JAX sees the two cores of a v7x chip as two devices, so its peak and its bandwidth are halves
    # of the documented ones, and its memory is that of one core.
    'v7x': Chip('tpu7x', 2307e12 / 2, 96 * GIB, 94.7 * GIB, 7380e9 / 2, 100e9, 3, 4, 2, 9216,
                '4x4x4'),
}


class Slice(NamedTuple):
  """A slice of TPUs: the kind of its chips, and how many there are along every dimension."""

  kind: str
  shape: tuple[int, ...]

  @property
  def chip(self) -> Chip:
    """Constants of its chips."""
    return CHIPS[self.kind]

  @property
  def devices(self) -> int:
    """How many devices JAX sees in it."""
    return math.prod(self.shape) * self.chip.cores

  @property
  def name(self) -> str:
    """Its name in options, such as 'v5e:16x16'."""
    return f'{self.kind}:{"x".join(map(str, self.shape))}'

  @property
  def compiler_name(self) -> str:
    """Its name for the compiler, such as 'tpu7x:4x4x4'."""
    return f'{self.chip.prefix}:{"x".join(map(str, self.shape))}'

  def closed(self, dimension: int) -> bool:
    """Whether a link leads from the last chip along a dimension back to the first.

    v5e and v6e have it along 16 chips; v5p and v7x in slices of whole cubes of 4 x 4 x 4.
    """
    # Slices of v5p and v7x are put together from cubes, and close along all dimensions or along
    # none: 4x4x2 is open along all three.
    if self.chip.dimensions == 3:
      return all(n % self.chip.wraps == 0 for n in self.shape)
    return self.shape[dimension] % self.chip.wraps == 0


def parse(topology: str) -> Slice:
  """The slice of a name such as 'v5e:16x16'.

  Raises:
    ValueError: no such chip, or a shape that it is not connected in; says which there are.
  """
  kind, _, shape = topology.lower().partition(':')
  # The compiler's own name is accepted as well: tpu7x is v7x.
  kind = {chip.prefix: name for name, chip in CHIPS.items()}.get(kind, kind)
  if kind not in CHIPS:
    gpu = re.match(r'(h100|h200|a100|b200|gb200|cuda|gpu)', kind)
    why = ('GPUs are not planned, only TPUs: the compiler of NVIDIA GPUs knows no links between '
           'them' if gpu else 'no such chip')
    raise ValueError(f'--topology={topology}: {why}. Choices: {_examples()}.')
  chip = CHIPS[kind]
  if not re.fullmatch(r'\d+(x\d+)*', shape):
    raise ValueError(f'--topology={topology}: write the chips along every dimension, such as '
                     f'{kind}:{chip.example}.')
  sizes = tuple(map(int, shape.split('x')))
  if len(sizes) != chip.dimensions:
    raise ValueError(f'--topology={topology}: {kind} has {chip.dimensions} dimensions, as in '
                     f'{kind}:{chip.example}.')
  # Compilers know hosts of 2 x 2 chips, and of one.
  alone = math.prod(sizes) == 1
  if not alone and (sizes[0] % 2 or sizes[1] % 2 or min(sizes) < 1):
    raise ValueError(f'--topology={topology}: hosts have 2 x 2 chips, so the first two numbers '
                     f'must be even, as in {kind}:{chip.example}; one chip alone is '
                     f'{kind}:{"x".join("1" * chip.dimensions)}.')
  if math.prod(sizes) > chip.max_chips:
    raise ValueError(f'--topology={topology}: {math.prod(sizes):,} chips; a slice of {kind} has '
                     f'{chip.max_chips:,} at most. Traffic between slices is not planned.')
  return Slice(kind, sizes)


def _examples():
  return ', '.join(f'{kind}:{chip.example}' for kind, chip in CHIPS.items())
