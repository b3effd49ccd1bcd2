"""Cosines and norm products of queries and keys in memory linear in T (Section 3.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention.spec import repeat_heads


class Angles(NamedTuple):
  """Products of queries and keys by head (B, H), averaged over the queries t > 1.

  Fields that end in first are for key 1, those that end in others for the mean over 1 < j <= t.

  Attributes:
    cosine_*: cos(q_t, k_j).
    norm_product_*: |q_t| |k_j| / sqrt(Dh).
    score_*: cosine times norm product, which is the logit of softmax if positions are rotary,
      learned or absent.
  """

  cosine_first: jax.Array  # (B, H)
  cosine_others: jax.Array
  norm_product_first: jax.Array
  norm_product_others: jax.Array
  score_first: jax.Array
  score_others: jax.Array


def query_key_angles(q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array) -> Angles:
  """The angles of transformed queries and keys, T > 1.

  The sum of q_t . k_j over j <= t is q_t times a running sum of keys: no T x T product.
  """
  length, heads, head_dim = q_BxTxHxDh.shape[1:]
  q = q_BxTxHxDh.astype(jnp.float32)
  k = repeat_heads(k_BxTxHkvxDh, heads).astype(jnp.float32)
  size = lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True)
  tiny = jnp.finfo(jnp.float32).tiny  # a zero vector has a cosine of zero, not nan
  scale = 1 / math.sqrt(head_dim)
  unit = lambda x: x / jnp.maximum(size(x), tiny)
  pairs = {'cosine': (unit(q), unit(k)), 'norm_product': (size(q) * scale, size(k)),
           'score': (q * scale, k)}
  others_T = jnp.arange(1, length)[:, None]  # keys 2..t of the queries t = 2..T
  means = {}
  for name, (queries, keys) in pairs.items():
    product = lambda k: jnp.sum(queries[:, 1:] * k, -1).mean(1)
    means[f'{name}_first'] = product(keys[:, :1])
    means[f'{name}_others'] = product(jnp.cumsum(keys[:, 1:], 1) / others_T[:, :, None])
  return Angles(**means)
