"""Which parts of the parameter tree each tensor of a published checkpoint fills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

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
  """

  shape: tuple[int, ...]
  parts: tuple[LeafPart, ...] = ()
  optional: bool = False
  quantized: bool = False
  read_with: tuple[str, ...] = ()
  combine: Callable[..., np.ndarray] = identity
  copy_of: str = ''


def linear(path: str, index: tuple[int, ...], shape: tuple[int, int]) -> StoredTensor:
  """A weight (out, in) as torch.nn.Linear has it, which becomes a kernel (in, out)."""
  return StoredTensor(shape, (LeafPart(path, index, transposed=True),))


def vector(path: str, index: tuple[int, ...], *shape: int, optional: bool = False) -> StoredTensor:
  """A bias, a gain or a table of any number of axes, which stays as it is."""
  return StoredTensor(shape, (LeafPart(path, index),), optional)


def tied(shape: tuple[int, int], embedding: str) -> StoredTensor:
  """The unembedding (V, D) of a tied model, which a checkpoint may hold a second time."""
  return StoredTensor(shape, optional=True, copy_of=embedding)


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
