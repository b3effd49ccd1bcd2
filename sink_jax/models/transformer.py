"""The decoder: blocks of attention and feed-forward networks, scanned over the layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from sink_jax.attention import linear, soft_cap
from sink_jax.foreign import standard_promotion
from sink_jax.kernels.epilogue import ATTENTION
from sink_jax.kernels.shard import shard_map_batch_heads, sharding_constraint
from sink_jax.models.arrays import ArrayTree, ParamTree
from sink_jax.models.attention import Attention, l2_norm
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.decode import DecodePositions, DecodeState, LayerCache, written
from sink_jax.models.layers import (
  Dense,
  FeedForward,
  MambaMixer,
  MixtureOfExperts,
  Norm,
  Weights,
  initializer,
  residual,
)
from sink_jax.models.record import LayerRecord, Record, RecordOptions


def _attention_saveable(primitive: jax.extend.core.Primitive, *arguments, **params) -> bool:
  """A checkpoint policy that keeps results of attention, by their name or cuDNN's primitive."""
  named = jax.checkpoint_policies.save_only_these_names(ATTENTION)
  return primitive.name.startswith('dot_product_attention_fwd') or named(
    primitive, *arguments, **params
  )


# The results of a block that each value of `ModelConfig.remat` keeps for the backward pass, besides
# its input of D = d_model values per token; 'none', which is not here, keeps all. The scores of
# attention have a batch dimension and are never kept.
#
# - 'save_matmuls': the outputs of linear layers and attention, D + 2 A + 2 K + 2 F values with
#   A = heads x head_dim, K = kv_heads x head_dim and F = ffn_hidden (one F if the network is not
#   gated), D more if a norm follows the sub-layers, and the pre-activations of gates that read the
#   block's input.
# - 'save_attention': the output of attention, A values, and two float32 statistics per head.
SAVED = {
  'blocks': jax.checkpoint_policies.nothing_saveable,
  'save_attention': _attention_saveable,
  'save_matmuls': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _attention_saveable
  ),
}


class Block(nn.Module):
  """One transformer block, its norms where `ModelConfig.norm_location` has them."""

  config: ModelConfig
  layer: Layer

  @nn.compact
  def __call__(
    self,
    h_BxTxD: jax.Array,
    options: RecordOptions | None,
    cache: Any = None,
    positions: DecodePositions | None = None,
  ) -> tuple[jax.Array, tuple[LayerRecord | None, LayerCache | None]]:
    """Returns the input of the next block, and (record, cache); `cache` is that of the mixer."""
    config, layer = self.config, self.layer
    # The names of modules are the keys of parameters in checkpoints: they must not change.
    norm = lambda name, x: Norm(config, name=name)(x)

    def mix(x):
      if layer.mamba:
        out, new = MambaMixer(config, layer.mamba, name='mamba')(x, cache)
        return out, (LayerRecord(), new)
      attention = Attention(config, config.attention_of(layer), name='attention')
      out, *rest = attention(x, options, cache, positions)
      return out, rest

    def feed_forward(x):
      ffn = (
        MixtureOfExperts(config, layer.experts, name='ffn')
        if layer.experts
        else FeedForward(config, name='ffn')
      )
      return ffn(x), None

    x_BxTxD, _, (record, new_cache) = residual(config, 1, h_BxTxD, mix, norm)
    x_BxTxD = self.edit_stream(0, h_BxTxD, x_BxTxD)
    read_BxTxD = h_BxTxD if config.parallel_residual else None
    out, before, _ = residual(config, 2, x_BxTxD, feed_forward, norm, read_BxTxD)
    out = self.edit_stream(1, x_BxTxD, out)
    # Stated once per block: XLA may otherwise spread the layout of parameters to activations.
    out = sharding_constraint('btd', out)
    if options is None:
      return out, (None, new_cache)
    sinks, tokens = config.sink_tokens, slice(config.sink_tokens, None)
    record = record._replace(
      hidden_norm_BxT=l2_norm(out)[:, tokens],
      hidden_before_norm_BxT=l2_norm(before)[:, tokens],
      sink_token_norm_B=l2_norm(out)[:, :sinks].max(1) if sinks else None,
      hidden=options.hidden(out[:, tokens]) if options.hidden else None,
    )
    return out, (record, new_cache)

  def edit_stream(self, number: int, before: jax.Array, after: jax.Array) -> jax.Array:
    """Returns the stream after sub-layer 0 or 1; analyses intercept it (`models/additions.py`)."""
    del number, before
    return after


