"""Multi-head attention with any AttentionSpec."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sink_jax.attention.reference import rows
from sink_jax.attention.spec import (
  AttentionSpec,
  LayerParams,
  TransformedQK,
  normalize_qk,
  position_qk,
)
from sink_jax.kernels.dispatch import attend_transformed, choose, unsupported
from sink_jax.kernels.importance import Importance, transformed_importance
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.config import ModelConfig
from sink_jax.models.decode import DecodePositions, KVCache, attend_cached
from sink_jax.models.layers import Dense, initializer
from sink_jax.models.record import LayerRecord, RecordOptions, Seen


class Attention(nn.Module):
  """O^l = combine_h(A^{l,h} V^{l,h}) W_O (Eq. 4, generalised by the spec)."""

  config: ModelConfig
  spec: AttentionSpec

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    record_options: RecordOptions | None = None,
    cache: KVCache | None = None,
    positions: DecodePositions | None = None,
  ) -> tuple[jax.Array, LayerRecord | None, KVCache | None]:
    """Returns the output (B, T, D), the record, and keys and values.

    With a cache the tokens attend to it at `positions`, and keys and values are returned as the
    cache stores them; None without a cache.
    """
    config, dims, spec = self.config, self.config.dims, self.spec
    q_BxTxHxDh = self._heads('query', dims.heads, x_BxTxD)
    k_BxTxHkvxDh = self._heads('key', dims.kv_heads, x_BxTxD)
    v_BxTxHkvxDh = self._heads('value', dims.kv_heads, x_BxTxD)
    params = self._params()
    normalized = q, k = normalize_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
    v_BxTxHkvxDh = spec.value.values(v_BxTxHkvxDh, params.get('value', {}))
    gate_BxTxD = x_BxTxD if spec.head.reads_input else None
    seen = new = None
    if positions is not None:
      kept = k if positions.kept_L is None else spec.position.rotate(k, positions.kept_L)
      new = KVCache(*(jnp.swapaxes(x, 1, 2) for x in (kept, v_BxTxHkvxDh)))
    if positions is None or positions.keys_LxE is None:
      # Tokens that begin a text attend only to each other, so the implementations without a cache
      # apply.
      qk = position_qk(spec, q, k, params)
      qk, v_BxTxHkvxDh, params = self.edit_inputs(qk, v_BxTxHkvxDh, params)
      seen = Seen(spec, qk, params, config.sink_tokens)
      o_BxTxHxDh = attend_transformed(
        spec, qk, v_BxTxHkvxDh, params, gate_BxTxD, implementation=config.implementation
      )
    else:
      assert cache is not None and new is not None
      o = attend_cached(spec, q, cache, new, params, positions)
      o_BxTxHxDh = spec.head.output(o, v_BxTxHkvxDh, gate_BxTxD, params.get('head', {}))
    o_BxTxHxDh = sharding_constraint('bthd', o_BxTxHxDh.astype(x_BxTxD.dtype))
    o_BxTxHxDh = self.edit_outputs(o_BxTxHxDh)
    combined = (
      o_BxTxHxDh.sum(2)
      if config.combine_heads == 'add'
      else o_BxTxHxDh.reshape(*x_BxTxD.shape[:2], -1)
    )
    out = Dense(config.d_model, config, group='out', name='out')(combined)
    out = sharding_constraint('btd', out)
    if record_options is None:
      return out, None, new
    assert seen is not None, 'a decoding step records nothing'
    record = _record(record_options, seen, (*normalized, v_BxTxHkvxDh, o_BxTxHxDh))
    return out, record, new

  def _heads(self, name: str, count: int, x_BxTxD: jax.Array) -> jax.Array:
    """A projection of the input, (B, T, count, Dh)."""
    head_dim = self.config.dims.head_dim
    projected = Dense(count * head_dim, self.config, group='qkv', name=name)(x_BxTxD)
    # 'bthd' splits batch and heads over the mesh, so attention itself needs no communication.
    return sharding_constraint('bthd', projected.reshape(*x_BxTxD.shape[:2], count, head_dim))

  def _params(self) -> LayerParams:
    """The parameters of the components.

    Names are flat in the checkpoint, such as 'kv_bias_key', and nested for the functions of
    attention.
    """
    make = lambda name, param: self.param(
      name, initializer(param.init, self.config), param.shape, jnp.float32
    )
    return {
      component: {name: make(f'{component}_{name}', param) for name, param in params.items()}
      for component, params in self.spec.params(self.config.dims).items()
    }

  def edit_inputs(
    self,
    qk: TransformedQK,
    v_BxTxHkvxDh: jax.Array,
    params: LayerParams,
  ) -> tuple[TransformedQK, jax.Array, LayerParams]:
    """Returns what attention reads; analyses intercept it (`nn.intercept_methods`) to edit it."""
    return qk, v_BxTxHkvxDh, params

  def edit_outputs(self, o_BxTxHxDh: jax.Array) -> jax.Array:
    """Returns the heads' outputs, which W_O reads; analyses intercept it like `edit_inputs`."""
    return o_BxTxHxDh


