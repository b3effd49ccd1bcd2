"""Multi-head attention with any AttentionSpec."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sink_jax.attention.reference import last_row, maps, rows
from sink_jax.attention.spec import (
  AttentionSpec,
  TransformedQK,
  normalize_qk,
  position_qk,
  transform_values,
)
from sink_jax.kernels.cached import attend_cached, attend_cached_each
from sink_jax.kernels.dispatch import attend_transformed, choose, unsupported
from sink_jax.kernels.importance import Importance, transformed_importance
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.config import ModelConfig
from sink_jax.models.kv_cache import AttentionCache, DecodePositions, RotatedKVCache, written
from sink_jax.models.layers import Linear, initializer
from sink_jax.models.record import AttentionRecord, RecordOptions

# {component of the spec: {name: its parameter}}
ComponentParams = dict[str, dict[str, jax.Array]]


class FirstValues(NamedTuple):
  """The projected values of the first block, on their way through the blocks.

  read: whether the first block has been read, (); before, the values are zeros.
  """

  v_BxTxHkvxDh: jax.Array
  read: jax.Array


class Attention(nn.Module):
  """O^l = combine_h(A^{l,h} V^{l,h}) W_O (Eq. 4, generalised by the spec)."""

  config: ModelConfig
  spec: AttentionSpec

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, record_options: RecordOptions | None = None,
               cache: AttentionCache | None = None, positions: DecodePositions | None = None,
               first: FirstValues | None = None,
               ) -> tuple[jax.Array, AttentionRecord | None, AttentionCache | None,
                          FirstValues | None]:
    """Returns the output (B, T, D), the record, keys and values, and the first block's values.

    With a cache alone, the tokens begin the texts: they attend to each other. With `positions` too,
    they attend to what the cache holds, as `DecodePositions` says. The keys and values returned are
    those of the tokens alone, as the cache keeps them; None without a cache.
    """
    config, dims, spec = self.config, self.config.dims, self.spec
    # The layout 'bthd' splits batch and heads over the mesh; length and head dimension stay whole
    # on each device, so attention itself needs no communication.
    heads = lambda n, name: sharding_constraint('bthd', Linear(
        n * dims.head_dim, config, group='qkv', name=name)(x_BxTxD).reshape(
            *x_BxTxD.shape[:2], n, dims.head_dim))
    q_BxTxHxDh = heads(dims.heads, 'query')
    # Shared key heads stay as few as they are: repeated here, they would take H / Hkv times the
    # memory, in the cache as well.
    k_BxTxHkvxDh = heads(dims.kv_heads, 'key')
    v_BxTxHkvxDh = heads(dims.kv_heads, 'value')
    # Flat names in the checkpoint, such as 'kv_bias_key'; nested for the functions of attention.
    params = {component: {name: self.param(f'{component}_{name}', initializer(p.init, config),
                                           p.shape, jnp.float32)
                          for name, p in parameters.items()}
              for component, parameters in spec.params(dims).items()}
    q_BxTxHxDh, k_BxTxHkvxDh = normalize_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
    v_BxTxHkvxDh, first = _mixed_values(spec, v_BxTxHkvxDh, params, first)
    new, rotated = None, isinstance(cache, RotatedKVCache)
    if cache is not None:
      at_L = jnp.arange(x_BxTxD.shape[1]) if positions is None else positions.kept_L
      kept = spec.position.rotate(k_BxTxHkvxDh, at_L) if rotated else k_BxTxHkvxDh
      new = type(cache)(*(jnp.swapaxes(x, 1, 2) for x in (kept, v_BxTxHkvxDh)))
    gate_BxTxD = x_BxTxD if spec.head.reads_input else None
    transformed = None
    # Tokens that begin a text attend to each other only, so the ordinary implementations serve.
    if cache is None or positions is None:
      transformed = position_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
      o_BxTxHxDh = attend_transformed(spec, transformed, v_BxTxHkvxDh, params, gate_BxTxD,
                                      implementation=config.implementation)
    elif positions.keys.ndim == 1:
      assert new is not None
      seen = written(cache, new, positions.entries_L)
      o_BxTxHxDh = attend_cached(
          spec, q_BxTxHxDh, seen.k_BxHkvxCxDh, seen.v_BxHkvxCxDh, params, positions.queries_L,
          positions.keys, v_BxTxHkvxDh, gate_BxTxD, rotated=rotated,
          turns=positions.turns)
    else:
      assert new is not None
      k_BxHkvxExDh, v_BxHkvxExDh = (jnp.concatenate(parts, 2) for parts in zip(cache, new))
      o_BxTxHxDh = attend_cached_each(
          spec, q_BxTxHxDh, k_BxHkvxExDh, v_BxHkvxExDh, params, positions.queries_L,
          positions.keys, v_BxTxHkvxDh, gate_BxTxD, rotated=rotated,
          turns=positions.turns)
    o_BxTxHxDh = sharding_constraint('bthd', o_BxTxHxDh)
    if config.combine_heads == 'add':
      o = o_BxTxHxDh.sum(2)
    else:
      o = o_BxTxHxDh.reshape(*x_BxTxD.shape[:2], -1)
    out = sharding_constraint('btd', Linear(config.d_model, config, group='out', name='out')(o))
    if record_options is None:
      return out, None, new, first
    assert transformed is not None, 'a decoding step records nothing'
    normalized = q_BxTxHxDh, k_BxTxHkvxDh
    record = self._record(record_options, normalized, transformed, v_BxTxHkvxDh, o_BxTxHxDh,
                          params)
    return out, record, new, first

  def _record(self, options: RecordOptions, normalized: tuple[jax.Array, jax.Array],
              transformed: TransformedQK, v_BxTxHkvxDh: jax.Array, o_BxTxHxDh: jax.Array,
              params: ComponentParams) -> AttentionRecord:
    """normalized: queries and keys whose norms are recorded; transformed: those of the scores."""
    config, spec = self.config, self.spec
    # Records are about tokens: the rows and columns of learned sink tokens are cut off.
    tokens = slice(config.sink_tokens, None)
    importance = transformed_importance(spec, transformed, params)
    if config.sink_tokens:
      importance = _without_sink_rows(spec, transformed, params, importance, config.sink_tokens)
    weights = proxy = last = angles = None
    if options.maps:
      whole = maps(spec, transformed, params)
      weights, proxy = (x[..., tokens, tokens]
                        for x in (whole.weights_BxHxLxT, whole.proxy_BxHxLxT))
    q, k = transformed
    if options.last_query:
      last = last_row(spec, transformed, params)[..., tokens]
    if options.angles:
      angles = options.angles(q[:, tokens], k[:, tokens])
    norms = [jnp.swapaxes(norm(x), 1, 2)[..., tokens]
             for x in (*normalized, v_BxTxHkvxDh, o_BxTxHxDh)]
    recorded = lambda x: x[:, tokens].astype(jnp.float32) if options.queries_keys else None
    return AttentionRecord(
        importance=importance, query_norm_BxHxT=norms[0], key_norm_BxHxT=norms[1],
        value_norm_BxHxT=norms[2], head_norm_BxHxT=norms[3], maps_BxHxTxT=weights,
        proxy_maps_BxHxTxT=proxy, last_query_BxHxT=last, angles=angles,
        queries_BxTxHxDh=recorded(q), keys_BxTxHkvxDh=recorded(k))


def _mixed_values(spec: AttentionSpec, v_BxTxHkvxDh: jax.Array, params: ComponentParams,
                  first: FirstValues | None) -> tuple[jax.Array, FirstValues | None]:
  """The values that attention mixes, of projected ones, and the first block's for the next."""
  if first is None:
    return transform_values(spec, v_BxTxHkvxDh, params), None
  # One program serves all blocks of a loop: in the first, the values stay as they are.
  later = transform_values(spec, v_BxTxHkvxDh, params, first.v_BxTxHkvxDh)
  known = FirstValues(jnp.where(first.read, first.v_BxTxHkvxDh, v_BxTxHkvxDh),
                      jnp.ones_like(first.read))
  return jnp.where(first.read, later, v_BxTxHkvxDh), known


