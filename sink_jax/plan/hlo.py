"""The text of a compiled program, XLA's HLO, as instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_ARRAY = re.compile(r'\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')


class Array(NamedTuple):
  """space: 0 is the main memory of the device, the others are on the chip."""

  dims: tuple[int, ...]
  width: float
  space: int

  @property
  def size(self) -> int:
    return math.prod(self.dims)

  @property
  def bytes(self) -> float:
    return self.size * self.width


class Instruction(NamedTuple):
  name: str
  shape: tuple[Array, ...]  # several of a tuple
  op: str
  rest: str  # what follows the opening parenthesis
  root: bool

  @property
  def operands(self) -> list[str]:
    return re.findall(r'%([\w.\-]+)', self.rest[:_closing(self.rest)])

  def called(self, *attributes: str) -> list[str]:
    """Names of computations."""
    names = []
    for attribute in attributes:
      if found := re.search(rf'\b{attribute}=\{{?([^,{{}}]*(?:, *%[^,{{}}]*)*)', self.rest):
        names += [name.strip().lstrip('%') for name in found[1].split(',')]
    return names


def computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
  """({computation: {name: Instruction}} in the order of the text, the name of the entry)."""
  parts: dict[str, dict[str, Instruction]] = {}
  current, entry = None, ''
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      current = parts.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif line.rstrip() == '}':  # attributes of a kernel may begin a line with }}
      current = None
    elif current is not None and (found := _INSTRUCTION.match(line)):
      name, shape, op, rest = found.groups()
      current[name] = Instruction(name, tuple(_arrays(shape)), op, rest,
                                  line.lstrip().startswith('ROOT'))
  return parts, entry


def _arrays(shape) -> Iterator[Array]:
  for dtype, sizes, layout in _ARRAY.findall(shape):
    bits = re.search(r'\d+', dtype)
    width = int(bits[0]) / 8 if bits else 1 if dtype == 'pred' else 0
    space = re.search(r'S\((\d+)\)', layout)
    yield Array(numbers(sizes), width, int(space[1]) if space else 0)


def turns(loop: Instruction, parts: dict[str, dict[str, Instruction]]) -> int | None:
  """How often a `while` turns, None where the text does not tell."""
  if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.rest):
    return int(known[1])
  # Loops count up from 0 to a number in their condition: scans by ones, and what the compiler
  # makes of a product with a gathered matrix, part by part, by twos.
  for name in loop.called('condition'):
    bounds = _constants(parts.get(name, {}).values())
    if bounds:
      return -(-max(bounds) // _increment(loop, parts[name], parts))
  return None


def _increment(loop, condition, parts):
  index = next((found[1] for y in condition.values() if y.op == 'get-tuple-element'
                and (found := re.search(r'index=(\d+)', y.rest))), None)
  body = parts.get((loop.called('body') or [''])[0], {})
  root = next((y for y in body.values() if y.root), None)
  if index is None or root is None or root.op != 'tuple' or int(index) >= len(root.operands):
    return 1
  counter = body[root.operands[int(index)]]
  added = _constants(body[name] for name in counter.operands if name in body)
  return max(1, *added) if counter.op == 'add' and added else 1


def _constants(instructions):
  return [int(found[1]) for y in instructions
          if y.op == 'constant' and (found := re.match(r'(\d+)\)', y.rest))]


def numbers(text: str) -> tuple[int, ...]:
  """Of a list with commas."""
  return tuple(int(n) for n in text.split(',') if n)


def _closing(text):
  depth = 1
  for i, c in enumerate(text):
    depth += (c == '(') - (c == ')')
    if not depth:
      return i
  return len(text)