def _record(options: RecordOptions, seen: Seen, normed: tuple[jax.Array, ...]) -> LayerRecord:
  """normed: queries, keys, values and outputs, the l2 norms of which are recorded."""
  importance = transformed_importance(seen.spec, seen.qk, seen.params, entropy=options.entropy)
  if seen.sink_tokens:
    importance = _without_sink_rows(seen, importance)
  # Records are about tokens: the rows and columns of learned sink tokens are cut off.
  norms = [jnp.swapaxes(l2_norm(x), 1, 2)[..., seen.sink_tokens :] for x in normed]
  recorded = options.attention(seen) if options.attention else None
  return LayerRecord(importance, *norms, attention=recorded)


def l2_norm(x: jax.Array) -> jax.Array:
  """The l2 norm over the last axis, in float32."""
  return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)


def _without_sink_rows(seen: Seen, importance: Importance) -> Importance:
  """The importance of tokens only; learned sink tokens together count as an extra key.

  The rows of sink tokens are left out of the means, except of the entropy's, unlike in the official
  code (sail-sg/Attention-Sink).
  """
  (q, k), sink_tokens = seen.qk, seen.sink_tokens
  length = k.shape[1]
  # Under most masks these rows see only sink tokens; under a prefix mask they see tokens too.
  of_sinks = rows(
    seen.spec, q[:, :sink_tokens], k, seen.params, jnp.arange(sink_tokens), jnp.arange(length)
  )
  weights, proxy = of_sinks.weights_BxHxLxT.sum(2), of_sinks.proxy_BxHxLxT.sum(2)
  rows_seeing_k = length - jnp.arange(length)  # the divisors that importance has
  tokens, sinks = slice(sink_tokens, None), slice(sink_tokens)
  received = (importance.normalized * rows_seeing_k)[..., sinks].sum(-1)  # of all rows together
  return Importance(
    raw=importance.raw[..., tokens] - (weights / rows_seeing_k)[..., tokens],
    normalized=importance.normalized[..., tokens] - (proxy / rows_seeing_k)[..., tokens],
    extra_key=(received - proxy[..., sinks].sum(-1)) / (length - sink_tokens),
    extra_key_released=received / length,
    entropy=importance.entropy,
  )


def training_implementation(config: ModelConfig, length: int) -> str:
  """The implementations of attention in the blocks, for sequences of `length` tokens, by commas.

  Raises a ValueError, with the reason, if `config.implementation` does not run a block here.
  """
  dims, tokens = config.dims, length + config.sink_tokens
  q, k = (
    jax.ShapeDtypeStruct((1, tokens, heads, dims.head_dim), config.dtype)
    for heads in (dims.heads, dims.kv_heads)
  )
  names = []
  for spec in config.attention_specs:
    names.append(config.implementation or choose(spec, q, k))
    if reason := unsupported(names[-1], spec, q, k):
      raise ValueError(
        f"model.implementation = '{names[-1]}' does not run this model: {reason}. "
        "Leave it empty for the choice of the platform; 'chunked' runs everywhere."
      )
  return ', '.join(dict.fromkeys(names))
