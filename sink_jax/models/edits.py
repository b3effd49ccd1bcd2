"""A model with edits: keys that are hidden, values and heads that are zero, clipped states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from sink_jax.kernels.shard import mesh_context
from sink_jax.models.arrays import ParamTree, precise
from sink_jax.models.attention import Attention
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import RecordOptions
from sink_jax.models.transformer import Block, Transformer


def edit_tree(
  config: ModelConfig,
  *,
  batch: int,
  length: int,
  keep_NxBxHxT: ArrayLike = True,
  values_NxBxT: ArrayLike = True,
  heads_NxH: ArrayLike = True,
  caps_MxD: ArrayLike = np.inf,
  capped_T: ArrayLike = True,
) -> ParamTree:
  """The collection 'edits' of a model of M blocks, N with attention.

  Its tree mirrors the parameters. Each array is broadcast to its shape; by default it edits
  nothing. A batch of 1 serves all sequences.

  Args:
    batch, length: B and T, which counts learned sink tokens: they are the first positions.
    keep_NxBxHxT: False hides a key from later queries, whose weights are normalised without it.
    values_NxBxT: False makes the value of a token zero for later queries; they still give it their
      attention, and its own query reads it.
    heads_NxH: False makes the output of a head zero, before W_O.
    caps_MxD: hidden states after a block are clipped to +-cap, in each channel.
    capped_T: False leaves the hidden states of a token as they are.
  """
  layers, period = config.attention_layers, len(config.pattern)
  full = lambda x, *shape: np.broadcast_to(x, (len(layers), *shape))
  attention = {
    'keep': full(keep_NxBxHxT, batch, config.heads, length),
    'values': full(values_NxBxT, batch, length),
    'heads': full(heads_NxH, config.heads),
  }
  caps = np.broadcast_to(np.asarray(caps_MxD, np.float32), (config.layers, config.d_model))
  capped_MxT = np.broadcast_to(capped_T, (config.layers, length))
  blocks: dict[str, Any] = {}
  for i in range(period):
    blocks[f'layer{i}'] = {'caps': caps[i::period], 'capped': capped_MxT[i::period]}
    if at := [n for n, layer in enumerate(layers) if layer % period == i]:
      blocks[f'layer{i}']['attention'] = {name: x[at] for name, x in attention.items()}
  return {'blocks': blocks if period > 1 else blocks['layer0']}


@functools.partial(jax.jit, static_argnums=(0, 1))
def edited_logits(
  config: ModelConfig,
  mesh: Mesh | None,
  params: ParamTree,
  edits: ParamTree,
  tokens_BxT: jax.Array | np.ndarray,
) -> jax.Array:
  """The logits (B, T, V) of a model with an `edit_tree`; one program serves all edits.

  The implementation of attention must be 'reference' or 'chunked', the ones that can hide keys.
  """
  assert config.implementation in ('reference', 'chunked')
  return edited_by(_edited, config, mesh, params, edits, tokens_BxT)


@functools.partial(jax.jit, static_argnums=(0, 1))
def edited_importance(
  config: ModelConfig,
  mesh: Mesh | None,
  params: ParamTree,
  edits: ParamTree,
  tokens_BxT: jax.Array | np.ndarray,
) -> jax.Array:
  """The importance (N, B, H, T) of a model with an `edit_tree`, of row-normalised attention."""
  inputs = tokens_BxT, RecordOptions()
  _, recorded, _ = edited_by(_edited, config, mesh, params, edits, *inputs, method='hidden')
  return recorded.layers.importance.normalized


def next_token_losses(logits_BxTxV: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
  """Losses (B, T - 1) in nats of tokens 2 to T; under `jax.jit`, without a copy of the logits."""
  return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV[:, :-1], tokens_BxT[:, 1:])


def edited_by(
  change: Callable,
  config: ModelConfig,
  mesh: Mesh | None,
  params: ParamTree,
  edits: ParamTree,
  *inputs: Any,
  method: str = '__call__',
) -> Any:
  """The result with `change(call, args, kwargs, context)` instead of each method of the model.

  Call it under `jax.jit`. edits: a collection whose arrays have a leading axis over periods; a
  method gets its slice by `context.module.get_variable('edits', name)`.
  """
  with mesh_context(mesh), precise(config.dtype), nn.intercept_methods(change):
    return Transformer(config).apply({'params': params, 'edits': edits}, *inputs, method=method)


def _edited(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
  """The result of a method of a module, edited as the variables of the module say."""
  result, module, method = call(*args, **kwargs), context.module, context.method_name
  edit = functools.partial(module.get_variable, 'edits')
  if isinstance(module, Attention) and method == 'edit_inputs':
    qk, v_BxTxHkvxDh, params = result
    return qk, v_BxTxHkvxDh, params | {'edit': {name: edit(name) for name in ('keep', 'values')}}
  if isinstance(module, Attention) and method == 'edit_outputs':
    return jnp.where(edit('heads')[:, None], result, 0)
  if isinstance(module, Block) and method == '__call__':
    h_BxTxD, rest = result
    cap_D = edit('caps').astype(h_BxTxD.dtype)
    capped_BxTxD = jnp.clip(h_BxTxD, -cap_D, cap_D)
    return jnp.where(edit('capped')[:, None], capped_BxTxD, h_BxTxD), rest
  return result
