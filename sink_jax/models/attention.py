"""Multi-head attention with any AttentionSpec."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sink_jax.attention.reference import attention_map
from sink_jax.kernels.dispatch import attend, choose, unsupported
from sink_jax.kernels.importance import Importance, streaming_importance
from sink_jax.models.config import ModelConfig
from sink_jax.models.layers import Linear, initializer
from sink_jax.models.record import Want


class Attention(nn.Module):
  """O^l = combine_h(A^{l,h} V^{l,h}) W_O (Eq. 4, generalised by the spec)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD, want: Want | None = None):
    """Returns the output (B, T, D), and what `want` asks for as a dict, else None."""
    config, dims, spec = self.config, self.config.dims, self.config.attention
    heads = lambda n, name: Linear(n * dims.head_dim, config, name=name)(x_BxTxD).reshape(
        *x_BxTxD.shape[:2], n, dims.head_dim)
    q_BxTxHxDh = heads(dims.heads, 'query')
    k_BxTxHkvxDh = heads(dims.kv_heads, 'key')
    v_BxTxHkvxDh = heads(dims.kv_heads, 'value')
    params = {slot: {name: self.param(f'{slot}_{name}', initializer(p.init, config), p.shape,
                                      jnp.float32)
                     for name, p in owned.items()}
              for slot, owned in spec.params(dims).items()}
    o_BxTxHxDh = attend(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params,
                        implementation=config.implementation)
    if config.combine_heads == 'add':
      o = o_BxTxHxDh.sum(2)
    else:
      o = o_BxTxHxDh.reshape(*x_BxTxD.shape[:2], -1)
    out = Linear(config.d_model, config, name='out')(o)
    if want is None:
      return out, None

    tokens = slice(config.sink_tokens, None)
    own = config.implementation if config.implementation in ('chunked', 'pallas') else None
    importance = streaming_importance(spec, q_BxTxHxDh, k_BxTxHkvxDh, params, implementation=own)
    if config.sink_tokens:
      # A learned sink token is an ordinary key; it takes the place of the bias slot. Its own
      # row, which gives it weight one, is what the release counts and the mean leaves out.
      released, rows = importance.normalized[..., 0], q_BxTxHxDh.shape[1]
      importance = Importance(importance.raw[..., tokens], importance.normalized[..., tokens],
                              (released * rows - 1) / (rows - 1), released)
    maps = [None, None]
    if want.maps:
      maps = [attention_map(spec, q_BxTxHxDh, k_BxTxHkvxDh, params,
                            proxy=proxy)[..., tokens, tokens] for proxy in (False, True)]
    norms = spec.qk_norm.queries(q_BxTxHxDh, params.get('qk_norm', {})), spec.qk_norm.keys(
        k_BxTxHkvxDh, params.get('qk_norm', {})), v_BxTxHkvxDh
    norms = [jnp.swapaxes(norm(x), 1, 2)[..., tokens] for x in norms]
    return out, dict(importance=importance, query_norm_BxHxT=norms[0], key_norm_BxHxT=norms[1],
                     value_norm_BxHxT=norms[2], maps_BxHxTxT=maps[0],
                     proxy_maps_BxHxTxT=maps[1])


def training_implementation(config: ModelConfig, length: int) -> str:
  """Name of the implementation of attention for sequences of so many tokens.

  Raises:
    ValueError: `config.implementation` does not run the model here, with the reason.
  """
  q, k = (jax.ShapeDtypeStruct((1, length + config.sink_tokens, heads, config.dims.head_dim),
                               config.dtype) for heads in (config.dims.heads, config.dims.kv_heads))
  name = config.implementation or choose(config.attention, q, k)
  reason = unsupported(name, config.attention, q, k)
  if reason:
    raise ValueError(f"model.implementation = '{name}' does not run this model: {reason}. "
                     "Leave it empty for the choice of the platform; 'chunked' runs everywhere.")
  return name


def norm(x):
  """l2 norm over the last axis, in float32."""
  return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)
