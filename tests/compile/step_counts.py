"""How much a compiled training step moves and computes for residuals, the loss and traffic."""

from sink_jax.plan import hlo, hlo_cost

# These move data and compute nothing.
_MOVES = {'copy', 'dynamic-slice', 'dynamic-update-slice', 'slice', 'transpose', 'reshape',
          'concatenate'}


def count(text: str, layers: int, sequences: int, length: int, blocks: float,
          unembedding: float) -> dict[str, float]:
  """The counts of a training step from the text of its program: bytes, FLOPs of one device.

  bytes: to and from main memory. products: FLOPs of matrix products outside of kernels.
  filled_stacks: residual stacks that are filled with one number before they are written. A
    residual stack holds something of every token for every layer: its first axis is that of
    the layers, another one that of the positions.
  copied_residuals: read and written only to move residuals into stacks or out of them.
  moved: read and written by all instructions that only move data, these included.
  loss_waste: products beyond those that are needed, over those with the unembedding.
  all_reduces, sent: instructions that are run, and bytes that a device sends in all traffic.

  Args:
    sequences: of a device in a micro-batch, of `length` tokens.
    blocks, unembedding: FLOPs of the matrix products that they need in the step, forward and
      backward.
  """
  if layers == sequences:
    raise ValueError('layers and sequences must differ: a stack is known by its first axis.')
  cost = hlo_cost.read(text)
  parts, entry = hlo.computations(text)
  lengths = {length, sequences * length}
  is_stack = lambda array: bool(array.dims[:1] == (layers,) and lengths & set(array.dims[1:]))
  filled = copied = moved = 0
  for x, inside, times in _executed(parts, entry):
    filled += times * _filled(x, inside, parts, is_stack)
    moving, of_stacks = _moved(x, inside, parts, is_stack)
    moved += times * moving
    copied += times * of_stacks
  crossing = [collective for collective in cost.collectives if len(collective.group) > 1]
  return {
      'bytes': cost.bytes, 'products': cost.matmul_flops, 'filled_stacks': filled,
      'copied_residuals': copied, 'moved': moved,
      'loss_waste': (cost.matmul_flops - blocks) / unembedding - 1,
      'all_reduces': sum(collective.count for collective in crossing
                         if collective.kind == 'all-reduce'),
      'sent': sum(collective.count * collective.moved for collective in crossing),
      'unknown_loops': cost.unknown_loops}


def _executed(parts, name, times=1):
  """(instruction, its computation, how often it is run) of what is no part of a fusion."""
  for x in parts.get(name, {}).values():
    yield x, parts[name], times
    if x.op == 'while':
      for body in x.called('body'):
        yield from _executed(parts, body, times * (hlo.trip_count(x, parts) or 1))
    elif x.op in ('call', 'conditional', 'async-start'):
      for body in x.called('calls', 'to_apply', 'branch_computations', 'true_computation',
                           'false_computation'):
        yield from _executed(parts, body, times)


def _filled(x, inside, parts, is_stack):
  return sum(array.bytes for array, y, within in _results(x, inside, parts)
             if is_stack(array) and _is_fill(y, within))


def _is_fill(y, within):
  """Whether an array holds one number everywhere."""
  y = _through(y, within, {'bitcast', 'copy', 'reshape', 'convert'})
  return y.op == 'broadcast' and not within[y.operands[0]].shape[0].dims


def _moved(x, inside, parts, is_stack):
  """(bytes that x reads and writes only to move data, of these in and out of stacks)."""
  total = stacked = 0
  for array, y, within in _results(x, inside, parts):
    y = _through(y, within, {'bitcast'})
    if array.space or y.op not in _MOVES or x.op not in (*_MOVES, 'fusion'):
      continue
    put = y.op == 'dynamic-update-slice'
    moving = within[y.operands[1]] if put else y
    source = _through(moving, within, _MOVES | {'bitcast'})
    if x.op == 'fusion' and source.op != 'parameter':
      continue
    size = 2 * moving.shape[0].bytes
    total += size
    stacked += size * (is_stack(array) or not put and is_stack(source.shape[0]))
  return total, stacked


def _results(x, inside, parts):
  """(array, instruction that makes it, the computation that this is in) of what is written."""
  if x.op != 'fusion':
    return [(x.shape[0], x, inside)] if len(x.shape) == 1 else []
  within = parts[x.called('calls')[0]]
  [root] = [y for y in within.values() if y.root]
  made = [within[name] for name in root.operands] if root.op == 'tuple' else [root]
  return [(array, y, within) for array, y in zip(x.shape, made)]


def _through(y, within, ops):
  while y.op in ops and y.operands and y.operands[0] in within:
    y = within[y.operands[0]]
  return y
