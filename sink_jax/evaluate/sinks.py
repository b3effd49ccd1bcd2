"""Sink metrics on plain attention maps, NumPy or JAX (Section 3.2).

This module needs NumPy, JAX and jaxtyping alone, so that it serves maps of any origin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Real, Shaped

from sink_jax.arguments import explained

_ROW_LIMIT = 1.01  # sum of a row of weights: those of a softmax in bfloat16 stay below it
_ROUNDING = 1.001  # of sums over thousands of rows in float32
_PART = 2**22  # numbers that are summed at a time
_AXES = ('sequence', 'block', 'head')

# What comes in as a NumPy array goes out as one, and likewise for JAX.
_Array = TypeVar('_Array', Array, np.ndarray)


@runtime_checkable
class Tensor(Protocol):
  """What is used of a PyTorch tensor, which may need gradients and lie on any device."""

  def detach(self) -> Any: ...


@explained
def importance(attention: Real[_Array, '*lead T T'] | Bool[_Array, '*lead T T'] | Sequence | Tensor,
               raw: bool = False) -> Float[_Array, '*lead T']:
  """Computes the importance alpha_k = sum_{i >= k} A[i, k] / (T - k + 1) of every key.

  Sums are in float32, or in the dtype of the maps if that is wider. Integers and booleans are taken
  as weights. The values of arrays are checked; those of tracers cannot be.

  Args:
    attention: (..., T, T), queries then keys; an array, a PyTorch tensor, or nested lists or tuples
      of them, such as the `attentions` of a transformers model. Under a causal mask A[i, k] is
      zero for i < k. Under a prefix mask it is not, and these rows are added to the sum as well, as
      in the official implementation (sail-sg/Attention-Sink).
    raw: whether the maps hold unnormalised masses, which may be negative, in rows of any sum.

  Returns:
    The importance (..., T), an array of JAX for one of JAX, and of NumPy for all else. That of the
    last keys is a mean over few queries: over one for k = T, and over two for k = T - 1.

  Raises:
    ValueError: the maps are not square, are empty, or do not hold real and finite numbers; without
      `raw` also if a weight is negative or a row sums to more than 1.01. The message names the
      first such entry.
  """
  attention = _without_tensors(attention, 'attention')
  xp = _library(attention)
  maps = _real(xp, attention, 'attention')
  if maps.ndim < 2 or maps.shape[-1] != maps.shape[-2]:
    raise ValueError('attention must have shape (..., T, T), queries then keys, not '
                     f'{maps.shape}.')
  columns = []
  for part in _parts(xp, maps):
    # Axis -2 has the queries, so that a number per key remains.
    columns.append(_sums(xp, part, -2))
    if isinstance(maps, Tracer):
      continue
    # Written so that a NaN, which fails every comparison, counts as unsound.
    sound = (xp.isfinite(columns[-1]).all() if raw else
             _sums(xp, part, -1).max() <= _ROW_LIMIT and part.min() >= 0)
    if not sound:
      raise ValueError(_fault_of_maps(np.asarray(maps), raw))
  length = maps.shape[-1]
  return xp.concatenate(columns).reshape(maps.shape[:-1]) / (length - xp.arange(length))


@explained
def sink_rate(importance: Real[_Array, 'S N H T'] | Sequence | Tensor,
              epsilon: float | Array = 0.3, raw: bool = False) -> Float[_Array, ' T']:
  """Computes Sink_k^epsilon, the share of heads whose importance of token k exceeds epsilon.

  The threshold is applied to each sequence, and then the mean is taken over sequences, layers and
  heads. This is the order of the official implementation (sail-sg/Attention-Sink).

  Args:
    importance: (S, N, H, T): sequences, layers, heads, keys, as `importance` returns it; the first
      three axes may come in any order. The last axis may hold only the first keys.
    epsilon: the threshold, between 0 and 1; 0.3 throughout the paper.
    raw: whether the importance is that of unnormalised masses, which may be negative or large.

  Returns:
    The rates (T,), an array of JAX for one of JAX, and of NumPy for all else; entry 0 is Sink_1.
    The last entries are rates of a mean over few queries, see `importance`.

  Raises:
    ValueError: the importance has another shape, is empty or does not hold real and finite numbers,
      or epsilon lies outside (0, 1); without `raw` also if an importance lies below 0 or above
      T / (T - k + 1), its value where all queries attend to key k alone under a prefix mask. The
      message names the first such entry.
  """
  importance = _without_tensors(importance, 'importance')
  xp = _library(importance)
  alpha = _real(xp, importance, 'importance')
  if _are_maps(xp, alpha):
    raise ValueError(f'these are attention maps, of shape {alpha.shape}: call importance first, as '
                     'in sink_rate(importance(maps)).')
  if alpha.ndim != 4:
    raise ValueError('importance must have shape (S, N, H, T): sequences, layers, heads, '
                     f'keys, not {alpha.shape}.')
  check_epsilon(epsilon)
  if not isinstance(alpha, Tracer):
    keys = alpha.shape[-1]
    # Of the first keys alone, this is above the bound of the whole text.
    highest_T = _ROW_LIMIT * _ROUNDING * keys / (keys - np.arange(keys))
    sound = (xp.isfinite(alpha).all() if raw else
             alpha.min() >= 0 and (alpha.max((0, 1, 2)) <= highest_T).all())
    if not sound:
      raise ValueError(_fault_of_importance(np.asarray(alpha), highest_T))
  # The dtype of the importance may not hold epsilon: bfloat16 rounds 0.3 to 0.3008.
  above = alpha.astype(_wide(xp, alpha)) > epsilon
  # A count of whole numbers is exact, where a mean of float32 stops counting at 2^24.
  return xp.count_nonzero(above, axis=(0, 1, 2)) / math.prod(alpha.shape[:3])


def check_epsilon(epsilon: float | Array, name: str = 'epsilon') -> None:
  """Checks that a threshold lies between 0 and 1; a tracer is not checked.

  Raises:
    ValueError: it lies elsewhere, or is no number.
  """
  if isinstance(epsilon, Tracer):
    return
  try:
    number = float(epsilon)
  except (TypeError, ValueError):
    number = math.nan
  # float('0.3') is a number, but a text compares with no importance.
  if isinstance(epsilon, str) or not 0 < number < 1:
    raise ValueError(f'{name}={epsilon!r}: importance lies between 0 and 1; the paper uses 0.3.')


@explained
def emergence_step(steps: Shaped[Array | np.ndarray, ' P'] | Sequence[int],
                   rate: Real[Array | np.ndarray, ' P'] | Sequence[float],
                   level: float = 0.1) -> int | None:
  """Returns the first step from which on `rate` stays at or above `level`; None without one.

  Args:
    steps: the steps of the P probes, in ascending order.
    rate: the rate at each of them, such as Sink_1.
    level: the level, in the unit of the rate.

  Raises:
    ValueError: `steps` and `rate` are not one-dimensional and equally long, or a rate is not
      finite.
  """
  rates_P = np.asarray(rate, np.float64)
  if rates_P.ndim != 1 or np.shape(steps) != rates_P.shape or not np.isfinite(rates_P).all():
    raise ValueError('steps and rate must be one-dimensional and equally long, with finite '
                     f'rates; they are {np.shape(steps)} and {rates_P.shape}.')
  above = rates_P >= level
  if not len(above) or not above[-1]:
    return None
  # The probe after the last one that was below; the first probe of all if none was.
  below = np.flatnonzero(~above)
  return int(np.asarray(steps)[below[-1] + 1 if len(below) else 0])


def _without_tensors(x, name: str):
  """The argument with NumPy arrays in the place of PyTorch's tensors, which is not imported."""
  if x is None or isinstance(x, (list, tuple)) and any(part is None for part in x):
    raise ValueError(f'{name} is None: transformers returns attention maps of models that are loaded '
                     "with attn_implementation='eager' and called with output_attentions=True.")
  if isinstance(x, Tensor):
    tensor = x.detach()
    # NumPy has no bfloat16.
    return (tensor if 'float64' in str(tensor.dtype) else tensor.float()).cpu().numpy()
  if isinstance(x, (list, tuple)) and x and isinstance(x[0], (Tensor, list, tuple)):
    return [_without_tensors(part, name) for part in x]
  return x


