"""The decoder."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.kernels.epilogue import ATTENTION
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.attention import Attention, norm
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.kv_cache import DecodePositions, DecodeState
from sink_jax.models.layers import FeedForward, Linear, Norm, initializer
from sink_jax.models.mamba import MambaMixer
from sink_jax.models.moe import MixtureOfExperts
from sink_jax.models.record import LayerRecord, Record, RecordOptions


def _attention_saveable(primitive, *arguments, **params):
  """Results of attention; cuDNN's have no name, but a primitive of their own."""
  named = jax.checkpoint_policies.save_only_these_names(ATTENTION)
  return primitive.name.startswith('dot_product_attention_fwd') or named(
      primitive, *arguments, **params)


# What `remat` keeps of a block beside its input.
SAVED = {
    'blocks': jax.checkpoint_policies.nothing_saveable,
    'save_attention': _attention_saveable,
    'save_matmuls': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _attention_saveable),
}


class Block(nn.Module):
  """One transformer block, pre-norm (Eq. 2) or post-norm (Eq. 3)."""

  config: ModelConfig
  layer: Layer = Layer()

  @nn.compact
  def __call__(self, h_BxTxD, want: RecordOptions | None, cache=None,
               step: DecodePositions | None = None):
    """Returns the output, what `want` asks for as (of attention, of the residual), the cache."""
    config = self.config
    norm1, norm2 = Norm(config, name='norm1'), Norm(config, name='norm2')
    if self.layer.experts:
      ffn = MixtureOfExperts(config, self.layer.experts, name='ffn')
    else:
      ffn = FeedForward(config, name='ffn')
    if config.norm_location == 'pre':
      o, seen, cache = self._mix(norm1(h_BxTxD), want, cache, step)
      x = h_BxTxD + o
      before = x + ffn(norm2(h_BxTxD if config.parallel_residual else x))
      out = before
    else:
      o, seen, cache = self._mix(h_BxTxD, want, cache, step)
      x = norm1(h_BxTxD + o)
      before = x + ffn(x)
      out = norm2(before)
    out = sharding_constraint('btd', out)
    if want is None:
      return out, (None, cache)
    tokens = slice(config.sink_tokens, None)
    residual = dict(
        hidden_norm_BxT=norm(out)[:, tokens],
        sink_token_norm_B=norm(out)[:, 0] if config.sink_tokens else None,
        hidden_before_norm_BxT=norm(before)[:, tokens],
        hidden_BxTxD=out[:, tokens].astype(jnp.float32) if want.hidden else None,
        hidden_before_norm_BxTxD=before[:, tokens].astype(jnp.float32) if want.hidden else None)
    return out, ((seen, residual), cache)

  def _mix(self, x_BxTxD, want, cache, step):
    """Attention, or what stands in its place."""
    config, layer = self.config, self.layer
    if layer.mamba:
      out, cache = MambaMixer(config, layer.mamba, name='mamba')(x_BxTxD, cache)
      return out, None, cache
    return Attention(config, config.attention_of(layer), name='attention')(
        x_BxTxD, want, cache, step)


class Period(nn.Module):
  """The blocks of a pattern, one after the other."""

  config: ModelConfig

  @nn.compact
  def __call__(self, h_BxTxD, want: RecordOptions | None, cache=None,
               step: DecodePositions | None = None):
    shown, caches = [], []
    for i, layer in enumerate(self.config.pattern):
      block = Block(self.config, layer, name=f'layer{i}')
      h_BxTxD, (seen, own) = block(h_BxTxD, want, None if cache is None else cache[i], step)
      shown.append(seen)
      caches.append(own)
    if want is None:
      return h_BxTxD, (None, tuple(caches))
    attention, residual = zip(*shown)
    stack = lambda *parts: jnp.stack(parts)
    return h_BxTxD, ((jax.tree.map(stack, *(seen for seen in attention if seen is not None)),
                      jax.tree.map(stack, *residual)), tuple(caches))


