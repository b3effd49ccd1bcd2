"""The cost of a compiled program, read from its text: traffic and matrix products.

The compiler's own analysis counts the body of a loop once, and a step is mostly loops: over
layers, micro-batches and parts of the loss. Here every instruction counts as often as it runs,
the product of the trip counts of the loops around it.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from sink_jax.plan import hlo

# Calls of Pallas kernels, sink_jax's or a library's: Mosaic's on TPUs, Triton's on GPUs.
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton)"')
_KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all',
          'collective-permute', 'collective-broadcast')
# These move nothing by themselves.
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call',
         'conditional', 'partition-id', 'replica-id', 'after-all', 'opt-barrier', 'iota'}


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind of traffic between devices.

  payload: bytes of the whole array on a device: what is summed, or comes out of a gather, or
    goes into a scatter.
  group: the partitions of the first group; all groups are alike.
  count: how often it runs in a step.
  overlapped: whether other work goes on meanwhile.
  """

  kind: str
  payload: float
  group: tuple[int, ...]
  count: float
  overlapped: bool

  @property
  def moved(self) -> float:
    """Bytes that every device sends each time, in a ring, which needs the fewest.

    In a ring of n devices each sends all parts of the array but one, (n - 1) / n of it; an
    all-reduce is a reduce-scatter and an all-gather, one after the other.
    """
    rest = (len(self.group) - 1) / len(self.group)
    if self.kind == 'collective-permute':
      return self.payload
    return self.payload * rest * (2 if self.kind == 'all-reduce' else 1)


@dataclasses.dataclass(frozen=True)
class HloCost:
  """What one device does in a run of the program.

  matmul_flops: of matrix products outside of kernels. bytes: to and from main memory.
  kernel_calls: of kernels, whose FLOPs the text does not contain.
  unknown_loops: loops whose trip count the text does not contain; their bodies count once.
  """

  collectives: tuple[Collective, ...]
  matmul_flops: float
  bytes: float
  kernel_calls: int
  unknown_loops: int


def read(text: str) -> HloCost:
  """Reads the text of a compiled program, `compiled.as_text()`, for a CPU, TPU or GPU."""
  return _Reader(text).read()


