"""Sink metrics on plain attention maps, NumPy or JAX (Section 3.2), and their nulls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Real, Shaped

from sink_jax.evaluate import EPSILON

DRAWS = 500  # of random targets for a null
_ROW_LIMIT = 1.01  # sum of a row of weights: those of a softmax in bfloat16 stay below it

_Array = TypeVar('_Array', Array, np.ndarray)


@runtime_checkable
class Tensor(Protocol):  # of PyTorch, which may need gradients and lie on any device
  def detach(self) -> Any: ...


def importance(attention: Real[_Array, '*lead T T'] | Bool[_Array, '*lead T T'] | Sequence | Tensor,
               raw: bool = False) -> Float[_Array, '*lead T']:
  """Computes the importance alpha_k = sum_{i >= k} A[i, k] / (T - k + 1) of every key.

  Args:
    attention: (..., T, T), queries then keys; an array, a PyTorch tensor, or nested lists or tuples of
      them. Under a prefix mask the rows i < k count too, as in the official implementation
      (sail-sg/Attention-Sink).
    raw: whether the maps hold unnormalised masses, which may be negative, in rows of any sum.

  Returns:
    The importance (..., T), in float32 or wider; an array of JAX for one of JAX, of NumPy for all else.

  Raises:
    ValueError: the maps are not square, or empty, or not of real and finite numbers; without `raw` also
      if a weight is negative or a row sums to more than 1.01. Names the first such row. Tracers pass.
  """
  xp, maps = _array(attention, 'attention')
  if maps.ndim < 2 or maps.shape[-1] != maps.shape[-2]:
    raise ValueError(f'attention must have shape (..., T, T), queries then keys, not {maps.shape}.')
  wide, length = xp.promote_types(maps.dtype, xp.float32), maps.shape[-1]
  alpha = maps.sum(-2, dtype=wide) / (length - xp.arange(length))
  if raw:
    _check('importance of key', xp.isfinite(alpha), alpha, 'attention must be finite')
  else:  # a NaN fails both comparisons
    rows, least = maps.sum(-1, dtype=wide), maps.min(-1)
    _check('sum of attention row', (least >= 0) & (rows <= _ROW_LIMIT), rows,
           'weights are finite and not negative, and a row of them sums to 1.01 at most: pass weights, not '
           'scores, or raw=True for unnormalised masses')
  return alpha


def sink_rate(importance: Real[_Array, 'S N H T'] | Sequence | Tensor,
              epsilon: float | Array = EPSILON) -> Float[_Array, ' T']:
  """Computes Sink_k^epsilon, the share of heads whose importance of token k exceeds epsilon.

  The threshold comes before the mean over sequences, layers and heads, as in the official implementation.

  Args:
    importance: (S, N, H, T); the first three axes may come in any order, and the last may hold only the
      first keys.
    epsilon: the threshold, between 0 and 1; 0.3 throughout the paper.

  Returns:
    The rates (T,), in the library of the importance; entry 0 is Sink_1.

  Raises:
    ValueError: the importance has another shape, epsilon lies outside (0, 1), or an importance lies
      outside 0 and T / (T - k + 1), which a prefix mask reaches. Names the first such.
  """
  xp, alpha = _array(importance, 'importance')
  # Maps with four axes are recognised by causal rows that sum to one.
  square = alpha.ndim == 4 and alpha.shape[-1] == alpha.shape[-2] and not isinstance(alpha, Tracer)
  if alpha.ndim != 4 or square and not xp.triu(alpha, 1).any() and (abs(alpha.sum(-1) - 1) < 0.01).all():
    raise ValueError('importance must have shape (S, N, H, T): sequences, layers, heads, keys. This is '
                     f'{alpha.shape}; of attention maps take sink_rate(importance(maps)).')
  if not isinstance(epsilon, Tracer) and not 0 < epsilon < 1:
    raise ValueError(f'epsilon={epsilon!r}: importance lies between 0 and 1; the paper uses {EPSILON}.')
  keys = alpha.shape[-1]
  # A thousandth for the rounding of long sums. For only the first keys, this exceeds the text's bound.
  highest_T = 1.001 * _ROW_LIMIT * keys / (keys - np.arange(keys))
  _check('importance', (alpha >= 0) & (alpha <= highest_T), alpha,
         'it must be between 0 and T / (T - k + 1), as that of attention weights is')
  # The dtype of the importance may not hold epsilon: bfloat16 rounds 0.3 to 0.3008.
  above = alpha.astype(xp.promote_types(alpha.dtype, xp.float32)) > epsilon
  # A mean of float32 stops counting at 2^24.
  return xp.count_nonzero(above, axis=(0, 1, 2)) / math.prod(alpha.shape[:3])


def emergence_step(steps: Shaped[Array | np.ndarray, ' P'] | Sequence[int],
                   rate: Real[Array | np.ndarray, ' P'] | Sequence[float],
                   level: float = 0.1) -> int | None:
  """Returns the first of ascending steps from which on `rate` stays at or above `level`; None without one.

  Raises a ValueError unless both are one-dimensional and equally long, with finite rates.
  """
  rates_P = np.asarray(rate, np.float64)
  if rates_P.ndim != 1 or np.shape(steps) != rates_P.shape or not np.isfinite(rates_P).all():
    raise ValueError('steps and rate must be one-dimensional and equally long, with finite rates.')
  first = max(np.flatnonzero(rates_P < level), default=-1) + 1
  return int(np.asarray(steps)[first]) if first < len(rates_P) else None


def random_targets(sequences: int, length: int) -> np.ndarray:
  """Indices (DRAWS, S) of a target in each sequence, the same in every call, for nulls.

  A null is the 99th percentile, over the draws, of a measure of the first token taken at random positions
  instead (Xu, arXiv 2606.02378). Targets lie in the first half: few rows see a later token.
  """
  return np.random.default_rng(0).integers(1, max(2, length // 2), (DRAWS, sequences))


def sink_rate_null(importance_SxNxHxT: Float[np.ndarray, 'S N H T'], epsilon: float = EPSILON) -> float:
  """The null of the share of heads above epsilon."""
  sequences, *_, length = importance_SxNxHxT.shape
  rates_SxT = (importance_SxNxHxT > epsilon).mean((1, 2))
  return float(np.percentile(rates_SxT[np.arange(sequences), random_targets(sequences, length)].mean(1), 99))


def hidden_ratio_null(norms_SxMxT: Float[np.ndarray, 'S M T']) -> float:
  """The null of the largest `SinkReport.norm_ratio` of M blocks."""
  sequences, _, length = norms_SxMxT.shape
  at_RxM = norms_SxMxT[np.arange(sequences), :, random_targets(sequences, length)].mean(1, np.float64)
  others_RxM = (norms_SxMxT.mean((0, 2), np.float64) * length - at_RxM) / (length - 1)
  with np.errstate(divide='ignore', invalid='ignore'):
    return float(np.percentile((at_RxM / others_RxM).max(1), 99))


def _array(x: Any, name: str) -> tuple[Any, Any]:
  """(library of an argument, the argument as its array); a ValueError unless it holds real numbers."""
  xp = jnp if isinstance(x, jax.Array) else np
  x = xp.asarray(without_tensors(x))
  if not x.size or not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
    raise ValueError(f'{name} must hold real numbers, not {x.dtype} of shape {x.shape}: for a transformers '
                     "model, load it with attn_implementation='eager' and give it output_attentions=True.")
  return xp, x


def without_tensors(x: Any) -> Any:
  """The argument with NumPy arrays instead of PyTorch's tensors, which is not imported."""
  if isinstance(x, (list, tuple)):
    return [without_tensors(part) for part in x]
  if not isinstance(x, Tensor):
    return x
  tensor = x.detach()  # NumPy has no bfloat16
  return (tensor if 'float64' in str(tensor.dtype) else tensor.float()).cpu().numpy()


def _check(what: str, sound: Any, values: Any, rule: str) -> None:
  """Raises a ValueError that names the first entry that is not sound; tracers are not checked."""
  if isinstance(sound, Tracer) or sound.all():
    return
  index = tuple(map(int, np.unravel_index(int(sound.argmin()), sound.shape)))
  raise ValueError(f'{what} [{", ".join(map(str, index))}] (from 0) is {float(values[index]):.4g}: {rule}.')
