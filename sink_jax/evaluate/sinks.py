"""Sink metrics on plain attention maps, NumPy or JAX (Section 3.2), and their nulls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sink_jax.evaluate import EPSILON
from sink_jax.foreign import (
  Tensor,
  Texts,
  TokenMask,
  as_array,
  check_entries,
  library,
  standard_promotion,
  texts_in,
)
from sink_jax.shapes import Array, Bool, Float, Real, Shaped

DRAWS = 500  # of random targets for a null
_ROW_LIMIT = 1.01  # sum of a row of weights: those of a softmax in bfloat16 stay below it
_ON_PADDING = 1e-6  # of a row's weight; a model that reads the mask gives exactly 0

_Array = TypeVar('_Array', Array, np.ndarray)


@standard_promotion()
def importance(
  attention: Real[_Array, '*lead T T'] | Bool[_Array, '*lead T T'] | Sequence | Tensor,
  raw: bool = False,
  *,
  mask: TokenMask | None = None,
) -> Float[_Array, '*lead T']:
  """Computes the importance alpha_k = sum_{i >= k} A[i, k] / (T - k + 1) of every key.

  For a padded batch it is the importance of each text by itself: k counts from the first token of a
  text, T is its length, and keys beyond its end are NaN. Padding on the left is refused without
  `mask`. Padding on the right cannot be recognised: without `mask` it counts as text.

  Args:
    attention: (..., T, T), queries then keys; an array, a PyTorch tensor, or nested lists or tuples
      of them. Under a prefix mask the rows i < k count too, as in the official implementation
      (sail-sg/Attention-Sink).
    raw: whether the maps hold unnormalised masses, which may be negative, in rows of any sum.
    mask: (S, T), 1 for tokens and 0 for padding on their left or right: the attention_mask. S is
      the first axis of an array, and of each array in a list: transformers' `attentions` are a
      tuple with maps (S, H, T, T) of each layer.

  Returns:
    The importance (..., T), in float32 or wider; an array of JAX for one of JAX, of NumPy for all
    else.

  Raises:
    ValueError: the maps are not square, or empty, or not of real and finite numbers; without `raw`
      also if a weight is negative or a row sums to more than 1.01. Names the first such row. Also
      if the mask does not fit, queries of a text see padding, or a sequence has padding on its
      left and no mask. The values of tracers pass.
  """
  layers = _layers(attention)
  parts = [attention] if layers is None else layers
  names = ['attention'] if layers is None else [f'attention[{n}]' for n in range(len(layers))]
  given = [_maps(*part) for part in zip(parts, names)]
  shape = given[0].shape
  for name, maps in zip(names, given):
    if maps.shape != shape:
      raise ValueError(
        f'{name} has shape {maps.shape}, and attention[0] has {shape}: all layers '
        'have the same sequences, heads and tokens.'
      )
  texts = None
  if mask is not None:
    if len(shape) < 3:
      raise ValueError(f'mask= needs maps (S, ..., T, T), not {shape}.')
    texts = texts_in(mask, shape[0], shape[-1])
  elif not any(isinstance(maps, Tracer) for maps in given):
    _refuse_padding(given)
  alphas = [_importance(maps, raw, texts, name) for maps, name in zip(given, names)]
  joined: Any = alphas[0] if layers is None else np.stack(list(map(np.asarray, alphas)))
  return joined


def maps_of_layers(attentions: Any) -> list[Any]:
  """The maps (S, H, T, T) of each layer; a ValueError if `attentions` is something else."""
  layers = [_maps(maps, f'attentions[{n}]') for n, maps in enumerate(attentions)]
  if not layers or any(maps.ndim != 4 for maps in layers):
    raise ValueError(
      'attentions must be maps (S, H, T, T) of each layer: sequences, heads, '
      f'queries, keys; here these have shapes {[maps.shape for maps in layers]}. '
      'Of one layer give a list: [map].'
    )
  return layers


def _layers(attention: Any) -> list[Any] | None:
  """The maps of each layer, if that is what a list holds; None for maps in one array."""
  nested = lambda x: isinstance(x, (list, tuple))
  if not nested(attention) or any(map(nested, attention)):
    return None
  layers = [as_array(x, f'attention[{n}]') for n, x in enumerate(attention)]
  return layers if layers and all(x.ndim > 2 for x in layers) else None


def _maps(attention: Any, name: str) -> Any:
  """The maps of an argument as an array."""
  maps = real_array(attention, name)
  if maps.ndim < 2 or maps.shape[-1] != maps.shape[-2]:
    raise ValueError(f'{name} must have shape (..., T, T), queries then keys, not {maps.shape}.')
  return maps


def _importance(maps: Any, raw: bool, texts: Texts | None, name: str) -> Any:
  """The importance of maps; with texts, of maps (S, ..., T, T)."""
  xp, size = library(maps), maps.shape[-1]
  if texts is not None:
    maps = texts.filled(texts.aligned(maps, -2, -1), -2, 0)  # a row of padding may be NaN
    padding = abs(maps - texts.filled(maps, -1, 0)).sum(-1)
    check_entries(
      f'weight on padding in {name} row',
      padding < _ON_PADDING,
      padding,
      'queries of a text see only its tokens: give the model the same attention_mask',
    )
    size = xp.asarray(texts.length_S).reshape(-1, *[1] * (maps.ndim - 2))  # next to (S, ..., T)
  wide = xp.promote_types(maps.dtype, xp.float32)
  rows_seeing_k = xp.maximum(size - xp.arange(maps.shape[-1]), 1)  # T - k + 1
  alpha = maps.sum(-2, dtype=wide) / rows_seeing_k
  if raw:
    check_entries('importance of key', xp.isfinite(alpha), alpha, f'{name} must be finite')
  else:  # a NaN fails both comparisons
    rows, least = maps.sum(-1, dtype=wide), maps.min(-1)
    check_entries(
      f'sum of {name} row',
      (least >= 0) & (rows <= _ROW_LIMIT),
      rows,
      'weights are finite and not negative, and a row of them sums to 1.01 at most: '
      'pass weights, not scores, or raw=True for unnormalised masses',
    )
  return alpha if texts is None else texts.filled(alpha, -1, xp.nan)


def _refuse_padding(layers: Sequence[Any]) -> None:
  """Raises a ValueError if a sequence has padding on its left, in all layers and heads.

  The first p queries are padding if each gives weight to all keys from p on, as softmax does where
  every key is masked, or no weight at all, and if all later queries give the first p keys exactly
  0. Under a causal mask or a window a first query sees only itself, and later queries see the keys
  of a prefix.

  Args:
    layers: maps (S, ..., T, T) of each layer, or one array with all layers as its first axis.
  """
  # Fast for most maps: in every layer the last query gives a first key of padding no weight.
  if layers[0].shape[-1] < 2 or not all((maps[..., -1, 0] == 0).any() for maps in layers):
    return
  padded = np.stack([_may_be_padding(maps) for maps in layers])  # (N, S, ..., T - 1)
  padded = padded.reshape(len(layers), *padded.shape[1:-1] or (1,), -1)
  axes_of_sequences = (1, 2) if len(layers) == 1 and layers[0].ndim > 4 else (1,)
  for axis in axes_of_sequences:
    others = tuple(set(range(padded.ndim - 1)) - {axis})
    sequences, counts = np.nonzero(padded.all(others))
    if sequences.size:
      sequence = sequences[0]
      count = counts[sequences == sequence].max() + 1
      raise ValueError(
        f'sequence {sequence} (from 0) has {count} tokens of padding on its left, '
        'which would count as its first tokens: give mask=, the attention_mask '
        '(S, T) of the tokenizer, with ones where they are tokens after all.'
      )


def _may_be_padding(maps: Any) -> np.ndarray:
  """(..., T - 1): does a map look as if its first p = 1 .. T - 1 tokens were padding?"""
  xp, length = library(maps), maps.shape[-1]
  seen = maps != 0

  def last(x: Any, axis: int) -> np.ndarray:
    """The index of the last True along an axis; -1 without one."""
    index = length - 1 - xp.flip(x, axis).argmax(axis)
    return np.asarray(xp.where(x.any(axis), index, -1))

  unseen_by_some = ~seen & seen.any(-1)[..., None]  # a query without any weight is left out
  p = np.arange(1, length)
  before_p = lambda x: np.maximum.accumulate(x, -1)[..., :-1] < p
  return before_p(last(seen, -2)) & before_p(last(unseen_by_some, -1))


@standard_promotion()
def sink_rate(
  importance: Real[_Array, 'S N H T'] | Sequence | Tensor,
  epsilon: float | Array = EPSILON,
) -> Float[_Array, ' T']:
  """Computes Sink_k^epsilon: in which share of heads and sequences token k exceeds epsilon.

  It is a share of all pairs of a head and a sequence. The threshold comes before the mean over
  sequences, layers and heads, as in the official implementation. With texts of different lengths,
  the rate of token k is a mean over those that have a token k.

  Args:
    importance: (S, N, H, T); the first three axes may come in any order, and the last may hold only
      the first keys. Keys beyond the end of a text are NaN, as `importance` returns them.
    epsilon: the threshold, between 0 and 1; 0.3 throughout the paper.

  Returns:
    The rates (T,), in the library of the importance; entry 0 is Sink_1. They are shares, 0.745 for
    the 74.5 % that reports print. NaN for a token that no text has.

  Raises:
    ValueError: the importance has another shape, epsilon lies outside (0, 1), or an importance lies
      outside 0 and T / (T - k + 1), which a prefix mask reaches, or is NaN and not beyond the end
      of a text. Names the first such.
  """
  alpha = checked_importance(importance)
  xp = library(alpha)
  if not isinstance(epsilon, Tracer) and not 0 < epsilon < 1:
    raise ValueError(
      f'epsilon={epsilon!r}: importance lies between 0 and 1; the paper uses {EPSILON}.'
    )
  # The dtype of the importance may not hold epsilon: bfloat16 rounds 0.3 to 0.3008.
  above = alpha.astype(xp.promote_types(alpha.dtype, xp.float32)) > epsilon
  # A mean of float32 stops counting at 2^24.
  count = lambda x: xp.count_nonzero(x, axis=(0, 1, 2))
  with np.errstate(invalid='ignore'):  # 0 / 0 for a token that no text has
    return count(above) / count(~xp.isnan(alpha))


def checked_importance(importance: Any) -> Any:
  """The array of an importance (S, N, H, T); a ValueError as of `sink_rate`."""
  alpha = real_array(importance, 'importance')
  if alpha.ndim != 4 or _are_maps(alpha):
    remedy = (
      'of the map (S, H, T, T) of one layer take sink_rate(importance([map])), a list'
      if alpha.ndim == 3
      else 'of attention maps take sink_rate(importance(maps))'
    )
    raise ValueError(
      'importance must have shape (S, N, H, T): sequences, layers, heads, keys. '
      f'This is {alpha.shape}; {remedy}.'
    )
  xp = library(alpha)
  keys, missing = xp.arange(alpha.shape[-1]), xp.isnan(alpha)
  # A text has at least one token: a row of NaN is not beyond its end.
  size = xp.maximum(xp.logical_not(missing).sum(-1, keepdims=True), 1)
  # Texts end at the same key in all layers and heads: along two of the axes there is one end.
  is_one = [(size == xp.take(size, xp.asarray([0]), axis)).all() for axis in range(3)]
  # A thousandth for the rounding of long sums. For only the first keys, this exceeds the text's
  # bound.
  highest = 1.001 * _ROW_LIMIT * size / xp.maximum(size - keys, 1)
  beyond = missing & (keys >= size) & (sum(is_one) >= 2)
  check_entries(
    'importance',
    beyond | (alpha >= 0) & (alpha <= highest),
    alpha,
    'it must be between 0 and T / (T - k + 1), as that of attention weights is, or NaN '
    'beyond the end of a text',
  )
  return alpha


def _are_maps(alpha: Any) -> bool:
  """True if an array (S, N, H, K) with H = K > 1 holds causal attention maps instead.

  Their rows sum to one and their diagonal is positive. Importances that do so are those of a first
  head that gives all keys but the first exactly 0, a second one that gives 0 to all but two, and so
  on.
  """
  heads, keys = alpha.shape[-2:] if alpha.ndim == 4 else (1, 1)
  if heads != keys or keys == 1 or isinstance(alpha, Tracer):
    return False
  maps = np.asarray(alpha)
  sums, diagonal = maps.sum(-1), np.diagonal(maps, axis1=-2, axis2=-1)
  causal = not np.triu(maps, 1).any()
  return causal and bool((abs(sums - 1) < 0.01).all() and (diagonal > 0).all())


def emergence_step(
  steps: Shaped[Array | np.ndarray, ' P'] | Sequence[int],
  rate: Real[Array | np.ndarray, ' P'] | Sequence[float],
  level: float = 0.1,
) -> int | None:
  """Returns the first of ascending steps from which on `rate` stays at or above `level`, or None.

  Raises a ValueError unless both are one-dimensional and equally long, with finite rates.
  """
  steps_P = np.asarray(as_array(steps, 'steps'))
  rates_P = np.asarray(as_array(rate, 'rate'), np.float64)
  if rates_P.ndim != 1 or steps_P.shape != rates_P.shape or not np.isfinite(rates_P).all():
    raise ValueError('steps and rate must be one-dimensional and equally long, with finite rates.')
  first = max(np.flatnonzero(rates_P < level), default=-1) + 1
  return int(steps_P[first]) if first < len(rates_P) else None


def random_targets(length_S: np.ndarray) -> np.ndarray:
  """Indices (DRAWS, S) of a target in each text, the same in every call, for nulls.

  A null is the 99th percentile, over the draws, of a measure of the first token taken at random
  positions instead (Xu, arXiv 2606.02378). Targets lie in the first half: few rows see a later
  token.
  """
  ends_S = np.maximum(2, length_S // 2)
  return np.random.default_rng(0).integers(1, ends_S, (DRAWS, len(length_S)))


def text_lengths(values: Float[np.ndarray, 'S *others T']) -> np.ndarray:
  """The lengths (S,) of texts, beyond whose ends values are NaN."""
  sequences, *_, length = values.shape
  of_first_head_SxT = values.reshape(sequences, -1, length)[:, 0]
  return np.count_nonzero(~np.isnan(of_first_head_SxT), axis=1)


def sink_rate_null(
  importance_SxNxHxT: Float[np.ndarray, 'S N H T'], epsilon: float = EPSILON
) -> float:
  """The null of the share of heads above epsilon."""
  length_S = text_lengths(importance_SxNxHxT)
  rates_SxT = (importance_SxNxHxT > epsilon).mean((1, 2))
  at_RxS = rates_SxT[np.arange(len(length_S)), random_targets(length_S)]
  return float(np.percentile(at_RxS.mean(1), 99))


def hidden_ratio_null(norms_SxMxT: Float[np.ndarray, 'S M T']) -> float:
  """The null of the largest `SinkReport.norm_ratio` of M blocks."""
  length_S = text_lengths(norms_SxMxT)
  at_RxSxM = norms_SxMxT[np.arange(len(length_S)), :, random_targets(length_S)].astype(np.float64)
  totals_SxM = np.nansum(norms_SxMxT, -1, np.float64)
  others_RxSxM = (totals_SxM - at_RxSxM) / (length_S[:, None] - 1)
  with np.errstate(divide='ignore', invalid='ignore'):
    ratios_RxM = at_RxSxM.mean(1) / others_RxSxM.mean(1)
  return float(np.percentile(ratios_RxM.max(1), 99))


def real_array(x: Any, name: str) -> Any:
  """An argument as the array of its library; a ValueError unless it holds real numbers."""
  x = as_array(x, name)
  kinds = (jnp.floating, jnp.integer, jnp.bool_)
  if not x.size or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
    raise ValueError(
      f'{name} must hold real numbers, not {x.dtype} of shape {x.shape}: for a '
      "transformers model, load it with attn_implementation='eager' and give it "
      'output_attentions=True.'
    )
  return x
