"""The first token as a chain of MLPs (Section 3.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.layers import FeedForward, Linear, Norm, apply, residual


def first_token_chain(config: ModelConfig, params: ParamTree, inputs: ArrayLike) -> jax.Array:
  """Hidden states (N, B, D) of the first tokens after every block, without attention.

  A token that attends only to itself, with a weight of one, gets the projection of its
  value: o = v W_O with v = LN(h) W_V, as its `value` component changes it, without queries, keys
  or scores. That is what a causal model of normalised attention without biases does with its
  first token.

  inputs: (B, T) token ids, or (B, T, F) continuous ones; the first of each is used.

  Raises:
    ValueError: a model of unlike blocks.
  """
  layer, *unlike = config.pattern
  if unlike or layer.mamba or layer.experts:
    raise ValueError('first_token_chain needs blocks of attention and one feed-forward network.')
  # The parameters are used directly, not through Transformer: no code of attention takes part.
  first = jnp.asarray(inputs)[:, 0]
  h_BxD = params['embed'][first] if config.vocab_size else first @ params['embed']['kernel']
  if config.embedding_dim:
    h_BxD = h_BxD @ params['embed_in']['kernel']
  position = config.attention.position
  table = {name: params['positions'] for name in position.embedding_params(config.d_model)}
  added_1xD = position.embedding(np.arange(1), config.d_model, table)
  h_BxD = (h_BxD if added_1xD is None else h_BxD + added_1xD).astype(config.dtype)

  def block(stream, layer):
    h, first = stream
    # `get`, since a module without parameters, such as the norm 'none', has no entry.
    norm = lambda name, x: apply(Norm(config), layer.get(name, {}), x)
    value = lambda x: _projected_value(config, layer['attention'], x, first)
    ffn = lambda x: (apply(FeedForward(config), layer.get('ffn', {}), x), None)
    x, _, v = residual(config, 1, h, value, norm)
    h, *_ = residual(config, 2, x, ffn, norm, h if config.parallel_residual else None)
    return (h, v if first is None else first), h

  # The blocks' parameters are stacked along a layer axis, which the scan takes apart. The first
  # block stands before the loop: its values are not changed by themselves.
  stream, first_state = block((h_BxD, None), jax.tree.map(lambda x: x[0], params['blocks']))
  later = jax.lax.scan(block, stream, jax.tree.map(lambda x: x[1:], params['blocks']))[1]
  return jnp.concatenate([first_state[None], later])


def _projected_value(config: ModelConfig, params: ParamTree, x_BxD: jax.Array,
                     first: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """x W_V W_O, with repeated key/value heads and gates or norms of heads, and x W_V itself."""
  dims = config.dims
  linear = lambda features, group, name, x: apply(
      Linear(features, config, group=group), params[name], x)
  v = linear(dims.kv_heads * dims.head_dim, 'qkv', 'value', x_BxD)
  v_Bx1xHkvxDh = v.reshape(-1, 1, dims.kv_heads, dims.head_dim)
  # Flat names of parameters, 'value_scale', next to the module 'value'.
  of_value = {name: params[f'value_{name}'] for name in config.attention.value.params(dims)}
  v_BxHkvxDh = config.attention.value.values(v_Bx1xHkvxDh, of_value, first)[:, 0]
  v_BxHxDh = jnp.repeat(v_BxHkvxDh, dims.heads // dims.kv_heads, axis=1)
  head = config.attention.head
  of_head = {name: params[f'head_{name}'] for name in head.params(dims)}
  o_BxHxDh = head.output(v_BxHxDh, v_BxHkvxDh, x_BxD, of_head).astype(x_BxD.dtype)
  o = o_BxHxDh.sum(1) if config.combine_heads == 'add' else o_BxHxDh.reshape(len(x_BxD), -1)
  return linear(config.d_model, 'out', 'out', o), v_Bx1xHkvxDh
