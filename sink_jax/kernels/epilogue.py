"""The epilogue of every kernel: the extra key and the normalizer, on finished rows.

A kernel computes rows without extra key and normalizer, and row statistics in float32. For
f = exp the rows are softmax rows and the statistics logarithms; rows of softpick come normalised,
too. What has parameters or differs
between variants is then plain JAX on (B, H, T) statistics, which XLA differentiates.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention.normalizer import AbsSum, RowSum
from sink_jax.attention.reference import PROXY_EPS, safe_power
from sink_jax.attention.similarity import exp_less_one
from sink_jax.attention.spec import AttentionSpec, Dims, Params, extra_key_logit

ATTENTION = 'attention'  # the name of the kernels' results in rematerialisation policies

Shaped = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # something with a shape and a dtype


class PartialAttention(NamedTuple):
  """Output of a kernel; every field is differentiable.

  Attributes:
    out_BxTxHxDh: sum_j f_ij v_j, for exp sum_j exp(s_ij - lse_i) v_j, for softpick normalised.
    row_stats_BxHxT: sum_j f_ij^power, for exp lse_i, for softpick log Z_i; float32.
    power_row_stats_BxHxT: for exp with power != 1, logsumexp_j(power s_ij), for softpick
      max(0, max_j s_ij), without a gradient, else the same as the row statistics.
  """

  out_BxTxHxDh: jax.Array
  row_stats_BxHxT: jax.Array
  power_row_stats_BxHxT: jax.Array


def apply_epilogue(spec: AttentionSpec, q_BxTxHxDh: jax.Array, rows: PartialAttention,
                   params: Params) -> jax.Array:
  """Attention output (B, T, H, Dh) float32: rows with the extra key, normalised.

  Args:
    q_BxTxHxDh: the transformed queries, for the score of the extra key.
  """
  heads, head_dim = q_BxTxHxDh.shape[2:]
  extra_params, dims = params.get('kv_bias', {}), Dims(heads, heads, head_dim)
  extra_logit_BxHxT = _extra_logit(spec, q_BxTxHxDh, params)
  value = spec.kv_bias.value_HxDh(extra_params, dims)
  combine = {'exponential': _exponential, 'additive': _additive,
             'rectified': _rectified}[spec.similarity.kind]
  out, factor = combine(spec, rows, extra_logit_BxHxT, value)
  out = out if factor is None else out * _per_row(factor)
  added = spec.kv_bias.output_HxDh(extra_params, dims)
  return out if added is None else out + added


def apply_softmax_epilogue(spec: AttentionSpec, out_BxTxHxDh: jax.Array,
                           params: Params) -> jax.Array:
  """The same for softmax rows of a library, which gives no statistic: without an extra key."""
  heads, head_dim = out_BxTxHxDh.shape[2:]
  assert isinstance(spec.normalizer, RowSum), 'library kernels refuse others'
  out = out_BxTxHxDh.astype(jnp.float32) * spec.normalizer.scale
  added = spec.kv_bias.output_HxDh(params.get('kv_bias', {}), Dims(heads, heads, head_dim))
  return out if added is None else out + added


def row_weights(
    spec: AttentionSpec, q_BxTxHxDh: jax.Array, stat: jax.Array, power_stat: jax.Array,
    sizes: jax.Array, params: Params) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Factors (B, H, T) that turn f_ij, or what rows came with, into attention.

  Args:
    stat, power_stat: those of `PartialAttention`.
    sizes: sum_j |f_ij|, for softpick of the normalised weights; unused for exp.

  Returns:
    The factor of the weights, the factor of |f_ij| in row-normalised scores, and the
    row-normalised score of the extra key (None without one).
  """
  extra, power = _extra_logit(spec, q_BxTxHxDh, params), spec.normalizer.power
  if spec.similarity.kind == 'exponential':
    lse, power_lse = _with_extra(stat, power_stat, extra, power)
    # The rows came divided by exp(stat); with the extra key they are to be divided by exp(lse).
    share = jnp.exp(stat - lse)
    raw = share * jnp.exp(spec.normalizer.log_factor(lse, power_lse))
    return raw, share, None if extra is None else jnp.exp(extra - lse)
  if spec.similarity.kind == 'rectified':
    if extra is None:
      return jnp.ones_like(stat), 1 / (sizes + PROXY_EPS), None
    raw, weight = _rectified_shares(spec, stat, power_stat, extra)
    share = 1 / (raw * sizes + weight + PROXY_EPS)
    return raw, raw * share, weight * share
  total, extra_size = stat, None
  if extra is not None:
    weight = spec.similarity(extra)
    extra_size = jnp.abs(weight)
    sizes = sizes + extra_size
    if power is not None:
      total = total + (weight if power == 1 else safe_power(weight, power))
  # Added after the extra key, as the definition adds it to the sum of the whole row.
  share = 1 / (sizes + PROXY_EPS)
  return spec.normalizer.factor(total), share, None if extra_size is None else extra_size * share