class Transformer(nn.Module):
  """Tokens in, next-token logits out.

  `Transformer(config).apply({'params': params}, tokens_BxT)` returns float32 logits
  (B, T, V). With `want=Want()` it returns (logits, Record): the same parameters and
  the same forward pass, shown. With `unembed=False` it returns what the unembedding
  would see, (B, T, D). With `memory` it returns (logits of the last token (B, V), memory):
  the tokens begin a text, or, with `step`, are the one that comes after what is remembered.
  Layers are scanned, some periods of the pattern at a time (`ModelConfig.unroll`): parameters
  and record leaves have a leading layer axis.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, inputs, want: RecordOptions | None = None, unembed: bool = True,
               memory: DecodeState | None = None, step: DecodePositions | None = None):
    config = self.config
    dtype = jnp.dtype(config.dtype)
    # A step's tokens stand where the cache says; a learned sink token stands before them all.
    begins = config.sink_tokens if step is None else 0
    if step is None:
      config.attention.position.check_length(inputs.shape[1])
    positions_T = np.arange(inputs.shape[1]) if step is None else (
        step.queries_L - config.sink_tokens)
    h_BxTxD, table_VxE = self._embed(inputs, positions_T)
    h_BxTxD = sharding_constraint('btd', h_BxTxD.astype(dtype))
    if config.sink_tokens:
      sinks_SxD = self.param('sink_tokens', initializer('embedding', config),
                             (config.sink_tokens, config.d_model), jnp.float32)
    if begins:
      h_BxTxD = jnp.concatenate([jnp.broadcast_to(
          sinks_SxD.astype(dtype), (h_BxTxD.shape[0], *sinks_SxD.shape)), h_BxTxD], 1)
    h0_BxTxD = h_BxTxD
    period = Block if len(config.pattern) == 1 else Period
    options = {'layer': config.pattern[0]} if period is Block else {}
    if config.remat != 'none':
      period = nn.remat(period, prevent_cse=False, static_argnums=(2,),
                        policy=SAVED[config.remat])
    blocks = nn.scan(period, variable_axes={'params': 0}, split_rngs={'params': True},
                     length=config.layers // len(config.pattern),
                     unroll=config.periods_per_turn,
                     in_axes=(nn.broadcast, 0, nn.broadcast))(config, **options, name='blocks')
    h_BxTxD, (shown, caches) = blocks(h_BxTxD, want, memory and memory.layers, step)
    if memory is not None:
      memory = DecodeState(caches, memory.seen + h_BxTxD.shape[1])
      h_BxTxD = h_BxTxD[:, -1:]
    else:
      h_BxTxD = h_BxTxD[:, begins:]
    if config.norm_location == 'pre':
      h_BxTxD = Norm(config, name='final_norm')(h_BxTxD)
    if not unembed:
      return sharding_constraint('btd', h_BxTxD)
    logits = self._unembed(h_BxTxD, table_VxE)
    if memory is not None:
      return logits[:, 0], memory
    if want is None:
      return logits
    if len(config.pattern) > 1:
      shown = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), shown)
    embedding_norms = norm(h0_BxTxD)
    return logits, Record(
        LayerRecord(**shown[0], **shown[1]), embedding_norms[:, begins:],
        h0_BxTxD[:, begins:].astype(jnp.float32) if want.hidden else None,
        embedding_norms[:, 0] if begins else None)

  def _embed(self, inputs, positions_T):
    """H^0 = X W_E + P, float32, and W_E; continuous inputs are projected instead."""
    config, table_VxE = self.config, None
    if config.vocab_size:
      if not jnp.issubdtype(inputs.dtype, jnp.integer) or inputs.ndim != 2:
        raise ValueError('tokens must be integers of shape (B, T), not '
                         f'{inputs.dtype} of shape {inputs.shape}.')
      table_VxE = self.param('embed', initializer('embedding', config),
                             (config.vocab_size, config.embedding_dim or config.d_model),
                             jnp.float32)
      h = sharding_constraint('ve', table_VxE)[inputs]
      if config.embedding_dim:
        h = Linear(config.d_model, config, name='embed_in')(h)
    else:
      h = Linear(config.d_model, config, name='embed')(inputs)
    position = config.attention.position
    params = {name: self.param('positions', initializer(p.init, config), p.shape, jnp.float32)
              for name, p in position.embedding_params(config.d_model).items()}
    added = position.embedding(positions_T, config.d_model, params)
    return (h if added is None else h + added), table_VxE

  def _unembed(self, h_BxTxD, table_VxE):
    config = self.config
    if config.embedding_dim:
      h_BxTxD = Linear(config.embedding_dim, config, name='embed_out')(h_BxTxD)
    if config.tied:
      return jnp.einsum('btd,vd->btv', h_BxTxD, table_VxE.astype(h_BxTxD.dtype),
                        preferred_element_type=jnp.float32)
    return Linear(config.vocab_size or config.output_features, config, group='unembed',
                  out_dtype=jnp.float32, name='unembed')(h_BxTxD)


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, seed):
  """Fresh float32 parameters; a pure function of the config and an integer seed."""
  # The libraries refuse one token.
  config = dataclasses.replace(config, implementation='reference', unroll=1)
  if config.vocab_size:
    inputs = jnp.zeros((1, 1), jnp.int32)
  else:
    inputs = jnp.zeros((1, 1, config.input_features))
  return Transformer(config).init(jax.random.key(seed), inputs)['params']