class Period(nn.Module):
  """The blocks of a pattern, with a tuple of their caches, and records with an axis over blocks.

  options is positional, because `nn.remat` counts static arguments by their number.
  """

  config: ModelConfig

  @nn.compact
  def __call__(
    self,
    h_BxTxD: jax.Array,
    options: RecordOptions | None,
    caches: tuple[LayerCache, ...] | None = None,
    positions: DecodePositions | None = None,
  ) -> tuple[jax.Array, tuple[LayerRecord | None, tuple[LayerCache | None, ...]]]:
    records, new_caches = [], []
    for i, layer in enumerate(self.config.pattern):
      block = Block(self.config, layer, name=f'layer{i}')
      if len(self.config.pattern) == 1:  # its parameters have no level 'layer0'
        nn.share_scope(self, block)
      h_BxTxD, (record, cache) = block(h_BxTxD, options, caches and caches[i], positions)
      records.append(record)
      new_caches.append(cache)
    record = None if options is None else LayerRecord(*map(_stacked, zip(*records)))
    return h_BxTxD, (record, tuple(new_caches))


def _stacked(values: tuple[ArrayTree | None, ...]) -> Any:
  """A field of the records of several blocks, without those that lack it, as Mamba mixers may."""
  known = [value for value in values if value is not None]
  return jax.tree.map(lambda *parts: jnp.stack(parts), *known) if known else None


class Transformer(nn.Module):
  """A model that maps tokens to next-token logits.

  `Transformer(config).apply({'params': params}, tokens_BxT)` returns float32 logits (B, T, V). The
  two steps are methods, for `apply(..., method='hidden')`: `hidden` returns the input of the
  unembedding, and `logits` applies that.

  A model without a vocabulary takes continuous inputs (B, T, F) instead of tokens. Layers are
  scanned: parameters and record leaves have a leading layer axis.
  """

  config: ModelConfig

  def setup(self):
    config, position = self.config, self.config.attention.position
    vocabulary, width = config.vocab_size, config.embedding_dim or config.d_model
    make = lambda name, init, *shape: self.param(
      name, initializer(init, config), shape, jnp.float32
    )
    # Attributes of modules, and the names given here, are the keys of parameters in checkpoints.
    if vocabulary:
      self.embed: Any = make('embed', 'embedding', vocabulary, width)  # or a module
    else:
      self.embed = Dense(config.d_model, config)
    self.position_params = {
      name: make('positions', p.init, *p.shape)
      for name, p in position.embedding_params(config.d_model).items()
    }
    if config.sink_tokens:
      self.sink_tokens = make('sink_tokens', 'embedding', config.sink_tokens, config.d_model)
    if config.embedding_dim:
      self.embed_in = Dense(config.d_model, config)
      self.embed_out = Dense(config.embedding_dim, config)
    self.blocks = _scanned_periods(config)
    self.final_norm = Norm(config)
    self.unembed = Weights((width, vocabulary or config.output_features), config)

  def __call__(self, inputs: jax.Array | np.ndarray) -> jax.Array:
    """The logits (B, T, V), float32; the outputs (B, T, F) of a model of continuous inputs."""
    return self.logits(self.hidden(inputs)[0])

  def hidden(
    self,
    inputs: jax.Array | np.ndarray,
    options: RecordOptions | None = None,
    state: DecodeState | None = None,
    positions: DecodePositions | None = None,
  ) -> tuple[jax.Array, Record | None, DecodeState | None]:
    """Returns the input (B, T, E) of the unembedding, a record, and the state after these tokens.

    E is d_model, or embedding_dim where embeddings are projected. There is a record with options,
    and a state with `state` and `positions`, with which a text is decoded.
    """
    config = self.config
    if positions is None or positions.keys_LxE is None:
      config.attention.position.check_length(inputs.shape[1])
      sink_tokens, positions_T = config.sink_tokens, np.arange(inputs.shape[1])
    else:
      # Decoding counts learned sink tokens as positions of attention; embeddings of positions do
      # not.
      sink_tokens, positions_T = 0, positions.queries_L - config.sink_tokens
    h0_BxTxD = self._embedded(inputs, positions_T, sink_tokens)
    caches = state and state.layers
    h_BxTxD, (layers, new_caches) = self.blocks(h0_BxTxD, options, caches, positions)
    if state is not None:
      assert positions is not None
      blocks = zip(state.layers, new_caches, strict=True)
      state = DecodeState(
        tuple(written(*both, positions.entries_L) for both in blocks),
        state.tokens_read + h_BxTxD.shape[1],
      )
    h_BxTxD = h_BxTxD[:, sink_tokens:]
    if config.norm_location != 'post':
      h_BxTxD = self.final_norm(h_BxTxD)
    if config.embedding_dim:
      h_BxTxD = self.embed_out(h_BxTxD)
    record = None if options is None else _record(layers, h0_BxTxD, options, sink_tokens)
    return sharding_constraint('btd', h_BxTxD), record, state

  def logits(self, h_BxTxE: jax.Array) -> jax.Array:
    """The logits (B, T, V), float32, of what `hidden` returns."""
    kernel_ExV, bias_V = self.unembedding()
    logits = linear(h_BxTxE, kernel_ExV.astype(h_BxTxE.dtype), jnp.float32)
    if bias_V is not None:
      logits = logits + bias_V
    return soft_cap(logits, self.config.logit_cap)

  def unembedding(self) -> tuple[jax.Array, jax.Array | None]:
    """The matrix W (E, V) and the bias (V,), if there is one, of the logits h W + b."""
    config = self.config
    if not config.unembedding:
      raise ValueError(
        'the checkpoint has no unembedding (such as lm_head.weight), without which '
        'there are no logits, generated texts and losses: load a checkpoint of the '
        'whole model.'
      )
    if config.tied:
      return self.embed.T, None
    return self.unembed('unembed' in config.biases)

  def _embedded(
    self,
    inputs: jax.Array | np.ndarray,
    positions_T: jax.Array | np.ndarray,
    sink_tokens: int,
  ) -> jax.Array:
    """H^0 = X W_E + P, after learned sink tokens, in the dtype of activations."""
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    if config.vocab_size:
      h_BxTxD: Any = _embeddings(config.vocab_size, self.embed, jnp.asarray(inputs))
      if config.embedding_dim:
        h_BxTxD = self.embed_in(h_BxTxD)
    else:
      h_BxTxD = self.embed(jnp.asarray(inputs))
    position = config.attention.position
    added = position.embedding(positions_T, config.d_model, self.position_params)
    h_BxTxD = h_BxTxD if added is None else h_BxTxD + added
    h_BxTxD = sharding_constraint('btd', h_BxTxD.astype(dtype))
    if not sink_tokens:
      return h_BxTxD
    sinks_SxD = self.sink_tokens.astype(dtype)
    sinks_BxSxD = jnp.broadcast_to(sinks_SxD, (h_BxTxD.shape[0], *sinks_SxD.shape))
    return jnp.concatenate([sinks_BxSxD, h_BxTxD], 1)


