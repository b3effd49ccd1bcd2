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

from sink_jax.attention import soft_cap
from sink_jax.kernels.epilogue import ATTENTION
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.arrays import ParamTree
from sink_jax.models.attention import Attention, FirstValues, norm
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.kv_cache import (
  AttentionCache,
  DecodePositions,
  DecodeState,
  MambaCache,
  written,
)
from sink_jax.models.layers import FeedForward, Linear, Norm, initializer
from sink_jax.models.mamba import MambaMixer
from sink_jax.models.moe import MixtureOfExperts
from sink_jax.models.record import (
  AttentionRecord,
  LayerRecord,
  Record,
  RecordOptions,
  ResidualRecord,
)

LayerCache = AttentionCache | MambaCache
# What goes from block to block: hidden states (B, T, D), and the values of the first block where
# later ones mix them in.
Stream = tuple[jax.Array, FirstValues | None]


def _attention_saveable(primitive: jax.extend.core.Primitive, *arguments, **params) -> bool:
  """A checkpoint policy: whether a value is a result of attention, which is then kept.

  Kernels give their results the name ATTENTION; cuDNN's have a primitive of their own instead.
  """
  named = jax.checkpoint_policies.save_only_these_names(ATTENTION)
  return primitive.name.startswith('dot_product_attention_fwd') or named(
      primitive, *arguments, **params)


# What each value of `ModelConfig.remat` keeps of a block for the backward pass, beside the block's
# input; the rest is computed again there. Matrix products without a batch dimension are those of
# linear layers, while the scores of attention have one (the heads), and are never kept.
SAVED = {
    'blocks': jax.checkpoint_policies.nothing_saveable,
    'save_attention': _attention_saveable,
    'save_matmuls': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _attention_saveable),
}


class BlockRecord(NamedTuple):
  """What one block records; `attention` is None of a block with a Mamba mixer."""

  attention: AttentionRecord | None
  residual: ResidualRecord


class Block(nn.Module):
  """One transformer block, its norms where `ModelConfig.norm_location` has them."""

  config: ModelConfig
  layer: Layer = Layer()

  @nn.compact
  def __call__(self, stream: Stream, record_options: RecordOptions | None,
               cache: LayerCache | None = None, positions: DecodePositions | None = None,
               ) -> tuple[Stream, tuple[BlockRecord | None, LayerCache | None]]:
    """Returns the stream with the block's output, and (record, cache).

    The pair is what `nn.scan` expects of its body: what goes on to the next block, and what is
    stacked over the blocks. record_options is positional, because `nn.remat` counts it as a
    static argument by its number.
    """
    config, (h_BxTxD, first) = self.config, stream
    # The names of modules are the keys of parameters in checkpoints: they must not change.
    norm1, norm2 = Norm(config, name='norm1'), Norm(config, name='norm2')
    if self.layer.experts:
      ffn = MixtureOfExperts(config, self.layer.experts, name='ffn')
    else:
      ffn = FeedForward(config, name='ffn')
    if config.norm_location == 'pre':
      o, attention, cache, first = self._mix(
          norm1(h_BxTxD), record_options, cache, positions, first)
      x = h_BxTxD + o
      before = x + ffn(norm2(h_BxTxD if config.parallel_residual else x))
      out = before
    elif config.norm_location in ('sandwich', 'after'):
      after1, after2 = Norm(config, name='norm1_after'), Norm(config, name='norm2_after')
      sandwich = config.norm_location == 'sandwich'
      o, attention, cache, first = self._mix(
          norm1(h_BxTxD) if sandwich else h_BxTxD, record_options, cache, positions, first)
      x = h_BxTxD + after1(o)
      # The residual stream itself is not normalised, as in a pre-norm block.
      out = before = x + after2(ffn(norm2(x) if sandwich else x))
    elif config.norm_location == 'protected':
      o, attention, cache, first = self._mix(h_BxTxD, record_options, cache, positions, first)
      x = h_BxTxD + config.branch_scale * o
      out = before = x + config.branch_scale * ffn(x)
    else:
      o, attention, cache, first = self._mix(h_BxTxD, record_options, cache, positions, first)
      x = norm1(h_BxTxD + o)
      before = x + ffn(x)
      out = norm2(before)
    # Stated once per block: XLA may otherwise spread the layout of parameters to activations.
    out = sharding_constraint('btd', out)
    if record_options is None:
      return (out, first), (None, cache)
    tokens = slice(config.sink_tokens, None)
    hidden = lambda x: x[:, tokens].astype(jnp.float32) if record_options.hidden else None
    describe = record_options.describe_hidden
    residual = ResidualRecord(
        hidden_norm_BxT=norm(out)[:, tokens],
        hidden_before_norm_BxT=norm(before)[:, tokens],
        sink_token_norm_B=(norm(out)[:, :config.sink_tokens].max(1) if config.sink_tokens
                           else None),
        hidden_BxTxD=hidden(out), hidden_before_norm_BxTxD=hidden(before),
        hidden_description=describe(out[:, tokens]) if describe else None)
    return (out, first), (BlockRecord(attention, residual), cache)

  def _mix(self, x_BxTxD: jax.Array, record_options: RecordOptions | None,
           cache: LayerCache | None, positions: DecodePositions | None, first: FirstValues | None,
           ) -> tuple[jax.Array, AttentionRecord | None, LayerCache | None, FirstValues | None]:
    """Attention, or the Mamba mixer that takes its place."""
    config, layer = self.config, self.layer
    if layer.mamba:
      assert cache is None or isinstance(cache, MambaCache)
      out, cache = MambaMixer(config, layer.mamba, name='mamba')(x_BxTxD, cache)
      return out, None, cache, first
    assert not isinstance(cache, MambaCache)
    return Attention(config, config.attention_of(layer), name='attention')(
        x_BxTxD, record_options, cache, positions, first)


