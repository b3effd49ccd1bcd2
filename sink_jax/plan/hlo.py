"""The text of a compiled program, XLA's HLO, as instructions.

The text is a list of computations. One is the entry; the others are called by instructions:
the body and the condition of a `while`, the inside of a fusion, the sum of an all-reduce.

    %body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
      %p = (s32[], f32[4]{0}) parameter(0)
      ROOT %y = f32[4]{0:S(1)} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
    }

An array is dtype[dims]{layout}; S(1) in the layout is a memory on the chip, and what has no S is
in main memory. An instruction that starts asynchronous work ends in -start, and -done waits for
it. The text has no stable grammar: what is read here are the few parts that have not changed
over years, by regular expressions, and tests hold them against programs of known cost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# f32[4,16]{1,0:T(8,128)S(1)}: dtype, sizes, and the layout with its tiles and its memory.
_ARRAY = re.compile(r'\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?')
# The shape before the operation may be a tuple with parentheses of its own, even in its layouts, so
# it ends only at a blank and a lower-case word that is followed by a parenthesis.
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')


class Array(NamedTuple):
  """The shape of an array: width is the bytes of an element; space 0 is main memory."""

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
  """A line of a computation: name = shape op(operands), attributes."""

  name: str
  shape: tuple[Array, ...]  # several of a tuple
  op: str
  rest: str  # what follows the opening parenthesis
  root: bool

  @property
  def operands(self) -> list[str]:
    """Names of the instructions whose results go in."""
    return re.findall(r'%([\w.\-]+)', self.rest[:_closing(self.rest)])

  def called(self, *attributes: str) -> list[str]:
    """Names of the computations that stand in these attributes, as in calls=%fused.1."""
    names = []
    for attribute in attributes:
      if found := re.search(rf'\b{attribute}=\{{?([^,{{}}]*(?:, *%[^,{{}}]*)*)', self.rest):
        names += [name.strip().lstrip('%') for name in found[1].split(',')]
    return names


# {computation: {name of an instruction: Instruction}}
Computations = dict[str, dict[str, Instruction]]


def computations(text: str) -> tuple[Computations, str]:
  """The computations of a program in the order of its text, and the name of the entry."""
  parts: Computations = {}
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
    # The first number of a dtype is its width: bf16, s4 and f8e4m3fn. `pred` has none and takes a
    # byte; tokens and opaque values have none and take nothing.
    bits = re.search(r'\d+', dtype)
    width = int(bits[0]) / 8 if bits else 1 if dtype == 'pred' else 0
    space = re.search(r'S\((\d+)\)', layout)
    yield Array(parse_ints(sizes), width, int(space[1]) if space else 0)


def trip_count(loop: Instruction, parts: Computations) -> int | None:
  """How often the body of a `while` runs; None where the text does not contain it."""
  if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.rest):
    return int(known[1])
  # Without the annotation: loops count up from 0 to a number in their condition. Scans count by
  # ones; what the compiler makes of a product with a gathered matrix, part by part, by twos.
  for name in loop.called('condition'):
    bounds = _constants(parts.get(name, {}).values())
    if bounds:
      # The condition may compare with other constants too; the bound is the largest. Rounded up:
      # counting to 8 by threes runs at 0, 3 and 6.
      return -(-max(bounds) // _increment(loop, parts[name], parts))
  return None


def _increment(loop, condition, parts):
  # A loop carries a tuple. Its condition reads the counter at some index of it, and the tuple that
  # the body returns has the counter's next value at the same index.
  index = next((found[1] for y in condition.values() if y.op == 'get-tuple-element'
                and (found := re.search(r'index=(\d+)', y.rest))), None)
  body = parts.get((loop.called('body') or [''])[0], {})
  root = next((y for y in body.values() if y.root), None)
  if index is None or root is None or root.op != 'tuple' or int(index) >= len(root.operands):
    return 1
  counter = body[root.operands[int(index)]]
  added = _constants(body[name] for name in counter.operands if name in body)
  # Anything but counter + constant is taken to count by ones, as scans do.
  return max(1, *added) if counter.op == 'add' and added else 1


def _constants(instructions):
  return [int(found[1]) for y in instructions
          if y.op == 'constant' and (found := re.match(r'(\d+)\)', y.rest))]


def parse_ints(text: str) -> tuple[int, ...]:
  """The integers of a list such as '4,16'."""
  return tuple(int(n) for n in text.split(',') if n)


def _closing(text):
  depth = 1
  for i, c in enumerate(text):
    depth += (c == '(') - (c == ')')
    if not depth:
      return i
  return len(text)
