"""Which parts of the parameter tree each tensor of a published checkpoint fills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from sink_jax.attention import Dims
from sink_jax.models.config import ModelConfig

T = TypeVar('T')


def identity(x: np.ndarray) -> np.ndarray:
  """The tensor as it is stored."""
  return x


@dataclasses.dataclass(frozen=True)
class LeafPart:
  """A part of one parameter leaf, and which numbers of a stored tensor it consists of.

  path: of the leaf, such as 'blocks/attention/query/kernel'. The leaves of alike blocks are
    stacked: their first axis is the layer, and of experts the second is the expert.
  index: which part of the leaf, along these axes: (), (layer,) or (layer, expert).
  take: the stored tensor -> that part, in NumPy; a view is enough.
  transposed: the last two axes are then swapped, which the device does.
  """

  path: str
  index: tuple[int, ...] = ()
  take: Callable[[np.ndarray], np.ndarray] = identity
  transposed: bool = False


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a checkpoint.

  shape: in the file; checked.
  parts: of parameters that it fills; several where one tensor holds queries, keys and values;
    none where another tensor is read together with it, or where it is a copy of another.
  optional: a checkpoint may lack it; a part of a leaf that is then not given stays zero.
  quantized: it holds bytes instead of floating-point numbers.
  read_with: full names of tensors read together with it, which have entries of their own.
  copy_of: full name of the tensor that it must equal, as a tied unembedding does.
  combine: (this tensor, *those of `read_with`) -> the one array that `parts` take from.
  instead_of: full names of the tensors in whose place a checkpoint may have this one; see `held`.
  """

  shape: tuple[int, ...]
  parts: tuple[LeafPart, ...] = ()
  optional: bool = False
  quantized: bool = False
  read_with: tuple[str, ...] = ()
  combine: Callable[..., np.ndarray] = identity
  copy_of: str = ''
  instead_of: tuple[str, ...] = ()


def linear(path: str, index: tuple[int, ...], shape: tuple[int, int]) -> StoredTensor:
  """A weight (out, in) as torch.nn.Linear has it, which becomes a kernel (in, out)."""
  return StoredTensor(shape, (LeafPart(path, index, transposed=True),))


def vector(path: str, index: tuple[int, ...], *shape: int, optional: bool = False) -> StoredTensor:
  """A bias, a gain or a table of any number of axes, which stays as it is."""
  return StoredTensor(shape, (LeafPart(path, index),), optional)


def tied(shape: tuple[int, int], embedding: str) -> StoredTensor:
  """The unembedding (V, D) of a tied model, which a checkpoint may hold a second time."""
  return StoredTensor(shape, optional=True, copy_of=embedding)


def beside(*tensors: StoredTensor) -> StoredTensor:
  """One tensor that holds the rows of several, as fused projections (out, in) do."""
  parts, first = [], 0
  for tensor in tensors:
    rows = slice(first, first := first + tensor.shape[0])
    parts += [dataclasses.replace(part, take=_of_rows(rows, part.take)) for part in tensor.parts]
  return StoredTensor((first, *tensors[0].shape[1:]), tuple(parts))


def _of_rows(rows: slice, take: Callable[[np.ndarray], np.ndarray],
             ) -> Callable[[np.ndarray], np.ndarray]:
  return lambda x: take(x[rows])


def group_by_group(path: str, index: tuple[int, ...], leaf: str, dims: Dims,
                   *inputs: int) -> StoredTensor:
  """Queries, keys and values of all heads in one tensor, as GPT-NeoX and Falcon store them.

  For each key head come the queries of its group, then the key and the value.

  Args:
    path: of the attention's leaves. leaf: 'kernel' or 'bias'. inputs: (D,) of a kernel, () of a
      bias.
  """
  group = dims.heads // dims.kv_heads

  def rows(part: slice) -> Callable[[np.ndarray], np.ndarray]:
    # Rows ((H + 2 Hkv) Dh, ...) as (Hkv, group + 2, Dh, ...); a bias has no further axes.
    return lambda x: x.reshape(dims.kv_heads, group + 2, dims.head_dim, *inputs)[:, part].reshape(
        -1, *inputs)

  parts = {'query': slice(group), 'key': slice(group, group + 1), 'value': slice(group + 1, None)}
  return StoredTensor(((dims.heads + 2 * dims.kv_heads) * dims.head_dim, *inputs), tuple(
      # `take` sees a weight as it is stored, (out, in); the device transposes what it picked.
      LeafPart(f'{path}/{ours}/{leaf}', index, rows(part), transposed=leaf == 'kernel')
      for ours, part in parts.items()))


def held(tensors: dict[str, StoredTensor], names: Iterable[str]) -> dict[str, StoredTensor]:
  """A family's table for a checkpoint with tensors of these full names.

  Where it may hold one tensor in the place of others, either that one or the others are left.
  """
  names = set(names)
  missing = {name for name, tensor in tensors.items() if tensor.instead_of and name not in names}
  replaced = {other for name, tensor in tensors.items() if name not in missing
              for other in tensor.instead_of}
  return {name: tensor for name, tensor in tensors.items() if name not in missing | replaced}


def block(config: ModelConfig, layer: int) -> tuple[str, int]:
  """Path of the leaves of a layer's block, and the layer's index along their first axis.

  Blocks that are alike are stacked. In a pattern of several kinds, each kind has a stack: of
  a pattern of two, layer 5 is the entry 2 of 'blocks/layer1'.
  """
  period = len(config.pattern)
  if period == 1:
    return 'blocks', layer
  return f'blocks/layer{layer % period}', layer // period


def shortest_period(items: Sequence[T]) -> tuple[T, ...]:
  """The shortest tuple that, repeated a whole number of times, gives all items."""
  items = tuple(items)
  # Whole repetitions only, since the scan over periods of blocks has no remainder. All items
  # together always qualify, so `next` finds one.
  return next(items[:n] for n in range(1, len(items) + 1)
              if len(items) % n == 0 and items[:n] * (len(items) // n) == items)