def _extra_logit(spec: AttentionSpec, q_BxTxHxDh: jax.Array, params: Params) -> jax.Array | None:
  # NumPy positions: a score that depends on them alone is then a constant of the program.
  return extra_key_logit(spec, q_BxTxHxDh, params, np.arange(q_BxTxHxDh.shape[1]))


def _exponential(spec: AttentionSpec, rows: PartialAttention, extra: jax.Array | None,
                 value: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Rows with the extra key and their factor; the rows come divided by exp(lse)."""
  out, lse = rows.out_BxTxHxDh, rows.row_stats_BxHxT
  if extra is not None:
    # exp(extra) / (exp(extra) + exp(lse)), without either exponential: softmax of two.
    weight = jax.nn.sigmoid(extra - lse)
    out = out * _per_row(1 - weight)
    if value is not None:
      out = out + _per_row(weight) * value
  sums = _with_extra(lse, rows.power_row_stats_BxHxT, extra, spec.normalizer.power)
  return out, jnp.exp(spec.normalizer.log_factor(*sums))


def _with_extra(lse: jax.Array, power_lse: jax.Array, extra: jax.Array | None,
                power: float | None) -> tuple[jax.Array, jax.Array]:
  """logsumexp of the scores and of the power-fold scores, the extra key's among them."""
  assert power is not None, 'AttentionSpec refuses exp without a normalisation'
  if extra is None:
    return lse, power_lse
  total = jnp.logaddexp(lse, extra)
  return total, total if power == 1 else jnp.logaddexp(power_lse, power * extra)


def _additive(spec: AttentionSpec, rows: PartialAttention, extra: jax.Array | None,
              value: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
  """Rows with the extra key and their factor; the rows are plain sums of f_ij v_j."""
  out, total = rows.out_BxTxHxDh, rows.row_stats_BxHxT
  power = spec.normalizer.power
  if extra is not None:
    weight = spec.similarity(extra)
    if value is not None:
      out = out + _per_row(weight) * value
    if power is not None:
      total = total + (weight if power == 1 else safe_power(weight, power))
  return out, None if power is None else spec.normalizer.factor(total)


def _rectified(spec: AttentionSpec, rows: PartialAttention, extra: jax.Array | None,
               value: jax.Array | None) -> tuple[jax.Array, None]:
  """Rows with the extra key; they come normalised, so that no factor is left."""
  out = rows.out_BxTxHxDh
  if extra is None:
    return out, None
  share, weight = _rectified_shares(spec, rows.row_stats_BxHxT, rows.power_row_stats_BxHxT, extra)
  out = out * _per_row(share)
  return out if value is None else out + _per_row(weight) * value, None


def _rectified_shares(spec: AttentionSpec, log: jax.Array, largest: jax.Array, extra: jax.Array
                      ) -> tuple[jax.Array, jax.Array]:
  """Of rows of softpick: the factor of the tokens' weights and the weight of the extra key.

  Args:
    log, largest: the statistics of `PartialAttention`; the one contains eps times the other's exp.
  """
  assert isinstance(spec.normalizer, AbsSum), 'AttentionSpec refuses others'
  largest, top = map(jax.lax.stop_gradient, (largest, jnp.maximum(largest, extra)))
  tokens, size = jnp.exp(log - top), exp_less_one(extra, top)
  # eps counts once, relative to the largest score of all: what the tokens' sum lacks is added.
  total = tokens + jnp.abs(size) + spec.normalizer.eps * (1 - jnp.exp(largest - top))
  return tokens / total, jax.nn.relu(size) / total


def _per_row(x_BxHxT: jax.Array) -> jax.Array:
  return jnp.swapaxes(x_BxHxT, 1, 2)[..., None]
