"""Sink metrics on plain attention maps, NumPy or JAX (Section 3.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def importance(attention):
  """Importance alpha_k = sum_{i >= k} A[i, k] / (T - k + 1) of every key.

  Args:
    attention: (..., T, T), rows are queries. Rows i < k are zero under a causal
      mask; where they are not (a prefix), they count too, as in the release.

  Returns:
    (..., T), of the same library as the input.

  Raises:
    ValueError: the last two axes are not square.
  """
  xp = _library(attention)
  attention = xp.asarray(attention)
  if attention.ndim < 2 or attention.shape[-1] != attention.shape[-2]:
    raise ValueError('attention must have shape (..., T, T), queries then keys, not '
                     f'{attention.shape}.')
  length = attention.shape[-1]
  return attention.sum(-2) / (length - xp.arange(length))


def sink_rate(importance, epsilon: float = 0.3):
  """Sink_k^epsilon: the share of heads whose importance of token k exceeds epsilon.

  The threshold is applied to every sequence; then the mean is taken over sequences,
  layers and heads, in the release's order.

  Args:
    importance: (S, N, H, T): sequences, layers, heads, keys.
    epsilon: the threshold; 0.3 throughout the paper.

  Returns:
    (T,), of the same library as the input; entry 0 is Sink_1.
  """
  xp = _library(importance)
  importance = xp.asarray(importance)
  if importance.ndim != 4:
    raise ValueError('importance must have shape (S, N, H, T): sequences, layers, heads, '
                     f'keys, not {importance.shape}.')
  return (importance > epsilon).astype(xp.float32).mean((0, 1, 2))


def emergence_step(steps, rate, level: float = 0.1):
  """The first probed step from which `rate` stays at or above `level`; None if it never does.

  steps, rate: one-dimensional and equally long, in order of time.
  """
  above = np.asarray(rate) >= level
  if not len(above) or not above[-1]:
    return None
  below = np.flatnonzero(~above)
  return int(np.asarray(steps)[below[-1] + 1 if len(below) else 0])


def _library(x):
  return jnp if isinstance(x, jax.Array) else np