def _without_sink_rows(spec: AttentionSpec, transformed: TransformedQK, params: ComponentParams,
                       importance: Importance, sink_tokens: int) -> Importance:
  """The importance of tokens alone, where the first positions are learned sink tokens.

  They are ordinary keys, and what they receive together is reported where an extra key would be.
  Their rows are counted by the official implementation (sail-sg/Attention-Sink), which has one
  sink token, and left out of the means here.
  """
  q, k = transformed
  length = k.shape[1]
  # Under most masks these rows give sink tokens all their weight; in a prefix they reach tokens.
  own = rows(spec, q[:, :sink_tokens], k, params, jnp.arange(sink_tokens), jnp.arange(length))
  weights, proxy = own.weights_BxHxLxT.sum(2), own.proxy_BxHxLxT.sum(2)
  rows_seeing_k = length - jnp.arange(length)  # the divisors that importance has
  tokens, sinks = slice(sink_tokens, None), slice(sink_tokens)
  received = (importance.normalized * rows_seeing_k)[..., sinks].sum(-1)  # of all rows together
  return Importance(importance.raw[..., tokens] - (weights / rows_seeing_k)[..., tokens],
                    importance.normalized[..., tokens] - (proxy / rows_seeing_k)[..., tokens],
                    (received - proxy[..., sinks].sum(-1)) / (length - sink_tokens),
                    received / length)


def training_implementation(config: ModelConfig, length: int) -> str:
  """Name of the implementation of attention for sequences of `length` tokens.

  Raises:
    ValueError: `config.implementation` does not run the model on this platform, with the reason.
  """
  q, k = (jax.ShapeDtypeStruct((1, length + config.sink_tokens, heads, config.dims.head_dim),
                               config.dtype) for heads in (config.dims.heads, config.dims.kv_heads))
  name = config.implementation or choose(config.attention, q, k)
  reason = unsupported(name, config.attention, q, k)
  if reason:
    raise ValueError(f"model.implementation = '{name}' does not run this model: {reason}. "
                     "Leave it empty for the choice of the platform; 'chunked' runs everywhere.")
  return name


def norm(x: jax.Array) -> jax.Array:
  """The l2 norm over the last axis, in float32."""
  return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)
