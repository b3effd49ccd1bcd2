"""Multi-head attention with any AttentionSpec."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sink_jax.attention.reference import last_row, maps, rows
from sink_jax.attention.spec import AttentionSpec, Params, TransformedQK, normalize_qk, position_qk
from sink_jax.kernels.dispatch import attend_transformed, choose, unsupported
from sink_jax.kernels.importance import Importance, transformed_importance
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.config import ModelConfig
from sink_jax.models.decode import DecodePositions, KVCache, attend_cached
from sink_jax.models.layers import Linear, initializer
from sink_jax.models.record import LayerRecord, RecordOptions


class FirstValues(NamedTuple):
  """The projected values of the first block, for later blocks."""

  v_BxTxHkvxDh: jax.Array
  read: jax.Array  # whether the first block has been read, (); before, the values are zeros


class Attention(nn.Module):
  """O^l = combine_h(A^{l,h} V^{l,h}) W_O (Eq. 4, generalised by the spec)."""

  config: ModelConfig
  spec: AttentionSpec

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, record_options: RecordOptions | None = None,
               cache: KVCache | None = None, positions: DecodePositions | None = None,
               first: FirstValues | None = None,
               ) -> tuple[jax.Array, LayerRecord | None, KVCache | None, FirstValues | None]:
    """Returns the output (B, T, D), the record, keys and values, and the first block's values.

    With a cache the tokens attend to it at `positions`, and keys and values are returned as the cache stores
    them; None without a cache.
    """
    config, dims, spec = self.config, self.config.dims, self.spec
    # 'bthd' splits batch and heads over the mesh, so attention itself needs no communication.
    heads = lambda n, name: sharding_constraint('bthd', Linear(
        n * dims.head_dim, config, group='qkv', name=name)(x_BxTxD).reshape(
            *x_BxTxD.shape[:2], n, dims.head_dim))
    q_BxTxHxDh = heads(dims.heads, 'query')
    k_BxTxHkvxDh = heads(dims.kv_heads, 'key')
    v_BxTxHkvxDh = heads(dims.kv_heads, 'value')
    # Names are flat in the checkpoint, such as 'kv_bias_key', and nested for the functions of attention.
    params = {component: {name: self.param(f'{component}_{name}', initializer(p.init, config),
                                           p.shape, jnp.float32)
                          for name, p in parameters.items()}
              for component, parameters in spec.params(dims).items()}
    normalized = q, k = normalize_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
    projected_BxTxHkvxDh = v_BxTxHkvxDh
    v_BxTxHkvxDh = spec.value.values(v_BxTxHkvxDh, params.get('value', {}),
                                     None if first is None else first.v_BxTxHkvxDh)
    if first is not None:
      # One program serves all blocks of a loop: in the first, the values stay as they are.
      v_BxTxHkvxDh = jnp.where(first.read, v_BxTxHkvxDh, projected_BxTxHkvxDh)
      first = FirstValues(jnp.where(first.read, first.v_BxTxHkvxDh, projected_BxTxHkvxDh),
                          jnp.ones_like(first.read))
    gate_BxTxD = x_BxTxD if spec.head.reads_input else None
    transformed = new = None
    if positions is not None:
      kept = k if positions.kept_L is None else spec.position.rotate(k, positions.kept_L)
      new = KVCache(*(jnp.swapaxes(x, 1, 2) for x in (kept, v_BxTxHkvxDh)))
    if positions is None or positions.keys_LxE is None:
      # Tokens that begin a text attend only to each other, so the implementations without a cache apply.
      transformed, v_BxTxHkvxDh, params = self.mixed(
          position_qk(spec, q, k, params), v_BxTxHkvxDh, params)
      o_BxTxHxDh = attend_transformed(spec, transformed, v_BxTxHkvxDh, params, gate_BxTxD,
                                      implementation=config.implementation)
    else:
      assert cache is not None and new is not None
      o = attend_cached(spec, q, cache, new, params, positions)
      o_BxTxHxDh = spec.head.output(o, v_BxTxHkvxDh, gate_BxTxD, params.get('head', {}))
    o_BxTxHxDh = self.head_outputs(sharding_constraint('bthd', o_BxTxHxDh.astype(x_BxTxD.dtype)))
    o = (o_BxTxHxDh.sum(2) if config.combine_heads == 'add' else
         o_BxTxHxDh.reshape(*x_BxTxD.shape[:2], -1))
    out = sharding_constraint('btd', Linear(config.d_model, config, group='out', name='out')(o))
    if record_options is None:
      return out, None, new, first
    assert transformed is not None, 'a decoding step records nothing'
    record = self._record(record_options, normalized, transformed, v_BxTxHkvxDh, o_BxTxHxDh,
                          params)
    return out, record, new, first

  def mixed(self, transformed: TransformedQK, v_BxTxHkvxDh: jax.Array,
            params: Params) -> tuple[TransformedQK, jax.Array, Params]:
    """Returns what attention reads; analyses intercept it (`nn.intercept_methods`) to edit its arguments."""
    return transformed, v_BxTxHkvxDh, params

  def head_outputs(self, o_BxTxHxDh: jax.Array) -> jax.Array:
    """Returns the heads' outputs, which W_O reads; analyses intercept it like `mixed`."""
    return o_BxTxHxDh

  def _record(self, options: RecordOptions, normalized: tuple[jax.Array, jax.Array],
              transformed: TransformedQK, v_BxTxHkvxDh: jax.Array, o_BxTxHxDh: jax.Array,
              params: Params) -> LayerRecord:
    """normalized: queries and keys for the norms; transformed: queries and keys for the scores."""
    spec, sinks = self.spec, self.config.sink_tokens
    # Records are about tokens: the rows and columns of learned sink tokens are cut off.
    tokens = slice(sinks, None)
    importance = transformed_importance(spec, transformed, params, entropy=options.entropy)
    if sinks:
      importance = _without_sink_rows(spec, transformed, params, importance, sinks)
    q, k = transformed
    norms = [jnp.swapaxes(l2_norm(x), 1, 2)[..., tokens]
             for x in (*normalized, v_BxTxHkvxDh, o_BxTxHxDh)]
    weights = proxy = None
    if options.maps:
      weights, proxy = (x[..., tokens, tokens] for x in maps(spec, transformed, params)[:2])
    shown = lambda x: x[:, tokens].astype(jnp.float32) if options.queries_keys else None
    return LayerRecord(importance, *norms)._replace(
        maps_BxHxTxT=weights, proxy_maps_BxHxTxT=proxy,
        last_query_BxHxT=(last_row(spec, transformed, params)[..., tokens] if options.last_query
                          else None),
        angles=options.angles(q[:, tokens], k[:, tokens]) if options.angles else None,
        queries_BxTxHxDh=shown(q), keys_BxTxHkvxDh=shown(k))