def _record(
  layers: LayerRecord,
  h0_BxTxD: jax.Array,
  options: RecordOptions,
  sink_tokens: int,
) -> Record:
  # (periods, blocks of a period, ...) to (layers, ...)
  layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layers)
  norm_BxT, tokens = l2_norm(h0_BxTxD), slice(sink_tokens, None)
  return Record(
    layers,
    norm_BxT[:, tokens],
    norm_BxT[:, :sink_tokens].max(1) if sink_tokens else None,
    options.hidden(h0_BxTxD[:, tokens]) if options.hidden else None,
  )


def _scanned_periods(config: ModelConfig) -> nn.Module:
  """All blocks as one module with the arguments of a period: a loop over periods, compiled once."""
  body = Period
  if config.remat != 'none':
    # The loop already keeps a block from being merged with its recomputation.
    body = nn.remat(body, prevent_cse=False, static_argnums=(2,), policy=SAVED[config.remat])
  # With a remat there is one period in an iteration, see `ModelConfig.unroll`.
  blocks = min(config.unroll if config.remat == 'none' else 1, config.layers)
  # The stream is the carry. Parameters, caches and records are slices along axis 0; record options
  # and positions are the same in every iteration.
  in_axes: Any = (nn.broadcast, 0, nn.broadcast)  # Flax documents a tuple, and annotates int
  # 'edits' has what analyses put instead of activations, see `Attention.edit_inputs`.
  scanned = nn.scan(
    body,
    variable_axes={'params': 0, 'edits': 0},
    split_rngs={'params': True},
    length=config.layers // len(config.pattern),
    in_axes=in_axes,
    unroll=max(1, blocks // len(config.pattern)),
  )
  return scanned(config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embeddings(vocab_size: int, table_VxE: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
  """table_VxE[tokens_BxT], whose gradient each device sums before devices exchange anything.

  XLA would send the float32 gradients of all sequences to every device of 'fsdp', which then adds
  all of them to its part of the table.
  """
  del vocab_size
  return sharding_constraint('ve', table_VxE)[tokens_BxT]


@standard_promotion()
def _embeddings_gradient(
  vocab_size: int,
  tokens_BxT: jax.Array,
  g_BxTxE: jax.Array,
) -> tuple[Any, ...]:
  add = lambda tokens, g: (jnp.zeros((vocab_size, g.shape[-1]), g.dtype).at[tokens].add(g),)
  return *shard_map_batch_heads('bt bte -> ve', add, tokens_BxT, g_BxTxE), None


_embeddings.defvjp(
  lambda size, table, tokens: (_embeddings(size, table, tokens), tokens), _embeddings_gradient
)


@functools.partial(jax.jit, static_argnums=0)
@standard_promotion()
def init_params(config: ModelConfig, seed: int | jax.Array) -> ParamTree:
  """Initial float32 parameters, nested dicts; a pure function of the config and an integer seed."""
  # One token suffices to make the parameters, but the kernels of the libraries refuse it.
  config = dataclasses.replace(config, implementation='reference', unroll=1)
  inputs = (
    jnp.zeros((1, 1), jnp.int32) if config.vocab_size else jnp.zeros((1, 1, config.input_features))
  )
  method = '__call__' if config.unembedding else 'hidden'
  return Transformer(config).init(jax.random.key(seed), inputs, method=method)['params']
