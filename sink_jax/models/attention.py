"""Multi-head attention with any AttentionSpec."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sink_jax.attention.reference import attention_map, last_row
from sink_jax.attention.spec import AttentionSpec, transform_qk
from sink_jax.kernels.angles import query_key_angles
from sink_jax.kernels.cached import attend_cached
from sink_jax.kernels.dispatch import attend, choose, unsupported
from sink_jax.kernels.importance import Importance, streaming_importance
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.config import ModelConfig
from sink_jax.models.kv_cache import DecodePositions, KVCache
from sink_jax.models.layers import Linear, initializer
from sink_jax.models.record import RecordOptions


class Attention(nn.Module):
  """O^l = combine_h(A^{l,h} V^{l,h}) W_O (Eq. 4, generalised by the spec)."""

  config: ModelConfig
  spec: AttentionSpec

  @nn.compact
  def __call__(self, x_BxTxD, want: RecordOptions | None = None, cache: KVCache | None = None,
               step: DecodePositions | None = None):
    """Returns the output (B, T, D), what `want` asks for as a dict or None, and the cache.

    With a cache, its slots from the first on take these tokens; with a step besides, the
    tokens see what the cache holds, and are written where the step says.
    """
    config, dims, spec = self.config, self.config.dims, self.spec
    heads = lambda n, name: sharding_constraint('bthd', Linear(
        n * dims.head_dim, config, group='qkv', name=name)(x_BxTxD).reshape(
            *x_BxTxD.shape[:2], n, dims.head_dim))
    q_BxTxHxDh = heads(dims.heads, 'query')
    k_BxTxHkvxDh = heads(dims.kv_heads, 'key')
    v_BxTxHkvxDh = heads(dims.kv_heads, 'value')
    params = {slot: {name: self.param(f'{slot}_{name}', initializer(p.init, config), p.shape,
                                      jnp.float32)
                     for name, p in owned.items()}
              for slot, owned in spec.params(dims).items()}
    if cache is not None:
      slots = jnp.arange(x_BxTxD.shape[1]) if step is None else step.slots_L
      own = params.get('qk_norm', {})
      cache = KVCache(
          cache.k_BxCxHkvxDh.at[:, slots].set(spec.qk_norm.keys(k_BxTxHkvxDh, own)),
          cache.v_BxCxHkvxDh.at[:, slots].set(v_BxTxHkvxDh))
    if step is None:
      o_BxTxHxDh = attend(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params,
                          implementation=config.implementation)
    else:
      o_BxTxHxDh = attend_cached(spec, q_BxTxHxDh, *cache, params, step.queries_L, step.keys_C)
    o_BxTxHxDh = sharding_constraint('bthd', o_BxTxHxDh)
    if config.combine_heads == 'add':
      o = o_BxTxHxDh.sum(2)
    else:
      o = o_BxTxHxDh.reshape(*x_BxTxD.shape[:2], -1)
    out = sharding_constraint('btd', Linear(config.d_model, config, group='out', name='out')(o))
    if want is None:
      return out, None, cache
    return out, self._record(want, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params), cache

  def _record(self, want, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params):
    config, spec = self.config, self.spec
    tokens = slice(config.sink_tokens, None)
    implementation = (config.implementation if config.implementation in ('chunked', 'pallas')
                      else None)
    importance = streaming_importance(spec, q_BxTxHxDh, k_BxTxHkvxDh, params,
                                      implementation=implementation)
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
    q, k = transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
    last = angles = None
    if want.last_query:
      last = last_row(spec, q, k, params)[..., tokens]
    if want.angles:
      angles = query_key_angles(q[:, tokens], k[:, tokens])
    own = params.get('qk_norm', {})
    norms = spec.qk_norm.queries(q_BxTxHxDh, own), spec.qk_norm.keys(k_BxTxHkvxDh, own)
    norms = [jnp.swapaxes(norm(x), 1, 2)[..., tokens] for x in (*norms, v_BxTxHkvxDh)]
    shown = lambda x: x[:, tokens].astype(jnp.float32) if want.queries_keys else None
    return dict(importance=importance, query_norm_BxHxT=norms[0], key_norm_BxHxT=norms[1],
                value_norm_BxHxT=norms[2], maps_BxHxTxT=maps[0], proxy_maps_BxHxTxT=maps[1],
                last_query_BxHxT=last, angles=angles, queries_BxTxHxDh=shown(q),
                keys_BxTxHkvxDh=shown(k))


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
