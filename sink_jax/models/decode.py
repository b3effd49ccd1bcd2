"""Reading a text token after token, with a cache of bounded size."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from sink_jax.models.config import ModelConfig
from sink_jax.models.kv_cache import CachePolicy, DecodeState, KVCache
from sink_jax.models.mamba import MambaCache
from sink_jax.models.transformer import Transformer


def empty_state(config: ModelConfig, policy: CachePolicy, batch: int) -> DecodeState:
  """The memory of a model that has read nothing of `batch` texts."""
  dims, dtype = config.dims, jnp.dtype(config.dtype)
  repeats = config.layers // len(config.pattern)

  def cache(layer):
    if layer.mamba:
      sizes = layer.mamba
      return MambaCache(jnp.zeros((repeats, batch, sizes.conv - 1, sizes.inner), dtype),
                        jnp.zeros((repeats, batch, sizes.inner, sizes.state)))
    shape = repeats, batch, policy.size, dims.kv_heads, dims.head_dim
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

  caches = tuple(cache(layer) for layer in config.pattern)
  return DecodeState(caches[0] if len(caches) == 1 else caches, jnp.zeros((), jnp.int32))


def state_bytes(config: ModelConfig, policy: CachePolicy, batch: int) -> int:
  """Bytes that the caches take."""
  shapes = jax.eval_shape(functools.partial(empty_state, config, policy, batch))
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def prefill(config: ModelConfig, params, tokens_BxT, policy: CachePolicy):
  """Reads the beginning of B texts: logits (B, V) of the last token, and the memory.

  What fits the cache is read at once, the rest one token at a time.
  """
  fits = policy.size - config.sink_tokens
  logits, memory = Transformer(config).apply(
      {'params': params}, tokens_BxT[:, :fits],
      memory=empty_state(config, policy, tokens_BxT.shape[0]))
  if tokens_BxT.shape[1] <= fits:
    return logits, memory

  def read(carry, tokens_B):
    return decode_step(config, params, tokens_B, policy, carry[1]), None

  return jax.lax.scan(read, (logits, memory), tokens_BxT[:, fits:].T)[0]


def decode_step(config: ModelConfig, params, tokens_B, policy: CachePolicy, memory: DecodeState):
  """Reads one more token of every text: its logits (B, V), and the memory."""
  return Transformer(config).apply(
      {'params': params}, tokens_B[:, None], memory=memory, step=policy.step(memory.seen))


def check_policy(config: ModelConfig, policy: CachePolicy, length: int,
                 at_once: int = 1) -> None:
  """Raises a ValueError where a text of `length` tokens cannot be read with the policy.

  at_once: how many tokens are read together at its beginning.
  """
  total = length + config.sink_tokens
  for layer in config.pattern:
    mask = config.attention_of(layer).mask
    together = min(at_once + config.sink_tokens, policy.size)
    if mask.prefix and not layer.mamba and together < min(mask.prefix, total):
      raise ValueError(f'{mask}: the tokens of a prefix see each other, so all of them must be '
                       f'read at once; here these are {together}. Give a longer prompt or cache.')
  if policy.size <= config.sink_tokens or (
      config.sink_tokens and total > policy.size and not policy.sinks):
    raise ValueError(f'{policy} drops the learned sink token: give it sinks of at least 1 and '
                     'a size of at least 2.')
  # Positions that the text will use; from the cache they stay below its size.
  used = min(total, policy.size) if policy.positions == 'cache' else total
  config.attention.position.check_length(used - config.sink_tokens)
