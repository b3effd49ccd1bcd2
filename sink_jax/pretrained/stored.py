"""Where each tensor of a published checkpoint goes in our parameter tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sink_jax.models.config import ModelConfig


def identity(x: np.ndarray) -> np.ndarray:
  """The tensor as it is stored."""
  return x


@dataclasses.dataclass(frozen=True)
class Place:
  """A part of one parameter leaf, and what of a stored tensor it is.

  path: of the leaf, such as 'blocks/attention/query/kernel'.
  index: which part of the leaf, along its leading axes: (), (layer,) or (layer, expert).
  take: the stored tensor -> that part, in NumPy; a view is enough.
  transposed: the last two axes are then swapped, which the device does.
  """

  path: str
  index: tuple[int, ...] = ()
  take: Callable[[np.ndarray], np.ndarray] = identity
  transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Stored:
  """One tensor of a checkpoint.

  shape: in the file; checked.
  places: where it goes; several where one tensor holds queries, keys and values; none
    where it holds nothing of its own, as what is read with another or a tied unembedding.
  optional: a checkpoint may lack it; a part of a leaf that is then not given stays zero.
  quantized: it holds bytes instead of floating-point numbers.
  with_: full names of tensors read together with it, which have entries of their own.
  copy_of: full name of the tensor that it must equal, as a tied unembedding does.
  combine: (this tensor, *those of `with_`) -> the one array that `places` take from.
  """

  shape: tuple[int, ...]
  places: tuple[Place, ...] = ()
  optional: bool = False
  quantized: bool = False
  with_: tuple[str, ...] = ()
  combine: Callable[..., np.ndarray] = identity
  copy_of: str = ''


def linear(path: str, index: tuple[int, ...], shape: tuple[int, int]) -> Stored:
  """A weight (out, in) of torch.nn.Linear, which becomes a kernel (in, out)."""
  return Stored(shape, (Place(path, index, transposed=True),))


def vector(path: str, index: tuple[int, ...], *shape: int, optional: bool = False) -> Stored:
  """A bias, a gain or a table, which stays as it is; of any number of axes."""
  return Stored(shape, (Place(path, index),), optional)


def tied(shape: tuple[int, int], embedding: str) -> Stored:
  """The unembedding (V, D) of a tied model, which a checkpoint may hold a second time."""
  return Stored(shape, optional=True, copy_of=embedding)


def block(config: ModelConfig, layer: int) -> tuple[str, int]:
  """Path of the block that layer l is in, and its place along the leading axis there."""
  period = len(config.pattern)
  if period == 1:
    return 'blocks', layer
  return f'blocks/layer{layer % period}', layer // period


def shortest_period(items: Sequence) -> tuple:
  """The shortest tuple that, repeated a whole number of times, gives all items."""
  items = tuple(items)
  return next(items[:n] for n in range(1, len(items) + 1)
              if len(items) % n == 0 and items[:n] * (len(items) // n) == items)
