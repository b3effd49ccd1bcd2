"""Normalisations of queries and keys before their rotation."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from sink_jax.attention.param import AnyArray, Dims, Param, rms_norm
from sink_jax.component import Component


class QueryKeyNorm(Component):
  """A normalisation of each query and key by itself; a cache stores the normalised keys."""

  def params(self, dims: Dims) -> dict[str, Param]:
    """Returns the parameters of one layer, {name: Param}."""
    return {}

  def queries(self, q_BxTxHxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    """Returns the normalised queries, in their dtype."""
    return q_BxTxHxDh

  def keys(self, k_BxTxHxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    """Returns the normalised keys, in their dtype."""
    return k_BxTxHxDh


def _check_eps(norm: QueryKeyNorm, eps: float) -> None:
  if not eps >= 0:
    raise ValueError(f'{norm}: eps must be >= 0; 1e-6 is usual.')


class NoQKNorm(QueryKeyNorm):
  """No normalisation: queries and keys stay as they are projected."""


class QKNorm(QueryKeyNorm):
  """RMSNorm over the Dh channels of a head, with a gain for queries and one for keys (Qwen3)."""

  eps: float = 1e-6

  def __post_init__(self):
    _check_eps(self, self.eps)

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'query_gain': Param((dims.head_dim,), 'ones'),
            'key_gain': Param((dims.head_dim,), 'ones')}

  def queries(self, q_BxTxHxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    return rms_norm(q_BxTxHxDh, params['query_gain'], self.eps)

  def keys(self, k_BxTxHxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    return rms_norm(k_BxTxHxDh, params['key_gain'], self.eps)


class ProjectionQKNorm(QueryKeyNorm):
  """RMSNorm over all heads of a token together, with a gain for every channel of every head.

  It is the QK-norm of OLMo 2 (arXiv:2501.00656, Section 3.3.2), which normalises the output of the
  projection before splitting it into heads. Unlike `QKNorm` it keeps the ratios of norms between
  heads.
  """

  eps: float = 1e-6

  def __post_init__(self):
    _check_eps(self, self.eps)

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'query_gain': Param((dims.heads, dims.head_dim), 'ones'),
            'key_gain': Param((dims.kv_heads, dims.head_dim), 'ones')}

  def queries(self, q_BxTxHxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    # Where devices have some of the heads each, the compiler sums the squares over them.
    return rms_norm(q_BxTxHxDh, params['query_gain'], self.eps, axis=(-2, -1))

  def keys(self, k_BxTxHxDh: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    return rms_norm(k_BxTxHxDh, params['key_gain'], self.eps, axis=(-2, -1))
