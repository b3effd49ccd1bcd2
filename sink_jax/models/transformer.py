"""The decoder."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from sink_jax.kernels.sharded import on_batch
from sink_jax.models.attention import Attention, norm
from sink_jax.models.config import ModelConfig
from sink_jax.models.layers import FeedForward, Linear, Norm, initializer
from sink_jax.models.record import LayerRecord, Record, Want


class Block(nn.Module):
  """One transformer block, pre-norm (Eq. 2) or post-norm (Eq. 3)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, h_BxTxD, want: Want | None):
    config = self.config
    norm1, norm2 = Norm(config, name='norm1'), Norm(config, name='norm2')
    attention, ffn = Attention(config, name='attention'), FeedForward(config, name='ffn')
    if config.norm_location == 'pre':
      o, seen = attention(norm1(h_BxTxD), want)
      x = h_BxTxD + o
      before = x + ffn(norm2(x))
      out = before
    else:
      o, seen = attention(h_BxTxD, want)
      x = norm1(h_BxTxD + o)
      before = x + ffn(x)
      out = norm2(before)
    out = on_batch(out)
    if want is None:
      return out, None
    tokens = slice(config.sink_tokens, None)
    return out, LayerRecord(
        **seen, hidden_norm_BxT=norm(out)[:, tokens],
        sink_token_norm_B=norm(out)[:, 0] if config.sink_tokens else None,
        hidden_before_norm_BxT=norm(before)[:, tokens],
        hidden_BxTxD=out[:, tokens].astype(jnp.float32) if want.hidden else None,
        hidden_before_norm_BxTxD=before[:, tokens].astype(jnp.float32) if want.hidden else None)


class Transformer(nn.Module):
  """Tokens in, next-token logits out.

  `Transformer(config).apply({'params': params}, tokens_BxT)` returns float32 logits
  (B, T, V). With `want=Want()` it returns (logits, Record): the same parameters and
  the same forward pass, shown. With `unembed=False` it returns what the unembedding
  would see, (B, T, D). Layers are scanned: parameters and record leaves have
  a leading layer axis.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, inputs, want: Want | None = None, unembed: bool = True):
    config = self.config
    dtype = jnp.dtype(config.dtype)
    h_BxTxD = on_batch(self._embed(inputs).astype(dtype))
    if config.sink_tokens:
      sinks_SxD = self.param('sink_tokens', initializer('embedding', config),
                             (config.sink_tokens, config.d_model), jnp.float32)
      h_BxTxD = jnp.concatenate([jnp.broadcast_to(
          sinks_SxD.astype(dtype), (h_BxTxD.shape[0], *sinks_SxD.shape)), h_BxTxD], 1)
    embedding_norms = norm(h_BxTxD) if want else None
    block = nn.remat(Block, prevent_cse=False, static_argnums=(2,)) if config.remat else Block
    blocks = nn.scan(block, variable_axes={'params': 0}, split_rngs={'params': True},
                     length=config.layers, in_axes=nn.broadcast)(config, name='blocks')
    h_BxTxD, layers = blocks(h_BxTxD, want)
    h_BxTxD = h_BxTxD[:, config.sink_tokens:]
    if config.norm_location == 'pre':
      h_BxTxD = Norm(config, name='final_norm')(h_BxTxD)
    if not unembed:
      return h_BxTxD
    logits = Linear(config.vocab_size or config.output_features, config,
                    out_dtype=jnp.float32, name='unembed')(h_BxTxD)
    if want is None:
      return logits
    return logits, Record(layers, embedding_norms[:, config.sink_tokens:],
                          embedding_norms[:, 0] if config.sink_tokens else None)

  def _embed(self, inputs):
    """H^0 = X W_E + P, float32; continuous inputs are projected instead."""
    config = self.config
    if config.vocab_size:
      if not jnp.issubdtype(inputs.dtype, jnp.integer) or inputs.ndim != 2:
        raise ValueError('tokens must be integers of shape (B, T), not '
                         f'{inputs.dtype} of shape {inputs.shape}.')
      table_VxD = self.param('embed', initializer('embedding', config),
                             (config.vocab_size, config.d_model), jnp.float32)
      h = table_VxD[inputs]
    else:
      h = Linear(config.d_model, config, name='embed')(inputs)
    position = config.attention.position
    params = {name: self.param('positions', initializer(p.init, config), p.shape, jnp.float32)
              for name, p in position.embedding_params(config.d_model).items()}
    added = position.embedding(inputs.shape[1], config.d_model, params)
    return h if added is None else h + added


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, seed):
  """Fresh float32 parameters; a pure function of the config and an integer seed."""
  config = dataclasses.replace(config, implementation='reference')  # libraries refuse one token
  if config.vocab_size:
    inputs = jnp.zeros((1, 1), jnp.int32)
  else:
    inputs = jnp.zeros((1, 1, config.input_features))
  return Transformer(config).init(jax.random.key(seed), inputs)['params']
