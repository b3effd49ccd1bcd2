"""What happens to the rows that a kernel returns: bias slots and normalisation.

A kernel computes rows without bias slot and normalizer, and row statistics in
float32. For f = exp the rows are softmax rows and the statistics logarithms.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention.reference import PROXY_EPS, safe_power
from sink_jax.attention.spec import AttentionSpec, Dims, extra_key_logit

ATTENTION = 'attention'  # what a rematerialisation policy calls the results of these kernels


class PartialAttention(NamedTuple):
  """Output of a kernel; every field is differentiable.

  out: sum_j f_ij v_j, for exp sum_j exp(s_ij - lse_i) v_j.
  stat: sum_j f_ij^power; for exp lse_i. power_stat: for exp with power != 1,
  logsumexp_j(power s_ij), else the same as stat.
  """

  out_BxTxHxDh: jax.Array
  row_stats_BxHxT: jax.Array
  power_row_stats_BxHxT: jax.Array


def apply_epilogue(spec: AttentionSpec, q_BxTxHxDh, rows: PartialAttention, params):
  """Adds the bias slot to the rows, normalises them, adds v*; (B, T, H, Dh) float32.

  q_BxTxHxDh: the prepared queries, for the score of the slot.
  """
  heads, head_dim = q_BxTxHxDh.shape[2:]
  own, dims = params.get('kv_bias', {}), Dims(heads, heads, head_dim)
  extra_logit_BxHxT = extra_key_logit(spec, q_BxTxHxDh, params)
  value = spec.kv_bias.value_HxDh(own, dims)
  combine = _exponential if spec.similarity.exponential else _additive
  out, factor = combine(spec, rows, extra_logit_BxHxT, value)
  out = out if factor is None else out * _per_row(factor)
  added = spec.kv_bias.output_HxDh(own, dims)
  return out if added is None else out + added


def apply_softmax_epilogue(spec: AttentionSpec, out_BxTxHxDh, params):
  """The same for softmax rows of a library, which gives no statistic: no bias slot."""
  heads, head_dim = out_BxTxHxDh.shape[2:]
  out = out_BxTxHxDh.astype(jnp.float32) * spec.normalizer.scale
  added = spec.kv_bias.output_HxDh(params.get('kv_bias', {}), Dims(heads, heads, head_dim))
  return out if added is None else out + added


def row_weights(spec: AttentionSpec, q_BxTxHxDh, stat, power_stat, sizes, params):
  """Factors (B, H, T) that turn f_ij, or exp(s_ij - lse_i), into attention.

  sizes: sum_j |f_ij|, unused for exp. Returns the factor of the weights, the factor of
  |f_ij| in row-normalised scores, and the score of the bias slot (None without one).
  """
  slot, power = extra_key_logit(spec, q_BxTxHxDh, params), spec.normalizer.power
  if spec.similarity.exponential:
    lse, power_lse = stat, power_stat
    if slot is not None:
      lse = jnp.logaddexp(stat, slot)
      power_lse = lse if power == 1 else jnp.logaddexp(power_stat, power * slot)
    share = jnp.exp(stat - lse)
    raw = share * jnp.exp(spec.normalizer.log_factor(lse, power_lse))
    return raw, share, None if slot is None else jnp.exp(slot - lse)
  total = stat
  if slot is not None:
    weight = spec.similarity(slot)
    sizes = sizes + jnp.abs(weight)
    if power is not None:
      total = total + (weight if power == 1 else safe_power(weight, power))
  share = 1 / (sizes + PROXY_EPS)
  return spec.normalizer.factor(total), share, None if slot is None else jnp.abs(weight) * share


def _exponential(spec, rows, slot, value):
  out, lse, power_lse = rows.out_BxTxHxDh, rows.row_stats_BxHxT, rows.power_row_stats_BxHxT
  power = spec.normalizer.power
  if slot is not None:
    weight = jax.nn.sigmoid(slot - lse)
    out = out * _per_row(1 - weight)
    if value is not None:
      out = out + _per_row(weight) * value
    lse = jnp.logaddexp(lse, slot)
    power_lse = lse if power == 1 else jnp.logaddexp(power_lse, power * slot)
  return out, jnp.exp(spec.normalizer.log_factor(lse, power_lse))


def _additive(spec, rows, slot, value):
  out, total = rows.out_BxTxHxDh, rows.row_stats_BxHxT
  power = spec.normalizer.power
  if slot is not None:
    weight = spec.similarity(slot)
    if value is not None:
      out = out + _per_row(weight) * value
    if power is not None:
      total = total + (weight if power == 1 else safe_power(weight, power))
  return out, None if power is None else spec.normalizer.factor(total)


def _per_row(x_BxHxT):
  return jnp.swapaxes(x_BxHxT, 1, 2)[..., None]
