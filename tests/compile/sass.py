"""Loops in the machine code of a kernel for Hopper GPUs, as nvdisasm prints it.

A round of a loop of a block keeps three units of a multiprocessor busy, which can work at the
same time: four schedulers issue one instruction of a warp a cycle each, tensor cores do 4096
operations a cycle in bfloat16, and 16 units a cycle compute exp2 and reciprocals.
"""

import collections
import re
from typing import NamedTuple


class Loop(NamedTuple):
  """A loop with matrix products: instructions of a warp in one round, and cycles of a block."""

  instructions: int
  issue_cycles: float
  matrix_cycles: float
  special_cycles: float

  @property
  def matrix_share(self) -> float:
    """The share of the time that tensor cores can be busy, where nothing else is in the way."""
    return self.matrix_cycles / max(self.issue_cycles, self.matrix_cycles, self.special_cycles)


def loops(text: str, kernel: str, threads: int) -> list[Loop]:
  """The loops of a kernel that have matrix products, in the order of the program.

  text: all of what nvdisasm prints. threads: of a block.
  """
  start = text.index(f'.text.{kernel}:')
  body = re.split(r'\n//-{9,}', text[start:], maxsplit=1)[0]
  labels: dict[str, int] = {}
  instructions, bodies = [], []
  for line in body.splitlines():
    if label := re.match(r'(\.L_x_\d+):', line):
      labels[label[1]] = len(instructions)
    elif instruction := re.match(r'\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(.*?)\s*;', line):
      instructions.append(instruction[1])
      target = re.match(r'BRA\b.*?(\.L_x_\d+)', instruction[1])
      if target and target[1] in labels:  # backwards
        bodies.append(instructions[labels[target[1]]:])
  return [_loop(x, threads // 32) for x in bodies if any('HGMMA' in i for i in x)]


def _loop(instructions: list[str], warps: int) -> Loop:
  names = collections.Counter(i.split()[0] for i in instructions)
  # 64 x n x 16 multiply-adds, for the four warps of a group together.
  products = sum(int(shape[1]) * count for name, count in names.items()
                 if (shape := re.match(r'HGMMA\.64x(\d+)x16\b', name)))
  special = sum(count for name, count in names.items() if name.startswith('MUFU'))
  return Loop(len(instructions), len(instructions) * warps / 4,
              products * 64 * 16 * 2 / 4096 * warps / 4, special * warps * 32 / 16)
