"""T x T attention as the official implementation, sail-sg/Attention-Sink, computes it.

Every step is in the dtype of the inputs. In bfloat16 that is the eager code that its sigmoid and
linear models ran: scores, weights, row sums and products, all in bfloat16. Here XLA compiles it,
which fuses elementwise steps that eager code makes one by one. It is a baseline, not a
definition: its rounding is coarse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.attention.head import PlainOutput
from sink_jax.attention.param import Dims
from sink_jax.attention.spec import (
  AttentionSpec,
  extra_key_logit,
  repeat_heads,
  transform_qk,
  transform_values,
)


def covers(spec: AttentionSpec) -> bool:
  """Whether the official code has it: neither softpick nor a cap, gates or norms of heads."""
  return (spec.similarity.kind != 'rectified' and not spec.similarity.limit
          and type(spec.head) is PlainOutput)


def attend(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
           v_BxTxHkvxDh: jax.Array, params: Mapping[str, Any]) -> jax.Array:
  """Attention output (B, T, H, Dh) of a variant; params as `AttentionSpec.params` lists them.

  Raises:
    NotImplementedError: a variant that the official code does not have.
  """
  if not covers(spec):
    raise NotImplementedError(f'the official code has no {spec.similarity} with {spec.head}')
  q, k = transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
  heads, dtype = q.shape[2], q.dtype
  k = repeat_heads(k, heads)
  v = repeat_heads(transform_values(spec, v_BxTxHkvxDh, params), heads)
  tokens = jnp.arange(q.shape[1])
  i, j = tokens[:, None], tokens[None, :]
  s = jnp.einsum('blhd,bthd->bhlt', q, k) * jnp.asarray(1 / math.sqrt(q.shape[-1]), dtype)
  if spec.position.has_bias:
    slopes_H = jnp.asarray(spec.position.slopes(heads))[:, None, None]
    # The official code adds this bias in bfloat16, where whole numbers above 256 are rounded.
    s = s + (slopes_H * spec.position.distance_bias(i - j)).astype(dtype)
  keep = spec.mask.keep(i, j)
  extra_logit = extra_key_logit(spec, q, params, tokens)
  if extra_logit is not None:  # the extra key is one more column, before the first token
    s = jnp.concatenate([extra_logit.astype(dtype)[..., None], s], -1)
    keep = jnp.pad(keep, ((0, 0), (1, 0)), constant_values=True)
  normalized = {'exponential': _exponential, 'additive': _additive}[spec.similarity.kind]
  weights = normalized(spec, s, keep)
  first = 0 if extra_logit is None else 1
  out = jnp.einsum('bhlt,bthd->blhd', weights[..., first:], v)
  extra_params, dims = params.get('kv_bias', {}), Dims(heads, heads, q.shape[-1])
  value = spec.kv_bias.value_HxDh(extra_params, dims)
  if value is not None:
    out = out + jnp.einsum('bhl,hd->blhd', weights[..., 0], value.astype(dtype))
  added = spec.kv_bias.output_HxDh(extra_params, dims)
  return out if added is None else out + added.astype(dtype)


def _exponential(spec, s, keep):
  weights, power = jax.nn.softmax(jnp.where(keep, s, -jnp.inf), -1), spec.normalizer.power
  if spec.normalizer.clips:
    return spec.normalizer.clipped(weights)
  if power != 1:
    weights = weights / jnp.sum(weights**power, -1, keepdims=True) ** (1 / power)
  return weights * getattr(spec.normalizer, 'scale', 1)


def _additive(spec, s, keep):
  # The mask comes after the function, whose value of a hidden score need not be zero.
  f, power = jnp.where(keep, spec.similarity(s), 0), spec.normalizer.power
  if power is None:
    return f
  total = jnp.sum(f if power == 1 else jnp.where(keep, f**power, 0), -1, keepdims=True)
  return f * spec.normalizer.factor(total).astype(f.dtype)
