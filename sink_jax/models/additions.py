"""What each sub-layer adds to the hidden states, and a model in which some of it is left out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.edits import edited_by
from sink_jax.models.record import Record, RecordOptions
from sink_jax.models.transformer import Block


def record_without(
  config: ModelConfig,
  options: RecordOptions,
  params: ParamTree,
  left_out_Mx2xT: np.ndarray,
  tokens_BxT: np.ndarray,
) -> Record:
  """`run.record` of a model that leaves out what chosen sub-layers add at chosen tokens.

  What a sub-layer adds is the stream after it minus the stream before it, with the norms and scales
  in between; left out, the stream stays as it was. One program serves all choices.

  Args:
    options: `layers.hidden` has a further axis, (M, 2, ...): the result of `options.hidden` for the
      stream after the attention of each block, and after its feed-forward network.
    left_out_Mx2xT: True where the addition of a sub-layer of one of M blocks is left out.
    tokens_BxT: ids.
  """
  period = len(config.pattern)
  tokens_only = ((0, 0), (0, 0), (config.sink_tokens, 0))
  padded_Mx2xE = np.pad(left_out_Mx2xT, tokens_only)
  blocks: Any = {f'layer{i}': {'left_out': padded_Mx2xE[i::period]} for i in range(period)}
  edits = {'blocks': blocks if period > 1 else blocks['layer0']}
  return _record(config, options, mesh_of(params), params, edits, tokens_BxT)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _record(
  config: ModelConfig,
  options: RecordOptions,
  mesh: Mesh | None,
  params: ParamTree,
  edits: ParamTree,
  tokens_BxT: jax.Array,
) -> Record:
  tokens, streams = slice(config.sink_tokens, None), []  # streams: of the block that is traced

  def edited(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module, method = context.module, context.method_name
    if isinstance(module, Block) and method == 'edit_stream':
      number, before, after = args
      left_out_E = module.get_variable('edits', 'left_out')[number]
      streams.append(jnp.where(left_out_E[:, None], before, after))
      return streams[-1]
    result = call(*args, **kwargs)
    if isinstance(module, Block) and method == '__call__':
      stream, (record, cache) = result
      if options.hidden is not None:
        hidden = [options.hidden(h_BxExD[:, tokens]) for h_BxExD in streams]
        record = record._replace(hidden=jax.tree.map(lambda *parts: jnp.stack(parts), *hidden))
      streams.clear()
      return stream, (record, cache)
    return result

  inputs = tokens_BxT, options
  return edited_by(edited, config, mesh, params, edits, *inputs, method='hidden')[1]


def streams_and_additions(record: Record) -> tuple[np.ndarray, np.ndarray]:
  """The streams (B, M + 1, T, D) before the first block and after each, and what is added to them.

  record: of `record_without`, with the hidden states themselves. The additions (B, M, 2, T, D) are
  those of the attention, or a Mamba mixer, and of the feed-forward network.
  """
  after_Mx2xBxTxD, embedding = np.asarray(record.layers.hidden), np.asarray(record.embedding)
  streams_MxBxTxD = np.concatenate([embedding[None], after_Mx2xBxTxD[:, 1]])
  before_Mx2xBxTxD = np.stack([streams_MxBxTxD[:-1], after_Mx2xBxTxD[:, 0]], 1)
  added_Mx2xBxTxD = after_Mx2xBxTxD - before_Mx2xBxTxD
  return np.moveaxis(streams_MxBxTxD, 1, 0), np.moveaxis(added_Mx2xBxTxD, 2, 0)
