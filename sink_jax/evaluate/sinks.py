"""Sink metrics on plain attention maps, NumPy or JAX (Section 3.2)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.arguments import explained

EPSILON = 0.3  # the paper's threshold of a sink

_ROW_LIMIT = 1.01  # sum of a row of weights: those of a softmax in bfloat16 stay below it
_ROUNDING = 1.001  # of sums over thousands of rows in float32
_PART = 2**22  # numbers
_AXES = ('sequence', 'block', 'head')


@explained
def importance(attention, raw: bool = False):
  """Importance alpha_k = sum_{i >= k} A[i, k] / (T - k + 1) of every key.

  Sums are in float32, or in the dtype of the maps where it is wider; whole numbers and booleans
  count as the weights they are. The values of arrays are checked, those of tracers cannot be.

  Args:
    attention: (..., T, T), rows are queries. Rows i < k are zero under a causal
      mask; where they are not (a prefix), they count too, as in the release.
    raw: the maps hold unnormalised masses, which may be negative, in rows of any sum.

  Returns:
    (..., T), of the same library as the input.

  Raises:
    ValueError: not square, empty, or not of real and finite numbers; without `raw` also a
      negative weight, or a row that sums to more than 1.01. Says where.
  """
  xp = _library(attention)
  attention = _real(xp, attention, 'attention')
  if attention.ndim < 2 or attention.shape[-1] != attention.shape[-2]:
    raise ValueError('attention must have shape (..., T, T), queries then keys, not '
                     f'{attention.shape}.')
  columns = []
  for part in _parts(xp, attention):
    columns.append(_sums(xp, part, -2))
    if isinstance(attention, jax.core.Tracer):
      continue
    # A NaN fails every comparison.
    sound = (xp.isfinite(columns[-1]).all() if raw else
             _sums(xp, part, -1).max() <= _ROW_LIMIT and part.min() >= 0)
    if not sound:
      raise ValueError(_fault_of_maps(np.asarray(attention), raw))
  length = attention.shape[-1]
  return xp.concatenate(columns).reshape(attention.shape[:-1]) / (length - xp.arange(length))


@explained
def sink_rate(importance, epsilon: float = 0.3, raw: bool = False):
  """Sink_k^epsilon: the share of heads whose importance of token k exceeds epsilon.

  The threshold is applied to every sequence; then the mean is taken over sequences,
  layers and heads, in the release's order.

  Args:
    importance: (S, N, H, T): sequences, layers, heads, keys; or of the first keys alone.
    epsilon: the threshold, between 0 and 1; 0.3 throughout the paper.
    raw: the importance is of unnormalised masses, which may be negative or large.

  Returns:
    (T,), of the same library as the input; entry 0 is Sink_1.

  Raises:
    ValueError: another shape, empty, not of real and finite numbers, or epsilon outside (0, 1);
      without `raw` also an importance below 0 or above T / (T - k + 1), which a key k reaches
      that all queries see, under a prefix. Says where.
  """
  xp = _library(importance)
  importance = _real(xp, importance, 'importance')
  if importance.ndim != 4:
    raise ValueError('importance must have shape (S, N, H, T): sequences, layers, heads, '
                     f'keys, not {importance.shape}.')
  check_epsilon(epsilon)
  if not isinstance(importance, jax.core.Tracer):
    keys = importance.shape[-1]
    # Of the first keys alone, this is above the bound of the whole text.
    highest = _ROW_LIMIT * _ROUNDING * keys / (keys - np.arange(keys))
    sound = (xp.isfinite(importance).all() if raw else
             importance.min() >= 0 and (importance.max((0, 1, 2)) <= highest).all())
    if not sound:
      raise ValueError(_fault_of_importance(np.asarray(importance), highest))
  # The dtype of the importance may not hold epsilon.
  above = importance.astype(_wide(xp, importance)) > epsilon
  return xp.count_nonzero(above, axis=(0, 1, 2)) / math.prod(importance.shape[:3])


def check_epsilon(epsilon, name: str = 'epsilon') -> None:
  """Raises a ValueError unless epsilon is a number between 0 and 1; a tracer is not checked."""
  if isinstance(epsilon, jax.core.Tracer):
    return
  try:
    number = float(epsilon)
  except (TypeError, ValueError):
    number = math.nan
  if isinstance(epsilon, str) or not 0 < number < 1:
    raise ValueError(f'{name}={epsilon!r}: importance lies between 0 and 1; the paper uses 0.3.')


@explained
def emergence_step(steps, rate, level: float = 0.1):
  """The first probed step from which `rate` stays at or above `level`; None if it never does.

  steps, rate: one-dimensional and equally long, in order of time.

  Raises:
    ValueError: they are not, or a rate is not finite.
  """
  rate = np.asarray(rate, np.float64)
  if rate.ndim != 1 or np.shape(steps) != rate.shape or not np.isfinite(rate).all():
    raise ValueError('steps and rate must be one-dimensional and equally long, with finite '
                     f'rates; they are {np.shape(steps)} and {rate.shape}.')
  above = rate >= level
  if not len(above) or not above[-1]:
    return None
  below = np.flatnonzero(~above)
  return int(np.asarray(steps)[below[-1] + 1 if len(below) else 0])


def _library(x):
  return jnp if isinstance(x, jax.Array) else np


def _real(xp, x, name):
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


def _wide(xp, x):
  return xp.promote_types(x.dtype, xp.float32)


def _parts(xp, maps):
  """The maps, in NumPy a part at a time: it stays in the cache, and a wider copy of it is small."""
  if xp is jnp or maps.ndim == 2:
    yield maps
    return
  size = max(1, _PART // maps[0].size)
  for i in range(0, len(maps), size):
    yield maps[i:i + size].astype(_wide(np, maps), copy=False)


def _sums(xp, maps, axis):
  """Sums over one of the last two axes."""
  if xp is np:  # which is faster than np.sum
    return np.einsum('...ij->...j' if axis == -2 else '...ij->...i', maps, dtype=_wide(np, maps))
  return maps.sum(axis, dtype=_wide(xp, maps))


def _fault_of_maps(maps, raw):
  """What `importance` refuses, and where."""
  at = lambda bad, last: _place('attention', bad, (*_AXES, 'row', 'key')[:5 if last else 4])
  if (bad := ~np.isfinite(maps)).any():
    return f'{at(bad, True)} is {maps[_first(bad)]}: attention weights are finite numbers.'
  if not raw and (bad := maps < 0).any():
    return (f'{at(bad, True)} is {maps[_first(bad)]:g}, and no attention weight is negative: pass '
            'weights, not scores, or raw=True for unnormalised masses.')
  rows = _sums(np, maps, -1)
  if not raw and (bad := ~(rows <= _ROW_LIMIT)).any():
    return (f'{at(bad, False)} sums to {rows[_first(bad)]:.4g}, and a row of attention weights to '
            'one at most: pass weights, not scores, or raw=True for unnormalised masses.')
  return f'attention: the sums over its rows are beyond what {_wide(np, maps)} holds.'


def _fault_of_importance(alpha, highest_T):
  """What `sink_rate` refuses, and where."""
  bad = ~np.isfinite(alpha)
  if bad.any():
    return (f'{_place("importance", bad, (*_AXES, "key"))} is {alpha[_first(bad)]}: an importance '
            'is a finite number.')
  bad = (alpha < 0) | (alpha > highest_T)
  keys, key = alpha.shape[-1], _first(bad)[-1]
  return (f'{_place("importance", bad, (*_AXES, "key"))} is {alpha[_first(bad)]:.4g}, outside 0 to '
          f'{keys / (keys - key):.4g}: the rows of its attention are no shares of one; raw=True '
          'takes unnormalised masses.')


def _first(bad):
  return tuple(int(i) for i in np.unravel_index(bad.argmax(), bad.shape))


def _place(name, bad, axes):
  """'attention[0, 2, 1] (block, head, row; from 0)': the first bad place, by the last axes."""
  index = _first(bad)
  names = ', '.join(('...', *axes) if len(index) > len(axes) else axes[-len(index):])
  return f'{name}[{", ".join(map(str, index))}] ({names}; from 0)'
