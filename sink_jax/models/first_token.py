"""The first token as a chain of MLPs (Section 3.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.layers import FeedForward, Linear, Norm, apply


def first_token_chain(config: ModelConfig, params: ParamTree, inputs: ArrayLike) -> jax.Array:
  """Hidden states (N, B, D) of the first tokens after every block, without attention.

  A token that attends to itself alone, with a weight of one, gets the projection of its
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
  # The parameters are used directly, not through Transformer, so that this is an independent
  # statement of what the model does.
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
    # `get`, since a module without parameters, such as a norm of kind 'none', has no entry.
    ln = lambda name, x: apply(Norm(config), layer.get(name, {}), x)
    ffn = lambda x: apply(FeedForward(config), layer.get('ffn', {}), x)
    normed = config.norm_location in ('pre', 'sandwich')
    o, v = _projected_value(config, layer['attention'], ln('norm1', h) if normed else h, first)
    if config.norm_location == 'pre':
      x = h + o
      h = x + ffn(ln('norm2', h if config.parallel_residual else x))
    elif config.norm_location in ('sandwich', 'after'):
      x = h + ln('norm1_after', o)
      h = x + ln('norm2_after', ffn(ln('norm2', x) if normed else x))
    elif config.norm_location == 'protected':
      x = h + config.branch_scale * o
      h = x + config.branch_scale * ffn(x)
    else:
      x = ln('norm1', h + o)
      h = ln('norm2', x + ffn(x))
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
  # Flat names of parameters, 'value_scale', beside the module 'value'.
  own = {name: params[f'value_{name}'] for name in config.attention.value.params(dims)}
  v_BxHkvxDh = config.attention.value.values(v_Bx1xHkvxDh, own, first)[:, 0]
  v_BxHxDh = jnp.repeat(v_BxHkvxDh, dims.heads // dims.kv_heads, axis=1)
  head = config.attention.head
  own = {name: params[f'head_{name}'] for name in head.params(dims)}
  o_BxHxDh = head.output(v_BxHxDh, v_BxHkvxDh, x_BxD, own).astype(x_BxD.dtype)
  o = o_BxHxDh.sum(1) if config.combine_heads == 'add' else o_BxHxDh.reshape(len(x_BxD), -1)
  return linear(config.d_model, 'out', 'out', o), v_Bx1xHkvxDh
