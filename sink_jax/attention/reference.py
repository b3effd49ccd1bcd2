"""The definition of every attention variant, T x T, on complete rows.

Kernels are tested against it, and maps of a recorded model come from it. The extra key is one more
column of scores here, while the kernels add it to finished rows.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sink_jax.attention import MASKED, AnyArray, Dims, soft_cap
from sink_jax.attention.normalizer import AbsSum, Clipped
from sink_jax.attention.spec import (
  AttentionSpec,
  LayerParams,
  TransformedQK,
  extra_key_logit,
  transform_qk,
)
from sink_jax.foreign import standard_promotion

# Added to the sums of |f| in proxy scores by the official code, sail-sg/Attention-Sink.
PROXY_EPS = 1e-8


class Rows(NamedTuple):
  """Attention weights A = f / Z of complete rows, and their row-normalised proxy.

  The proxy is |f| / (sum_j |f| + 1e-8), the paper's score for attention that is not normalised. For
  exp it is softmax; for softpick f is max(exp(s) - 1, 0); for clipped softmax A replaces f. Entries
  of the extra key are None without one.
  """

  weights_BxHxLxT: jax.Array
  proxy_BxHxLxT: jax.Array
  extra_weights_BxHxL: jax.Array | None
  extra_proxy_BxHxL: jax.Array | None


def scores(
  spec: AttentionSpec,
  q_BxLxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  i_L: jax.Array,
  j_T: jax.Array,
) -> jax.Array:
  """Scores (B, H, L, T) of transformed queries and keys at positions i_L and j_T, float32."""
  B, L, H, Dh = q_BxLxHxDh.shape
  # One product serves the query heads of a group: repeating the keys would copy the cache for every
  # decoded token.
  q_BxLxHkvxGxDh = q_BxLxHxDh.reshape(B, L, k_BxTxHkvxDh.shape[2], -1, Dh)
  # Transposed before the product, since the scores would be transposed after it. Summed and kept in
  # float32: rounding s to bfloat16 would change exp(s) by a share of up to 2^-9 s.
  s = jnp.einsum(
    'bkgld,btkd->bkglt',
    jnp.moveaxis(q_BxLxHkvxGxDh, 1, 3),
    k_BxTxHkvxDh,
    preferred_element_type=jnp.float32,
  ).reshape(B, H, L, -1) / math.sqrt(Dh)
  if spec.position.has_bias:
    # The bias joins after the division by sqrt(Dh), so its size does not depend on the head width.
    slopes_H = jnp.asarray(spec.position.slopes(H))
    s = s + slopes_H[:, None, None] * spec.position.distance_bias(i_L[:, None] - j_T[None, :])
  return soft_cap(s, spec.similarity.cap)


def rows(
  spec: AttentionSpec,
  q_BxLxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  params: LayerParams,
  i_L: jax.Array,
  j_T: jax.Array,
) -> Rows:
  """Attention of the transformed queries at positions i_L to the transformed keys at j_T."""
  s = scores(spec, q_BxLxHxDh, k_BxTxHkvxDh, i_L, j_T)
  keep = spec.mask.keep(i_L[:, None], j_T[None, :])
  own_LxT, edit = i_L[:, None] == j_T, params.get('edit', {})
  if 'keep' in edit:  # keys (B, H, T) that later queries do not see
    keep = keep & (edit['keep'][:, :, None, j_T] | own_LxT)
  extra = extra_key_logit(spec, q_BxLxHxDh, params, i_L)
  if extra is not None:  # column 0, which every query sees
    s = jnp.concatenate([extra[..., None], s], -1)
    keep = jnp.pad(keep, [(0, 0)] * (jnp.ndim(keep) - 1) + [(1, 0)], constant_values=True)
  normalized = {'exponential': _exponential, 'additive': _additive, 'rectified': _rectified}[
    spec.similarity.kind
  ]
  weights, proxy = normalized(spec, s, keep)
  extras = (None, None) if extra is None else (weights[..., 0], proxy[..., 0])
  if extra is not None:
    weights, proxy = weights[..., 1:], proxy[..., 1:]
  if 'values' in edit:  # keys (B, T) whose values later queries do not read
    weights = jnp.where(edit['values'][:, None, None, j_T] | own_LxT, weights, 0)
  return Rows(weights, proxy, *extras)


def _exponential(spec, s, keep):
  s = jnp.where(keep, s, MASKED)
  lse = jax.nn.logsumexp(s, -1, keepdims=True)
  power = spec.normalizer.power
  assert power is not None, 'AttentionSpec refuses exp without a normalisation'
  power_lse = lse if power == 1 else jax.nn.logsumexp(power * s, -1, keepdims=True)
  # Masked a second time: in a row without any key lse is near MASKED, and exp(s - lse) is not 0.
  softmax = jnp.where(keep, jnp.exp(s - lse), 0)
  if isinstance(spec.normalizer, Clipped):
    weights = spec.normalizer.clipped(softmax)
    return weights, weights / (weights.sum(-1, keepdims=True) + PROXY_EPS)
  # Relative to lse throughout, since exp(s) by itself overflows float32 at s = 89. In a row without
  # any key both sums are near MASKED, and their difference is rounding.
  factor = jnp.where(lse > MASKED / 2, spec.normalizer.log_factor(lse, power_lse), 0)
  return softmax * jnp.exp(factor), softmax


def _additive(spec, s, keep):
  # Masked after f, so that a hidden key has f = 0 for every similarity. The inner where keeps the
  # derivative of f finite at hidden scores.
  f = jnp.where(keep, spec.similarity(jnp.where(keep, s, 0)), 0)
  size = jnp.abs(f)  # shares of signed similarities could be negative or larger than one
  proxy = size / (size.sum(-1, keepdims=True) + PROXY_EPS)
  power = spec.normalizer.power
  if power is None:
    return f, proxy
  # Masked again, as `safe_power` lifts every f to a floor, and f^0 is 1.
  density = f if power == 1 else jnp.where(keep, safe_power(f, power), 0)
  return f * spec.normalizer.factor(density.sum(-1, keepdims=True)), proxy


def _rectified(spec, s, keep):
  assert isinstance(spec.normalizer, AbsSum), 'AttentionSpec refuses others'
  s = jnp.where(keep, s, 0)  # exp(0) - 1 adds nothing to the sum or the weights
  # The factor of eps is a constant for the gradient, as in the released kernels.
  largest = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), 0))
  # exp(s - largest) - exp(-largest), by expm1 near s = 0. The minimum keeps expm1 finite where it
  # is not used: a gradient through `where` takes both.
  near = jnp.expm1(jnp.minimum(s, 1)) * jnp.exp(-largest)
  f = jnp.where(s < 1, near, jnp.exp(s - largest) - jnp.exp(-largest))
  weights = jax.nn.relu(f) / (jnp.abs(f).sum(-1, keepdims=True) + spec.normalizer.eps)
  return weights, weights / (weights.sum(-1, keepdims=True) + PROXY_EPS)


def safe_power(f: jax.Array, power: float) -> jax.Array:
  """f^power with a finite derivative at 0; f must not be negative unless the power is 0."""
  # For power < 1 the derivative power f^(power - 1) is infinite at f = 0; at 1e-30 it is finite.
  return jnp.ones_like(f) if power == 0 else jnp.maximum(f, 1e-30) ** power


def attend(
  spec: AttentionSpec,
  q_BxLxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  params: LayerParams,
  i_L: jax.Array,
  j_T: jax.Array,
) -> jax.Array:
  """Output (B, L, H, Dh) of transformed queries at positions i_L and transformed keys at j_T."""
  a = rows(spec, q_BxLxHxDh, k_BxTxHkvxDh, params, i_L, j_T)
  return mixed(spec, a, v_BxTxHkvxDh, params).astype(q_BxLxHxDh.dtype)


def mixed(spec: AttentionSpec, a: Rows, v_BxTxHkvxDh: jax.Array, params: LayerParams) -> jax.Array:
  """Values mixed by rows of attention, (B, L, H, Dh) float32; the caller rounds it, once."""
  B, H, L, T = a.weights_BxHxLxT.shape
  weights_BxHkvxGxLxT = a.weights_BxHxLxT.reshape(B, v_BxTxHkvxDh.shape[2], -1, L, T)
  # In the dtype of the weights, float32 in the definition, since the errors of kernels are measured
  # against it; `kernels.chunked` rounds them to the dtype of the values.
  values_BxTxHkvxDh = v_BxTxHkvxDh.astype(weights_BxHkvxGxLxT.dtype)
  out = jnp.einsum(
    'bkglt,btkd->bkgld', weights_BxHkvxGxLxT, values_BxTxHkvxDh, preferred_element_type=jnp.float32
  )
  # transposed here, since XLA would transpose the weights
  out = jnp.moveaxis(out, 3, 1).reshape(B, L, H, -1)
  extra_params, dims = params.get('kv_bias', {}), Dims(H, *v_BxTxHkvxDh.shape[2:])
  value = spec.kv_bias.value_HxDh(extra_params, dims)
  if value is not None:
    out = out + jnp.einsum('bhl,hd->blhd', a.extra_weights_BxHxL, value.astype(jnp.float32))
  # The V bias has no attention weight, so no normalizer acts on it.
  added = spec.kv_bias.output_HxDh(extra_params, dims)
  return out if added is None else out + added.astype(jnp.float32)


def last_row(spec: AttentionSpec, qk: TransformedQK, params: LayerParams) -> jax.Array:
  """Normalised (proxy) scores (B, H, T) of the last of the queries."""
  tokens = jnp.arange(qk.q_BxTxHxDh.shape[1])
  a = rows(spec, qk.q_BxTxHxDh[:, -1:], qk.k_BxTxHkvxDh, params, tokens[-1:], tokens)
  return a.proxy_BxHxLxT[:, :, 0]


@standard_promotion()
def attention_map(
  spec: AttentionSpec,
  q_BxTxHxDh: Float[AnyArray, 'B T H Dh'],
  k_BxTxHkvxDh: Float[AnyArray, 'B T Hkv Dh'],
  params: LayerParams | None = None,
  *,
  proxy: bool = False,
) -> Float[Array, 'B H T T']:
  """Returns the attention weights A (B, H, T, T) between tokens, float32; for small T only.

  Rows of softmax sum to one; with an extra key they sum to one minus the weight of that key.
  Embeddings of positions are not applied, see `attend`.
  params: {component: {name: array}}, as for `attend`, which raises the same errors. proxy: whether
  to return the row-normalised proxy scores instead (for softmax the same).
  """
  params = params or {}
  a = maps(spec, transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params), params)
  return a.proxy_BxHxLxT if proxy else a.weights_BxHxLxT


def maps(spec: AttentionSpec, qk: TransformedQK, params: LayerParams) -> Rows:
  """All rows of tokens 0..T-1, with L = T."""
  tokens = jnp.arange(qk.q_BxTxHxDh.shape[1])
  return rows(spec, *qk, params, tokens, tokens)