class _Reader:

  def __init__(self, text: str):
    header = text[:text.find('\n')]
    # The program is the same for all devices. The header names their number only where it is not
    # one.
    count = re.search(r'num_partitions=(\d+)', header) or re.search(r'replica_count=(\d+)', header)
    self.partitions = int(count[1]) if count else 1
    self.computations, self.entry = hlo.computations(text)
    self.collectives: dict[tuple, Collective] = {}
    self.matmul_flops = self.bytes = 0.0
    self.kernel_calls = self.unknown_loops = 0

  def read(self):
    self._visit(self.entry, 1, fused=False, overlapped=False)
    return HloCost(tuple(self.collectives.values()), self.matmul_flops, self.bytes,
                   self.kernel_calls, self.unknown_loops)

  def _visit(self, name: str, times: int, fused: bool, overlapped: bool) -> None:
    """Adds up a computation that runs so many times.

    fused: it is the inside of a fusion, whose intermediate results never reach main memory: its
    traffic is that of the fusion's operands and results.
    """
    computation = self.computations.get(name, {})
    for x in computation.values():
      kind = x.op.removesuffix('-start')
      if kind in _KINDS:
        self._collective(x, kind, name, times, fused, overlapped or x.op != kind)
      elif x.op in ('convolution', 'dot'):
        self.matmul_flops += times * _product_flops(x, computation)
      elif x.op == 'custom-call' and _KERNEL.search(x.rest):
        self.kernel_calls += times
      if x.op == 'while':
        # The condition of the loop is left out: it compares a counter.
        trips = hlo.trip_count(x, self.computations)
        self.unknown_loops += trips is None
        for body in x.called('body'):
          self._visit(body, times * (trips or 1), fused, overlapped)
      elif x.op in ('fusion', 'call', 'conditional', 'async-start'):
        inner = fused or x.op == 'fusion'
        # All branches of a conditional count, as the text does not contain which is taken.
        for body in x.called('calls', 'to_apply', 'branch_computations', 'true_computation',
                             'false_computation'):
          self._visit(body, times, inner, overlapped or x.op == 'async-start')
      # Inside of a fusion values stay on the chip; its operands and results were counted where it
      # is called.
      if not fused:
        self.bytes += times * self._traffic(x, computation)

  def _collective(self, x, kind, computation, times, fused, overlapped):
    group = _group(x, self.partitions)
    # On TPUs a reduce-scatter is a fusion of this name: an all-reduce, and a slice of its result.
    if kind == 'all-reduce' and 'all-reduce-scatter' in computation:
      kind = 'reduce-scatter'
    sizes = [array.bytes for array in x.shape]
    # A true reduce-scatter has a device's part as its result, and the whole array is as many parts;
    # in the fusion above the all-reduce still has the whole.
    if kind == 'reduce-scatter' and x.op != 'all-reduce':
      payload = sum(sizes) * len(group)
    elif x.op in ('all-gather-start', 'collective-permute-start'):
      # The result is a tuple that has the operand in it, too.
      payload = sum(sizes) - self._operand_bytes(x, computation)
    else:
      payload = sum(sizes)
    # A gather that goes on during several fusions is written in each of them, with the same
    # channel: it is counted once, and it is overlapped with what these fusions compute.
    channel = re.search(r'channel_id=(\d+)', x.rest)
    key = (kind, 'channel', channel[1]) if fused and channel else (kind, computation, x.name)
    inside = fused and kind != 'reduce-scatter'
    before = self.collectives.get(key)
    if before is None:
      # Outside of fusions `_traffic` counts a collective with all other instructions; inside it
      # does not come there.
      self.bytes += times * payload * fused
      self.collectives[key] = Collective(kind, payload, group, times, overlapped or inside)
    elif not fused:  # of a computation that is called from several places
      self.collectives[key] = dataclasses.replace(before, count=before.count + times)

  def _operand_bytes(self, x, computation):
    inside = self.computations[computation]
    return sum(a.bytes for name in x.operands if name in inside for a in inside[name].shape)

  def _traffic(self, x, computation):
    """Bytes that an instruction outside of fusions reads from main memory and writes to it."""
    # Asynchronous work is counted where it starts, or where the computation that it calls is.
    if x.op in _FREE or x.op.endswith('-done') or x.op == 'async-start':
      return 0
    # The operand is read only where the slice lies: its part is read and written, and the rest
    # stays untouched.
    if x.op == 'dynamic-slice':
      return 2 * _main(x.shape)
    # In place: only the slice is read and written, as big as the array may be.
    if x.op == 'dynamic-update-slice':
      return 2 * _main(computation[x.operands[1]].shape) if len(x.operands) > 1 else 0
    if x.op in ('copy-start', 'slice-start'):  # to (0) from (1), and the other way round
      moved = min(array.bytes for array in x.shape[:2])
      return moved * sum(array.space == 0 for array in x.shape[:2])
    operands = [computation[name].shape for name in x.operands if name in computation]
    if x.op == 'custom-call' and not _KERNEL.search(x.rest):
      return 0  # hints and empty buffers
    if x.op in ('all-gather-start', 'collective-permute-start'):
      # The result is a tuple: all operands, as many arrays that come out, and perhaps flags.
      return _main(x.shape[:2 * len(operands)])
    if x.op != 'fusion':
      return _main(x.shape) + sum(map(_main, operands))
    [called] = x.called('calls')
    inside = self.computations[called]
    parameters = {int(y.rest[:y.rest.index(')')]): y for y in inside.values()
                  if y.op == 'parameter'}
    # A fusion may read a slice of an operand, one layer of the stacked weights, say.
    # The smaller of the two, as `_read` counts an operand once for each instruction that uses it,
    # while it is fetched once.
    read = sum(min(_main(shape), self._read(parameters[i], inside))
               for i, shape in enumerate(operands) if i in parameters)
    [root] = [y for y in inside.values() if y.root]
    outputs = [inside[name] for name in root.operands] if root.op == 'tuple' else [root]
    return read + sum(min(array.bytes, self._written(y, inside))
                      for array, y in zip(x.shape, outputs) if array.space == 0)

  def _read(self, parameter, inside):
    """Bytes of a parameter that a fused computation reads."""
    total = 0
    for user in inside.values():
      for index, name in enumerate(user.operands):
        if name != parameter.name:
          continue
        # What only passes the parameter on is looked through.
        if user.op in ('bitcast', 'convert'):
          total += self._read(user, inside)
        elif user.op in ('dynamic-slice', 'slice', 'gather') and index == 0:
          total += sum(array.bytes for array in user.shape)
        elif user.op == 'fusion':
          [called] = user.called('calls')
          nested = self.computations[called]
          total += sum(self._read(y, nested) for y in nested.values()
                       if y.op == 'parameter' and y.rest.startswith(f'{index})'))
        # A tuple reads nothing, what collectives send was counted with them, and the array that a
        # slice is written into stays in its place. Anything else reads the whole.
        elif not (user.op in ('tuple', 'custom-call', *_KINDS)
                  or user.op == 'dynamic-update-slice' and index == 0):
          total += sum(array.bytes for array in parameter.shape)
    return total

  def _written(self, result, inside):
    """Bytes of a result that a fused computation writes; it passes parameters on in place."""
    if result.op in ('parameter', 'get-tuple-element', 'custom-call', *_KINDS):
      return 0
    if result.op == 'bitcast':
      return self._written(inside[result.operands[0]], inside)
    if result.op == 'dynamic-update-slice':
      return sum(array.bytes for array in inside[result.operands[1]].shape)
    if result.op == 'fusion':
      [called] = result.called('calls')
      nested = self.computations[called]
      [root] = [y for y in nested.values() if y.root]
      if root.op != 'tuple':
        return self._written(root, nested)
    return sum(array.bytes for array in result.shape)


