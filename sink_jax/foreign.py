"""Arrays, padded batches and settings of JAX that other programs bring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sink_jax.shapes import Bool, Integer

_NO_NUMPY_DTYPE = ('bfloat16', 'float8')  # dtypes of PyTorch


@runtime_checkable
class Tensor(Protocol):  # of PyTorch, which may need gradients and lie on any device
  def detach(self) -> Any: ...


_Array = jax.Array | np.ndarray
# The two ways to say where the texts of a padded batch lie, see `texts_in`.
TokenMask = Integer[_Array, 'texts tokens'] | Bool[_Array, 'texts tokens'] | Sequence | Tensor


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
  """A context, or decorator, in which JAX promotes ranks and dtypes as by default.

  A program may forbid both, by jax_numpy_rank_promotion and jax_numpy_dtype_promotion. Formulas
  here, and in Flax and Optax, rely on them. Rules of `custom_vjp` need it too: JAX may call them
  after the function has returned.
  """
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
    yield


def as_array(x: Any, name: str) -> Any:
  """Returns an array of JAX as it is, and all else as one of NumPy: PyTorch tensors too, and lists.

  Raises a ValueError with the name of the argument if entries are masked, or a list is ragged.
  """
  if isinstance(x, jax.Array):
    return x
  plain = _plain(x, name)
  try:
    return np.asarray(plain)
  except ValueError:
    raise ValueError(
      f'{name} is a list of parts with different shapes: pad them to one shape, and '
      'give mask=, or give one part at a time.'
    ) from None


def _plain(x: Any, name: str) -> Any:
  """The argument with NumPy arrays instead of masked arrays and of tensors."""
  if isinstance(x, (list, tuple)):
    return [_plain(part, name) for part in x]
  if isinstance(x, np.ma.MaskedArray):
    # A masked entry may be a weight of 0, a key outside of the text, or a fault: it does not say.
    if np.ma.is_masked(x):
      raise ValueError(
        f'{name} has masked entries: give the array that {name}.filled(value) '
        'returns, and mask= for padding.'
      )
    return x.data
  if not isinstance(x, Tensor):
    return x
  tensor = x.detach()
  unknown = any(dtype in str(tensor.dtype) for dtype in _NO_NUMPY_DTYPE)
  return (tensor.float() if unknown else tensor).cpu().numpy()


def library(x: Any) -> Any:
  """The library of an array, `jax.numpy` or `numpy`."""
  return jnp if isinstance(x, jax.Array) else np


def check_entries(what: str, sound: Any, values: Any, rule: str) -> None:
  """Raises a ValueError that names the first entry that is not sound; tracers are not checked."""
  if isinstance(sound, Tracer) or sound.all():
    return
  index = tuple(map(int, np.unravel_index(int(sound.argmin()), sound.shape)))
  where = ', '.join(map(str, index))
  raise ValueError(f'{what} [{where}] (from 0) is {float(values[index]):.4g}: {rule}.')


class Texts(NamedTuple):
  """Where the text of each sequence of a padded batch (S, T) lies."""

  start_S: Any  # the index of its first token
  length_S: Any  # the number of its tokens

  def rows(self, x: np.ndarray) -> list[np.ndarray]:
    """The texts of an array (S, T, ...), each by itself."""
    ends_S = self.start_S + self.length_S
    return [row[start:end] for row, start, end in zip(x, self.start_S, ends_S)]

  def aligned(self, x: Any, *axes: int) -> Any:
    """An array (S, ...) whose texts begin at index 0 of axes of length T; padding comes last."""
    if not isinstance(self.start_S, Tracer) and not self.start_S.any():
      return x
    xp = library(x)
    start_Sx1 = xp.asarray(self.start_S)[:, None]
    for axis in axes:
      length = x.shape[axis]
      index_SxT = (start_Sx1 + xp.arange(length)) % length
      x = xp.take_along_axis(x, _along(index_SxT, axis, x.ndim), axis)
    return x

  def filled(self, x: Any, axis: int, value: float) -> Any:
    """An array (S, ...) of aligned texts, with a value beyond their ends along an axis."""
    xp = library(x)
    inside_SxT = xp.arange(x.shape[axis]) < xp.asarray(self.length_S)[:, None]
    return xp.where(_along(inside_SxT, axis, x.ndim), x, value)


def _along(x_SxT: Any, axis: int, axes: int) -> Any:
  """An array (S, T) with its T along one of several axes; the others have size one."""
  shape = [len(x_SxT), *[1] * (axes - 1)]
  shape[axis] = x_SxT.shape[1]
  return x_SxT.reshape(shape)


def texts_in(
  mask: TokenMask | None,
  sequences: int | None = None,
  length: int | None = None,
  least: int = 1,
) -> Texts | None:
  """Where the texts of a padded batch (S, T) lie; None without a mask.

  Args:
    mask: (S, T), 1 for tokens and 0 for padding on their left or right: an attention_mask.
    sequences, length: S and T of the batch; None if unknown.
    least: the least number of tokens of a text.

  Raises:
    ValueError: the shape does not fit, or a row of the mask is not one run of ones, or too short.
      The values of tracers are not checked.
  """
  if mask is None:
    return None
  mask_SxT = as_array(mask, 'mask')
  shape = tuple(size or given for size, given in zip((sequences, length), mask_SxT.shape))
  sound = mask_SxT.ndim == 2 and mask_SxT.shape == shape
  if sound and not isinstance(mask_SxT, Tracer):
    values = np.asarray(mask_SxT)
    changes = np.diff(values != 0, prepend=False, append=False)
    sound = np.isin(values, (0, 1)).all() and (np.count_nonzero(changes, axis=1) == 2).all()
  if not sound:
    raise ValueError(
      f'mask must have the shape of the tokens, {(sequences or "S", length or "T")}, and in '
      'every row 1 for the tokens, without a gap, and 0 for padding on their left or right.'
    )
  length_S = (mask_SxT != 0).sum(1)
  check_entries('tokens of row', length_S >= least, length_S, f'a text has at least {least} tokens')
  return Texts(mask_SxT.argmax(1), length_S)
