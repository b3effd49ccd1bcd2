"""The epilogue of the Pallas and library kernels: extra key and normalizer, on finished rows.

A Pallas kernel computes rows without extra key and normalizer, and row statistics in float32. If
f = exp, the rows are softmax rows and the statistics are logarithms. All parameters enter here, in
plain JAX on (B, H, T) statistics, which JAX differentiates.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention.reference import safe_power
from sink_jax.attention.spec import AttentionSpec, Dims, LayerParams, extra_key_logit

ATTENTION = 'attention'  # the name of the kernels' results in rematerialisation policies

Shaped = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # something with a shape and a dtype


class PartialAttention(NamedTuple):
  """Output of the Pallas kernels; every field is differentiable.

  Attributes:
    out_BxTxHxDh: sum_j f_ij v_j; for exp sum_j exp(s_ij - lse_i) v_j.
    row_stats_BxHxT: sum_j f_ij^power, for exp lse_i, for no power zero; float32.
    power_row_stats_BxHxT: for exp with power != 1, logsumexp_j(power s_ij), else the same as the
      row statistics.
  """

  out_BxTxHxDh: jax.Array
  row_stats_BxHxT: jax.Array
  power_row_stats_BxHxT: jax.Array


def apply_epilogue(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  rows: PartialAttention,
  params: LayerParams,
) -> jax.Array:
  """Attention output (B, T, H, Dh): rows with the extra key, normalised.

  It is float32 where something is added.

  Args:
    q_BxTxHxDh: the transformed queries, for the score of the extra key.
  """
  extra_BxHxT, value = extra_key_value(spec, q_BxTxHxDh, params)
  combine = _exponential if spec.similarity.kind == 'exponential' else _additive
  out, factor = combine(spec, rows, extra_BxHxT, value)
  return with_output_bias(spec, out if factor is None else out * per_row(factor), params)


def extra_key_value(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  params: LayerParams,
) -> tuple[jax.Array | None, jax.Array | None]:
  """The score (B, H, T) of the extra key, and its value (H, Dh); None if there is none."""
  # NumPy positions: a score that depends on them only is then a constant of the program.
  extra_BxHxT = extra_key_logit(spec, q_BxTxHxDh, params, np.arange(q_BxTxHxDh.shape[1]))
  # The number of key heads is unknown here and does not matter: extra keys belong to query heads.
  return extra_BxHxT, spec.kv_bias.value_HxDh(params.get('kv_bias', {}), _dims(q_BxTxHxDh))


def with_output_bias(
  spec: AttentionSpec,
  out_BxTxHxDh: jax.Array,
  params: LayerParams,
) -> jax.Array:
  """The output (B, T, H, Dh) plus the bias of every row, if the extra value is one."""
  added = spec.kv_bias.output_HxDh(params.get('kv_bias', {}), _dims(out_BxTxHxDh))
  return out_BxTxHxDh if added is None else out_BxTxHxDh + added


def _dims(x_BxTxHxDh: jax.Array) -> Dims:
  heads, head_dim = x_BxTxHxDh.shape[2:]
  return Dims(heads, heads, head_dim)


def _exponential(
  spec: AttentionSpec,
  rows: PartialAttention,
  extra: jax.Array | None,
  value: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Rows (divided by exp(lse)) with the extra key, and the factor still to be applied to them."""
  out, lse, power_lse = rows
  power = spec.normalizer.power
  assert power is not None, 'AttentionSpec refuses exp without a normalisation'
  if extra is not None:
    # exp(extra) / (exp(extra) + exp(lse)), without either exponential: softmax of two.
    weight = jax.nn.sigmoid(extra - lse)
    out = out * per_row(1 - weight)
    if value is not None:
      out = out + per_row(weight) * value
    lse = jnp.logaddexp(lse, extra)
    power_lse = lse if power == 1 else jnp.logaddexp(power_lse, power * extra)
  return out, jnp.exp(spec.normalizer.log_factor(lse, power_lse))


def _additive(
  spec: AttentionSpec,
  rows: PartialAttention,
  extra: jax.Array | None,
  value: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """Rows (sums of f_ij v_j) with the extra key, and the factor 1/Z_i still to be applied."""
  out, total, power = rows.out_BxTxHxDh, rows.row_stats_BxHxT, spec.normalizer.power
  if extra is not None:
    weight = spec.similarity(extra)
    if value is not None:
      out = out + per_row(weight) * value
    if power is not None:
      total = total + (weight if power == 1 else safe_power(weight, power))
  return out, None if power is None else spec.normalizer.factor(total)


def per_row(x_BxHxT: jax.Array) -> jax.Array:
  return jnp.swapaxes(x_BxHxT, 1, 2)[..., None]