class Period(nn.Module):
  """The blocks of a pattern, one after the other: the body of the scan where they differ.

  It takes and returns what a Block does, with a tuple of caches, and records with a leading axis
  over the blocks of the period (for attention: over those that have it).
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, stream: Stream, record_options: RecordOptions | None,
               caches: tuple[LayerCache, ...] | None = None,
               positions: DecodePositions | None = None,
               ) -> tuple[Stream, tuple[BlockRecord | None, tuple[LayerCache | None, ...]]]:
    records, new_caches = [], []
    for i, layer in enumerate(self.config.pattern):
      block = Block(self.config, layer, name=f'layer{i}')
      stream, (record, cache) = block(
          stream, record_options, None if caches is None else caches[i], positions)
      records.append(record)
      new_caches.append(cache)
    if record_options is None:
      return stream, (None, tuple(new_caches))
    stack = lambda *parts: jnp.stack(parts)
    # The mixers of Mamba record nothing, so their blocks are left out of the stack.
    attention = [record.attention for record in records if record.attention is not None]
    record = BlockRecord(jax.tree.map(stack, *attention),
                         jax.tree.map(stack, *(record.residual for record in records)))
    return stream, (record, tuple(new_caches))


class Transformer(nn.Module):
  """A model that maps tokens to next-token logits.

  `Transformer(config).apply({'params': params}, tokens_BxT)` returns float32 logits
  (B, T, V). With `record_options` it returns (logits, Record), of the same parameters and the
  same forward pass. With `unembed=False` it returns what the matrix of the unembedding multiplies,
  (B, T, D), or (B, T, E) where embeddings are projected; a cap of the logits is then still to come.

  With `state` it decodes, and returns (logits of the last token (B, V), state): the tokens begin
  the texts, or, with `positions`, are the next ones of each text, after those that the state holds.
  With `every_logit` the logits are those of all these tokens, (B, T, V).

  Continuous inputs (B, T, F) take the place of tokens where the model has no vocabulary.
  Layers are scanned, some periods of the pattern at a time (`ModelConfig.unroll`): parameters
  and record leaves have a leading layer axis.

  Raises:
    ValueError: tokens that are not integers (B, T), continuous inputs that are not (B, T, F), or
      more of them than the position encoding allows.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, inputs: jax.Array | np.ndarray, record_options: RecordOptions | None = None,
               unembed: bool = True, state: DecodeState | None = None,
               positions: DecodePositions | None = None, every_logit: bool = False,
               ) -> jax.Array | tuple[jax.Array, Record] | tuple[jax.Array, DecodeState]:
    config = self.config
    dtype = jnp.dtype(config.dtype)
    # Learned sink tokens are put before the beginning of a text only. Decoding counts them as
    # positions of attention; embeddings of positions do not.
    sink_tokens = config.sink_tokens if positions is None else 0
    if config.vocab_size:
      if not jnp.issubdtype(inputs.dtype, jnp.integer) or inputs.ndim != 2:
        raise ValueError('tokens must be integers of shape (B, T), not '
                         f'{inputs.dtype} of shape {inputs.shape}.')
    elif inputs.ndim != 3 or inputs.shape[-1] != config.input_features:
      raise ValueError(f'inputs must have the shape (B, T, {config.input_features}), not '
                       f'{inputs.shape}.')
    if positions is None:
      config.attention.position.check_length(inputs.shape[1])
      positions_T = np.arange(inputs.shape[1])
    else:
      positions_T = positions.queries_L - config.sink_tokens
    h_BxTxD, table_VxE = self._embed(inputs, positions_T)
    h_BxTxD = sharding_constraint('btd', h_BxTxD.astype(dtype))
    if config.sink_tokens:
      sinks_SxD = self.param('sink_tokens', initializer('embedding', config),
                             (config.sink_tokens, config.d_model), jnp.float32)
      if sink_tokens:
        h_BxTxD = jnp.concatenate([jnp.broadcast_to(
            sinks_SxD.astype(dtype), (h_BxTxD.shape[0], *sinks_SxD.shape)), h_BxTxD], 1)
    h0_BxTxD = h_BxTxD
    first = None
    if config.attention.value.reads_first:
      shape = *h_BxTxD.shape[:2], config.dims.kv_heads, config.dims.head_dim
      first = FirstValues(sharding_constraint('bthd', jnp.zeros(shape, dtype)), jnp.array(False))
    (h_BxTxD, _), (record, caches) = self._blocks()(
        (h_BxTxD, first), record_options, None if state is None else state.layers, positions)
    if state is not None:
      entries_L = jnp.arange(h_BxTxD.shape[1]) if positions is None else positions.entries_L
      old, new = ((layers,) if len(config.pattern) == 1 else layers
                  for layers in (state.layers, caches))
      layers = tuple(_updated(*both, entries_L) for both in zip(old, new, strict=True))
      state = DecodeState(layers[0] if len(layers) == 1 else layers,
                          state.tokens_read + h_BxTxD.shape[1])
      if not every_logit:  # the next token depends on the last one's logits only
        h_BxTxD = h_BxTxD[:, -1:]
    else:
      h_BxTxD = h_BxTxD[:, sink_tokens:]
    if config.norm_location != 'post':
      h_BxTxD = Norm(config, name='final_norm')(h_BxTxD)
    if config.embedding_dim:
      h_BxTxD = Linear(config.embedding_dim, config, name='embed_out')(h_BxTxD)
    if not unembed:
      return sharding_constraint('btd', h_BxTxD)
    logits = self._unembed(h_BxTxD, table_VxE)
    if state is not None:
      return logits if every_logit else logits[:, 0], state
    if record_options is None:
      return logits
    if len(config.pattern) > 1:  # (periods, blocks of a period, ...) to (layers, ...)
      record = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), record)
    embedding_norms = norm(h0_BxTxD)
    describe = record_options.describe_hidden
    return logits, Record(
        LayerRecord(**record.attention._asdict(), **record.residual._asdict()),
        embedding_norms[:, sink_tokens:],
        h0_BxTxD[:, sink_tokens:].astype(jnp.float32) if record_options.hidden else None,
        embedding_norms[:, :sink_tokens].max(1) if sink_tokens else None,
        describe(h0_BxTxD[:, sink_tokens:]) if describe else None)

  def _blocks(self) -> nn.Module:
    """All blocks as one module: a loop over periods of the pattern, compiled once.

    Its arguments are those of a block: the stream, record options, caches, positions.
    """
    config = self.config
    arguments: dict[str, Any]
    if len(config.pattern) == 1:
      body, arguments = Block, {'layer': config.pattern[0]}
    else:
      body, arguments = Period, {}
    if config.remat != 'none':
      # The loop already keeps a block from being merged with its recomputation, so the barriers
      # that prevent_cse puts around it would only stop XLA from fusing.
      body = nn.remat(body, prevent_cse=False, static_argnums=(2,), policy=SAVED[config.remat])
    # The stream is the carry. Parameters are stacked along a new first axis
    # (variable_axes), and each turn initialises its slice from a key of its own (split_rngs);
    # caches go in and come out slice by slice along axis 0, as records come out. Record options
    # and positions are the same in every turn (nn.broadcast).
    in_axes: Any = (nn.broadcast, 0, nn.broadcast)  # Flax documents a tuple, and annotates int
    scanned = nn.scan(body, variable_axes={'params': 0}, split_rngs={'params': True},
                      length=config.layers // len(config.pattern),
                      unroll=config.periods_per_turn, in_axes=in_axes)
    return scanned(config, **arguments, name='blocks')

  def _embed(self, inputs: jax.Array | np.ndarray, positions_T: jax.Array | np.ndarray,
             ) -> tuple[jax.Array, jax.Array | None]:
    """H^0 = X W_E + P, float32, and W_E; continuous inputs are projected instead, without W_E."""
    config, table_VxE = self.config, None
    if config.vocab_size:
      table_VxE = self.param('embed', initializer('embedding', config),
                             (config.vocab_size, config.embedding_dim or config.d_model),
                             jnp.float32)
      h = sharding_constraint('ve', table_VxE)[inputs]
      if config.embedding_dim:
        h = Linear(config.d_model, config, name='embed_in')(h)
    else:
      h = Linear(config.d_model, config, name='embed')(jnp.asarray(inputs))
    position = config.attention.position
    params = {name: self.param('positions', initializer(p.init, config), p.shape, jnp.float32)
              for name, p in position.embedding_params(config.d_model).items()}
    added = position.embedding(positions_T, config.d_model, params)
    return (h if added is None else h + added), table_VxE

  def _unembed(self, h_BxTxD: jax.Array, table_VxE: jax.Array | None) -> jax.Array:
    """Float32 logits, or continuous outputs, of hidden states."""
    config = self.config
    if config.tied:
      assert table_VxE is not None  # the config has a vocabulary
      logits = jnp.einsum('btd,vd->btv', h_BxTxD, table_VxE.astype(h_BxTxD.dtype),
                          preferred_element_type=jnp.float32)
    else:
      logits = Linear(config.vocab_size or config.output_features, config, group='unembed',
                      out_dtype=jnp.float32, name='unembed')(h_BxTxD)
    return soft_cap(logits, config.logit_cap)


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, seed: int | jax.Array) -> ParamTree:
  """Initial float32 parameters, nested dicts; a pure function of the config and an integer seed."""
  # One token suffices to make the parameters, but the libraries' kernels refuse so few.
  config = dataclasses.replace(config, implementation='reference', unroll=1)
  if config.vocab_size:
    inputs = jnp.zeros((1, 1), jnp.int32)
  else:
    inputs = jnp.zeros((1, 1, config.input_features))
  return Transformer(config).init(jax.random.key(seed), inputs)['params']


def _updated(old: Any, new: Any, entries_L: jax.Array) -> LayerCache:
  """The cache of some blocks after L tokens, of which it gets keys and values, or the new state.

  The entries of all blocks are written at once, in place: a loop over blocks that took caches in
  and out whole would copy all that they hold at every token.
  """
  return new if isinstance(new, MambaCache) else written(old, new, entries_L)
