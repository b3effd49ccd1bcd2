"""Reading a text token after token, with a cache of bounded size."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.kv_cache import (
  AttentionCache,
  CachePolicy,
  DecodeState,
  KVCache,
  MambaCache,
  RotatedKVCache,
)
from sink_jax.models.layers import apply
from sink_jax.models.transformer import Transformer


# Tokens of a long prompt that are read at once: the weights are read once for all of them, and as
# many rotated copies of the keys are held in each layer.
_PIECE = 16


def empty_state(config: ModelConfig, policy: CachePolicy, batch: int) -> DecodeState:
  """The state of a model that has read nothing yet of `batch` texts."""
  dims, dtype = config.dims, jnp.dtype(config.dtype)
  # The leading axis that the scan over blocks takes apart: one slice per period of the pattern.
  repeats = config.layers // len(config.pattern)

  def cache(layer: Layer) -> AttentionCache | MambaCache:
    if layer.mamba:
      sizes = layer.mamba
      return MambaCache(jnp.zeros((repeats, batch, sizes.conv - 1, sizes.inner), dtype),
                        jnp.zeros((repeats, batch, sizes.inner, sizes.state)))
    kept_rotated = policy.positions == 'text' or config.attention_of(layer).scores_by_difference
    kind = RotatedKVCache if kept_rotated else KVCache
    shape = repeats, batch, dims.kv_heads, policy.size, dims.head_dim
    return kind(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

  caches = tuple(cache(layer) for layer in config.pattern)
  return DecodeState(caches[0] if len(caches) == 1 else caches, jnp.zeros((), jnp.int32))


def state_bytes(config: ModelConfig, policy: CachePolicy, batch: int) -> int:
  """Bytes that the decoding state of `batch` texts takes."""
  shapes = jax.eval_shape(functools.partial(empty_state, config, policy, batch))
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def prefill(config: ModelConfig, params: ParamTree, tokens_BxT: jax.Array,
            policy: CachePolicy) -> tuple[jax.Array, DecodeState]:
  """Reads the beginning of B texts, and returns the logits (B, V) of the last token, and the state.

  What fits the cache is read at once, the rest in pieces, in which each token sees what it would
  see if all were read one after another.
  """
  # Learned sink tokens, which `Transformer` puts before the text, take entries as well.
  fits = policy.size - config.sink_tokens
  carry = apply(
      Transformer(config), params, tokens_BxT[:, :fits],
      state=empty_state(config, policy, tokens_BxT.shape[0]))
  if tokens_BxT.shape[1] <= fits:
    return carry

  # Loops on the device: their carry is overwritten in place, so the cache exists once.
  def read(carry, tokens_LxB):
    return read_tokens(config, params, tokens_LxB.T, policy, carry[1]), None

  rest_TxB = tokens_BxT[:, fits:].T
  piece = min(_PIECE, policy.recent, len(rest_TxB))
  whole = len(rest_TxB) // piece * piece
  carry = jax.lax.scan(read, carry, rest_TxB[:whole].reshape(-1, piece, rest_TxB.shape[1]))[0]
  return read(carry, rest_TxB[whole:])[0] if whole < len(rest_TxB) else carry


def decode_step(config: ModelConfig, params: ParamTree, tokens_B: jax.Array,
                policy: CachePolicy, state: DecodeState) -> tuple[jax.Array, DecodeState]:
  """Reads one more token of every text, and returns its logits (B, V), and the state."""
  return apply(
      Transformer(config), params, tokens_B[:, None], state=state,
      positions=policy.next_token_positions(state.tokens_read))


def read_tokens(config: ModelConfig, params: ParamTree, tokens_BxL: jax.Array, policy: CachePolicy,
                state: DecodeState, every_logit: bool = False) -> tuple[jax.Array, DecodeState]:
  """Reads more tokens of every text, and returns the logits (B, V) of the last, and the state.

  Each token sees what it would see if they were read one after another. With `every_logit` the
  logits are those of all L tokens, (B, L, V).
  """
  return apply(
      Transformer(config), params, tokens_BxL, state=state, every_logit=every_logit,
      positions=policy.next_positions(state.tokens_read, tokens_BxL.shape[1]))


def check_policy(config: ModelConfig, policy: CachePolicy, length: int,
                 at_once: int = 1) -> None:
  """Checks that a text of `length` tokens can be read with the policy.

  at_once: how many tokens are read together at its beginning.

  Raises:
    ValueError: a prefix that is not read at once, a learned sink token that would be dropped, a
      temperature that grows with the text where positions are those of the cache, or more tokens
      than the position encoding allows; with the remedy.
  """
  total = length + config.sink_tokens
  for layer in config.pattern:
    mask = config.attention_of(layer).mask
    together = min(at_once + config.sink_tokens, policy.size)
    if mask.prefix and not layer.mamba and together < min(mask.prefix, total):
      raise ValueError(f'{mask}: the tokens of a prefix see each other, so all of them must be '
                       f'read at once; here these are {together}. Give a longer prompt or cache.')
  if policy.size <= config.sink_tokens or (
      total > policy.size and policy.sinks < config.sink_tokens):
    raise ValueError(f'{policy} drops a learned sink token: give it sinks of at least '
                     f'{config.sink_tokens} and a size of at least {config.sink_tokens + 1}.')
  _check_counts(config, policy, total)
  # The largest position that the text uses, plus one; counted in the cache it is at most the size.
  used = min(total, policy.size) if policy.positions == 'cache' else total
  config.attention.position.check_length(used - config.sink_tokens)


def _check_counts(config: ModelConfig, policy: CachePolicy, total: int) -> None:
  """Raises a ValueError where positions of the cache are not what the attention was trained on."""
  if policy.positions == 'text' or total <= policy.size:
    return
  # The logarithm of what is still to come does not follow a query whose position stays the same.
  kv_bias = config.attention.kv_bias
  if kv_bias.future is not None and policy.size < kv_bias.future:
    raise ValueError(f'{kv_bias} goes by the position of a query in the text, which positions of '
                     'the cache do not tell once a token was dropped. Give the cache '
                     f"positions='text', or a size of at least {kv_bias.future}.")
  temperature = config.attention.temperature
  if not temperature.counts_keys:
    return
  for layer in config.pattern:
    spec = config.attention_of(layer)
    # Keys that the last query sees if positions are counted in the text, and in the cache.
    text, cache = (hi - lo for lo, hi in (spec.mask.key_range(n - 1, n - 1, n)
                                          for n in (total, policy.size)))
    if text != cache and not layer.mamba:
      raise ValueError(
          f'{temperature} is trained on the logarithm of the keys of the text that a query sees, '
          f'up to {text} here, but positions of the cache count {cache} of them once a token was '
          "dropped. Give the cache positions='text', or a size of at least "
          f'{spec.mask.window or total}, where both are the same.')
