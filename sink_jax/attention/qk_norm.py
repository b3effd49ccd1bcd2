"""Normalisation of queries and keys before their rotation."""

from __future__ import annotations

import dataclasses

from sink_jax.attention.param import Dims, Param, rms_norm
from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class QueryKeyNorm(Component):

  def params(self, dims: Dims) -> dict[str, Param]:
    return {}

  def queries(self, q_BxTxHxDh, params):
    return q_BxTxHxDh

  def keys(self, k_BxTxHxDh, params):
    return k_BxTxHxDh


@dataclasses.dataclass(frozen=True)
class NoQKNorm(QueryKeyNorm):
  """Queries and keys as projected."""


@dataclasses.dataclass(frozen=True)
class QKNorm(QueryKeyNorm):
  """RMSNorm over Dh with one gain for queries and one for keys (Qwen3)."""

  eps: float = 1e-6

  def params(self, dims):
    return {'query_gain': Param((dims.head_dim,), 'ones'),
            'key_gain': Param((dims.head_dim,), 'ones')}

  def queries(self, q_BxTxHxDh, params):
    return rms_norm(q_BxTxHxDh, params['query_gain'], self.eps)

  def keys(self, k_BxTxHxDh, params):
    return rms_norm(k_BxTxHxDh, params['key_gain'], self.eps)