def l2_norm(x: jax.Array) -> jax.Array:
  """The l2 norm over the last axis, in float32."""
  return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)


def _without_sink_rows(spec: AttentionSpec, transformed: TransformedQK, params: Params,
                       importance: Importance, sink_tokens: int) -> Importance:
  """The importance of tokens only; learned sink tokens together count as an extra key.

  The rows of sink tokens are left out of the means, except of the entropy's, unlike in the official code
  (sail-sg/Attention-Sink).
  """
  q, k = transformed
  length = k.shape[1]
  # Under most masks these rows see only sink tokens; under a prefix mask they see tokens too.
  of_sinks = rows(spec, q[:, :sink_tokens], k, params, jnp.arange(sink_tokens), jnp.arange(length))
  weights, proxy = of_sinks.weights_BxHxLxT.sum(2), of_sinks.proxy_BxHxLxT.sum(2)
  rows_seeing_k = length - jnp.arange(length)  # the divisors that importance has
  tokens, sinks = slice(sink_tokens, None), slice(sink_tokens)
  received = (importance.normalized * rows_seeing_k)[..., sinks].sum(-1)  # of all rows together
  return Importance(importance.raw[..., tokens] - (weights / rows_seeing_k)[..., tokens],
                    importance.normalized[..., tokens] - (proxy / rows_seeing_k)[..., tokens],
                    (received - proxy[..., sinks].sum(-1)) / (length - sink_tokens),
                    received / length, importance.entropy)


def training_implementation(config: ModelConfig, length: int) -> str:
  """The implementations of attention in the blocks, for sequences of `length` tokens, joined by commas.

  Raises a ValueError, with the reason, if `config.implementation` does not run a block here.
  """
  q, k = (jax.ShapeDtypeStruct((1, length + config.sink_tokens, heads, config.dims.head_dim),
                               config.dtype) for heads in (config.dims.heads, config.dims.kv_heads))
  names = []
  for spec in (config.attention_of(layer) for layer in config.pattern if not layer.mamba):
    names.append(config.implementation or choose(spec, q, k))
    if reason := unsupported(names[-1], spec, q, k):
      raise ValueError(f"model.implementation = '{names[-1]}' does not run this model: {reason}. "
                       "Leave it empty for the choice of the platform; 'chunked' runs everywhere.")
  return ', '.join(dict.fromkeys(names))
