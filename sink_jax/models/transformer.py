"""The decoder: blocks of attention and feed-forward networks, scanned over the layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from sink_jax.attention import linear, soft_cap
from sink_jax.foreign import standard_promotion
from sink_jax.kernels.epilogue import ATTENTION
from sink_jax.kernels.shard import shard_map_batch_heads, sharding_constraint
from sink_jax.models.arrays import ParamTree
from sink_jax.models.attention import Attention, FirstValues, l2_norm
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.decode import DecodePositions, DecodeState, LayerCache, written
from sink_jax.models.layers import (
  FeedForward, Linear, MambaMixer, MixtureOfExperts, Norm, initializer, residual)
from sink_jax.models.record import LayerRecord, Record, RecordOptions

# Hidden states (B, T, D), and the values of the first block where later ones mix them in.
Stream = tuple[jax.Array, FirstValues | None]


def _attention_saveable(primitive: jax.extend.core.Primitive, *arguments, **params) -> bool:
  """A checkpoint policy that keeps results of attention, by their name or cuDNN's primitive."""
  named = jax.checkpoint_policies.save_only_these_names(ATTENTION)
  return primitive.name.startswith('dot_product_attention_fwd') or named(
      primitive, *arguments, **params)


# The results of a block that each value of `ModelConfig.remat` keeps for the backward pass, besides its
# input of D = d_model values per token, and for ValueResidual K = kv_heads x head_dim more; 'none',
# which is not here, keeps all. The scores of attention have a batch dimension and are never kept.
#
# - 'save_matmuls': the outputs of linear layers and attention, D + 2 A + 2 K + 2 F values with
#   A = heads x head_dim and F = ffn_hidden (one F if the network is not gated), D more if a norm
#   follows the sub-layers, and the pre-activations of gates that read the block's input.
# - 'save_attention': the output of attention, A values, and two float32 statistics per head.
SAVED = {
    'blocks': jax.checkpoint_policies.nothing_saveable,
    'save_attention': _attention_saveable,
    'save_matmuls': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _attention_saveable),
}


class Block(nn.Module):
  """One transformer block, its norms where `ModelConfig.norm_location` has them."""

  config: ModelConfig
  layer: Layer

  @nn.compact
  def __call__(self, stream: Stream, record_options: RecordOptions | None,
               cache: Any = None, positions: DecodePositions | None = None,
               ) -> tuple[Stream, tuple[LayerRecord | None, LayerCache | None]]:
    """Returns the stream for the next block, and (record, cache); `cache` is attention's or Mamba's."""
    config, layer, (h_BxTxD, first) = self.config, self.layer, stream
    # The names of modules are the keys of parameters in checkpoints: they must not change.
    norm = lambda name, x: Norm(config, name=name)(x)

    def mix(x):
      if layer.mamba:
        out, new = MambaMixer(config, layer.mamba, name='mamba')(x, cache)
        return out, (LayerRecord(), new, first)
      out, *rest = Attention(config, config.attention_of(layer), name='attention')(
          x, record_options, cache, positions, first)
      return out, rest

    def feed_forward(x):
      return (MixtureOfExperts(config, layer.experts, name='ffn') if layer.experts else
              FeedForward(config, name='ffn'))(x), None

    x_BxTxD, _, (record, new_cache, first) = residual(config, 1, h_BxTxD, mix, norm)
    out, before, _ = residual(config, 2, x_BxTxD, feed_forward, norm,
                              h_BxTxD if config.parallel_residual else None)
    # Stated once per block: XLA may otherwise spread the layout of parameters to activations.
    out = sharding_constraint('btd', out)
    if (options := record_options) is None:
      return (out, first), (None, new_cache)
    sinks, tokens = config.sink_tokens, slice(config.sink_tokens, None)
    return (out, first), (record._replace(
        hidden_norm_BxT=l2_norm(out)[:, tokens], hidden_before_norm_BxT=l2_norm(before)[:, tokens],
        sink_token_norm_B=l2_norm(out)[:, :sinks].max(1) if sinks else None,
        hidden_BxTxD=out[:, tokens].astype(jnp.float32) if options.hidden else None,
        hidden_description=options.describe_hidden(out[:, tokens]) if options.describe_hidden else None,
    ), new_cache)