def _main(shape):
  return sum(array.bytes for array in shape if array.space == 0)


def _product_flops(x, computation):
  """FLOPs of a batched product, 2 B M N K.

  With the sizes BMK and BKN of the operands and BMN of the result that is
  2 sqrt(BMK BKN BMN / B), whichever axes are contracted; a convolution that stands for a
  product is counted in the same way.
  """
  operands = [computation[name].shape[0] for name in x.operands[:2] if name in computation]
  if len(operands) < 2:
    return 0
  axes = re.search(r'lhs_batch_dims=\{([\d,]+)\}', x.rest)
  batch = math.prod(operands[0].dims[i] for i in hlo.parse_ints(axes[1])) if axes else 1
  return 2 * math.sqrt(operands[0].size * operands[1].size * x.shape[0].size / batch)


def _group(x: hlo.Instruction, partitions: int) -> tuple[int, ...]:
  """The first of the groups of partitions among which a collective runs."""
  if pairs := re.search(r'source_target_pairs=\{\{(\d+),(\d+)\}', x.rest):
    return int(pairs[1]), int(pairs[2])
  if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', x.rest):
    return hlo.parse_ints(listed[1])
  # [groups, size]<=[sizes]T(order): consecutive numbers, transposed.
  if iota := re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', x.rest):
    return tuple(_transposed(iota[2], iota[3]).reshape(hlo.parse_ints(iota[1]))[0].tolist())
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]"
                        r"(?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", x.rest):
    return _named_group(named[1], named[2], named[3], named[4], partitions)
  return tuple(range(partitions))


def _named_group(mesh: str, sizes: str | None, order: str | None, axes: str,
                 partitions: int) -> tuple[int, ...]:
  """The group along the axes {'b'} of mesh['a'=2,'b'=4].

  'b':(2)2 is a part of an axis: it is split into 2, 2 and the rest, of which the second counts.
  """
  shape = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
  # Every axis becomes three: what lies before the part, the part, and what lies after it. The group
  # is all of the chosen parts at index 0 of everything else.
  devices = _transposed(sizes or str(partitions), order)
  split, chosen = [], []
  for name, size in shape.items():
    part = re.search(rf"'{name}'(?::\((\d+)\)(\d+))?(?=,|$)", axes)
    before, extent = (int(part[1]), int(part[2])) if part and part[1] else (1, size)
    chosen += [False, bool(part), False]
    split += [before, extent, size // before // extent]
  index = tuple(slice(None) if keep else 0 for keep in chosen)
  return tuple(devices.reshape(split)[index].ravel().tolist())


def _transposed(sizes: str, order: str | None) -> np.ndarray:
  """Partitions in the order of their numbers, in an array of these sizes, transposed."""
  shape = hlo.parse_ints(sizes)
  partitions = np.arange(math.prod(shape)).reshape(shape)
  return partitions.transpose(hlo.parse_ints(order)) if order else partitions