def _are_maps(xp: ModuleType, x) -> bool:
  """Whether an array in the place of importances holds attention maps.

  Of four axes it can also hold importances, unless its rows are shares and causal.
  """
  if x.ndim < 4 or x.shape[-1] != x.shape[-2]:
    return False
  if x.ndim > 4 or isinstance(x, Tracer):
    return x.ndim > 4
  return not xp.triu(x, 1).any() and bool((abs(_sums(xp, x, -1) - 1) < 0.01).all())


def _library(x) -> ModuleType:
  return jnp if isinstance(x, jax.Array) else np


def _real(xp: ModuleType, x, name: str):
  """x as an array of real numbers that is not empty."""
  x = xp.asarray(x)
  if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
    raise ValueError(f'{name} must hold real numbers, not {x.dtype}.')
  if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
    raise ValueError(f'{name} of {x.dtype} is too coarse for sums of shares: give it in float32, '
                     'from before it was rounded.')
  if not x.size:
    raise ValueError(f'{name} of shape {x.shape} is empty.')
  return x


def _wide(xp: ModuleType, x) -> np.dtype:
  return xp.promote_types(x.dtype, xp.float32)


def _parts(xp: ModuleType, maps) -> Iterator:
  """The maps, a part at a time where they are NumPy's.

  A part stays in the processor's cache between its two sums, and its wider copy is small.
  """
  # XLA plans its own passes over an array of JAX, and a single map is its own part.
  if xp is jnp or maps.ndim == 2:
    yield maps
    return
  size = max(1, _PART // maps[0].size)
  for i in range(0, len(maps), size):
    yield maps[i:i + size].astype(_wide(np, maps), copy=False)


def _sums(xp: ModuleType, maps, axis: int):
  """Sums over one of the last two axes."""
  if xp is np:  # einsum is faster than np.sum
    return np.einsum('...ij->...j' if axis == -2 else '...ij->...i', maps, dtype=_wide(np, maps))
  return maps.sum(axis, dtype=_wide(xp, maps))


def _fault_of_maps(maps: np.ndarray, raw: bool) -> str:
  """Why `importance` refuses maps, with the first weight or row that is at fault."""
  at = lambda bad, last: _position('attention', bad, (*_AXES, 'row', 'key')[:5 if last else 4])
  if (bad := ~np.isfinite(maps)).any():
    return f'{at(bad, True)} is {maps[_first(bad)]}: attention weights are finite numbers.'
  if not raw and (bad := maps < 0).any():
    return (f'{at(bad, True)} is {maps[_first(bad)]:g}, and no attention weight is negative: pass '
            'weights, not scores, or raw=True for unnormalised masses.')
  # Last, as a NaN or an infinity spoils the sum of its row too, and naming the entry helps more.
  rows = _sums(np, maps, -1)
  if not raw and (bad := ~(rows <= _ROW_LIMIT)).any():
    return (f'{at(bad, False)} sums to {rows[_first(bad)]:.4g}, and a row of attention weights to '
            'one at most: pass weights, not scores, or raw=True for unnormalised masses.')
  return f'attention: the sums over its rows are beyond what {_wide(np, maps)} holds.'


def _fault_of_importance(alpha: np.ndarray, highest_T: np.ndarray) -> str:
  """Why `sink_rate` refuses an importance, with the first that is at fault."""
  bad = ~np.isfinite(alpha)
  if bad.any():
    return (f'{_position("importance", bad, (*_AXES, "key"))} is {alpha[_first(bad)]}: an '
            'importance is a finite number.')
  bad = (alpha < 0) | (alpha > highest_T)
  keys, key = alpha.shape[-1], _first(bad)[-1]
  return (f'{_position("importance", bad, (*_AXES, "key"))} is {alpha[_first(bad)]:.4g}, outside 0 '
          f'to {keys / (keys - key):.4g}: the rows of its attention are no shares of one; raw=True '
          'takes unnormalised masses.')


def _first(bad: np.ndarray) -> tuple[int, ...]:
  return tuple(int(i) for i in np.unravel_index(bad.argmax(), bad.shape))


def _position(name: str, bad: np.ndarray, axes: tuple[str, ...]) -> str:
  """'attention[0, 2, 1] (block, head, row; from 0)': the first bad entry, by the last axes."""
  index = _first(bad)
  # Maps may have more leading axes than these, or fewer: the names are those of the last ones.
  names = ', '.join(('...', *axes) if len(index) > len(axes) else axes[-len(index):])
  return f'{name}[{", ".join(map(str, index))}] ({names}; from 0)'