class Period(nn.Module):
  """The blocks of a pattern, with a tuple of their caches, and records with an axis over blocks.

  record_options is positional, because `nn.remat` counts static arguments by their number.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, stream: Stream, record_options: RecordOptions | None,
               caches: tuple[LayerCache, ...] | None = None, positions: DecodePositions | None = None,
               ) -> tuple[Stream, tuple[LayerRecord | None, tuple[LayerCache | None, ...]]]:
    records, new_caches = [], []
    for i, layer in enumerate(self.config.pattern):
      block = Block(self.config, layer, name=f'layer{i}')
      if len(self.config.pattern) == 1:  # its parameters have no level 'layer0'
        nn.share_scope(self, block)
      stream, (record, cache) = block(
          stream, record_options, None if caches is None else caches[i], positions)
      records.append(record)
      new_caches.append(cache)
    if record_options is None:
      return stream, (None, tuple(new_caches))
    # Fields that Mamba mixers do not record are stacked over the other blocks.
    stacked: Any = [
        jax.tree.map(lambda *parts: jnp.stack(parts), *(x for x in field if x is not None))
        if any(x is not None for x in field) else None for field in zip(*records)]
    return stream, (LayerRecord(*stacked), tuple(new_caches))


class Transformer(nn.Module):
  """A model that maps tokens to next-token logits.

  `Transformer(config).apply({'params': params}, tokens_BxT)` returns float32 logits (B, T, V), and
  with `record_options` (logits, Record). With `unembed=False` it returns, instead of the logits,
  the input of the unembedding matrix, (B, T, D), or (B, T, E) where embeddings are projected; a cap
  of the logits is left to the caller. Raises a ValueError for logits of a model without an
  unembedding.

  With `state` and `positions` it decodes, and returns (logits, state): logits (B, V) of the last of
  the tokens that begin the texts, and (B, T, V) of tokens after those that the state holds.

  A model without a vocabulary takes continuous inputs (B, T, F) instead of tokens. Layers are scanned:
  parameters and record leaves have a leading layer axis.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, inputs: jax.Array | np.ndarray, record_options: RecordOptions | None = None,
               unembed: bool = True, state: DecodeState | None = None,
               positions: DecodePositions | None = None,
               ) -> jax.Array | tuple[jax.Array, Record] | tuple[jax.Array, DecodeState]:
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    if positions is None or positions.keys_LxE is None:
      config.attention.position.check_length(inputs.shape[1])
      begins, sink_tokens, positions_T = True, config.sink_tokens, np.arange(inputs.shape[1])
    else:
      # Decoding counts learned sink tokens as positions of attention; embeddings of positions do not.
      begins, sink_tokens, positions_T = False, 0, positions.queries_L - config.sink_tokens
    h_BxTxD, table_VxE = self._embed(inputs, positions_T)
    h_BxTxD = sharding_constraint('btd', h_BxTxD.astype(dtype))
    if config.sink_tokens:
      sinks_SxD = self.param('sink_tokens', initializer('embedding', config),
                             (config.sink_tokens, config.d_model), jnp.float32)
      if begins:
        h_BxTxD = jnp.concatenate([jnp.broadcast_to(
            sinks_SxD.astype(dtype), (h_BxTxD.shape[0], *sinks_SxD.shape)), h_BxTxD], 1)
    h0_BxTxD, first = h_BxTxD, None
    if config.attention.value.reads_first:
      shape = *h_BxTxD.shape[:2], config.dims.kv_heads, config.dims.head_dim
      first = FirstValues(sharding_constraint('bthd', jnp.zeros(shape, dtype)), jnp.array(False))
    (h_BxTxD, _), (record, caches) = self._periods()(
        (h_BxTxD, first), record_options, state and state.layers, positions)
    if state is not None:
      assert positions is not None
      layers = zip(state.layers, caches, strict=True)
      state = DecodeState(tuple(written(*both, positions.entries_L) for both in layers),
                          state.tokens_read + h_BxTxD.shape[1])
    # While a text begins, the next token depends on the last one's logits only.
    h_BxTxD = h_BxTxD[:, -1:] if state is not None and begins else h_BxTxD[:, sink_tokens:]
    if config.norm_location != 'post':
      h_BxTxD = Norm(config, name='final_norm')(h_BxTxD)
    if config.embedding_dim:
      h_BxTxD = Linear(config.embedding_dim, config, name='embed_out')(h_BxTxD)
    result = (self._logits(h_BxTxD, table_VxE) if unembed else
              sharding_constraint('btd', h_BxTxD))
    if state is not None:
      return result[:, 0] if begins else result, state
    if record_options is None:
      return result
    # (periods, blocks of a period, ...) to (layers, ...)
    record = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), record)
    embedding_norms, describe = l2_norm(h0_BxTxD), record_options.describe_hidden
    return result, Record(
        record, embedding_norms[:, sink_tokens:],
        h0_BxTxD[:, sink_tokens:].astype(jnp.float32) if record_options.hidden else None,
        embedding_norms[:, :sink_tokens].max(1) if sink_tokens else None,
        describe(h0_BxTxD[:, sink_tokens:]) if describe else None)

  def _logits(self, h_BxTxE: jax.Array, table_VxE: jax.Array | None) -> jax.Array:
    """The logits (B, T, V), float32; the outputs (B, T, F) of a model of continuous inputs."""
    config = self.config
    if not config.unembedding:
      raise ValueError('the checkpoint has no unembedding (such as lm_head.weight), without which '
                       'there are no logits, generated texts and losses: load a checkpoint of the '
                       'whole model.')
    if config.tied:
      assert table_VxE is not None  # the config has a vocabulary
      logits = linear(h_BxTxE, table_VxE.astype(config.dtype).T, jnp.float32)
    else:
      logits = Linear(config.vocab_size or config.output_features, config, group='unembed',
                      out_dtype=jnp.float32, name='unembed')(h_BxTxE)
    return soft_cap(logits, config.logit_cap)

  def _periods(self) -> nn.Module:
    """All blocks as one module with the arguments of a period: a loop over periods, compiled once."""
    config, body = self.config, Period
    if config.remat != 'none':
      # The loop already keeps a block from being merged with its recomputation.
      body = nn.remat(body, prevent_cse=False, static_argnums=(2,), policy=SAVED[config.remat])
    # With a remat there is one period in an iteration, see `ModelConfig.unroll`.
    blocks = min(config.unroll if config.remat == 'none' else 1, config.layers)
    # The stream is the carry. Parameters, caches and records are slices along axis 0; record options
    # and positions are the same in every iteration.
    in_axes: Any = (nn.broadcast, 0, nn.broadcast)  # Flax documents a tuple, and annotates int
    # 'edits' has what analyses put instead of activations, see `Attention.mixed`.
    scanned = nn.scan(body, variable_axes={'params': 0, 'edits': 0}, split_rngs={'params': True},
                      length=config.layers // len(config.pattern), in_axes=in_axes,
                      unroll=max(1, blocks // len(config.pattern)))
    return scanned(config, name='blocks')

  def _embed(self, inputs: jax.Array | np.ndarray, positions_T: jax.Array | np.ndarray,
             ) -> tuple[jax.Array, jax.Array | None]:
    """H^0 = X W_E + P, float32, and W_E, which continuous inputs do not have."""
    config, table_VxE = self.config, None
    h: jax.Array
    if config.vocab_size:
      table_VxE = self.param('embed', initializer('embedding', config),
                             (config.vocab_size, config.embedding_dim or config.d_model),
                             jnp.float32)
      h = _rows(config.vocab_size, table_VxE, jnp.asarray(inputs))
      if config.embedding_dim:
        h = Linear(config.d_model, config, name='embed_in')(h)
    else:
      h = Linear(config.d_model, config, name='embed')(jnp.asarray(inputs))
    position = config.attention.position
    params = {name: self.param('positions', initializer(p.init, config), p.shape, jnp.float32)
              for name, p in position.embedding_params(config.d_model).items()}
    added = position.embedding(positions_T, config.d_model, params)
    return (h if added is None else h + added), table_VxE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(vocab_size: int, table_VxE: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
  """table_VxE[tokens_BxT]. Its gradient is summed on each device before the devices exchange anything.

  XLA would send the float32 gradients of all sequences to every device of 'fsdp', which then adds all of
  them to its rows of the table.
  """
  del vocab_size
  return sharding_constraint('ve', table_VxE)[tokens_BxT]


@standard_promotion()
def _rows_gradient(vocab_size: int, tokens_BxT: jax.Array, g_BxTxE: jax.Array) -> tuple[Any, ...]:
  add = lambda tokens, g: (jnp.zeros((vocab_size, g.shape[-1]), g.dtype).at[tokens].add(g),)
  return *shard_map_batch_heads('bt bte -> ve', add, tokens_BxT, g_BxTxE), None


_rows.defvjp(lambda size, table, tokens: (_rows(size, table, tokens), tokens), _rows_gradient)


@functools.partial(jax.jit, static_argnums=0)
@standard_promotion()
def init_params(config: ModelConfig, seed: int | jax.Array) -> ParamTree:
  """Initial float32 parameters, nested dicts; a pure function of the config and an integer seed."""
  # One token suffices to make the parameters, but the kernels of the libraries refuse it.
  config = dataclasses.replace(config, implementation='reference', unroll=1)
  inputs = (jnp.zeros((1, 1), jnp.int32) if config.vocab_size else
            jnp.zeros((1, 1, config.input_features)))
  model = Transformer(config)
  return model.init(jax.random.key(seed), inputs, unembed=config.unembedding)['params']
