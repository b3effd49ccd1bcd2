"""A key/value cache of bounded size: which tokens it keeps, and how new tokens attend to them.

If positions count the tokens of the text, stored keys are rotated. If they count the tokens in the
cache, as in StreamingLLM (Xiao et al. 2023), positions change as tokens are dropped, so keys are
rotated on use.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention import reference
from sink_jax.attention.spec import (
  AttentionSpec,
  LayerParams,
  apply_position_and_features,
  scaled_queries,
)
from sink_jax.component import check_types
from sink_jax.models.config import ModelConfig

# Position of an entry without a token. It is later than any query, so every mask hides it.
EMPTY = 2**30


class KVCache(NamedTuple):
  """Normalised keys, and values as attention mixes them, of a layer's C entries."""

  # The entries of a head are neighbours in memory, since attention reads them together.
  k_BxHkvxCxDh: jax.Array
  v_BxHkvxCxDh: jax.Array


class MambaCache(NamedTuple):
  """The state of a Mamba mixer after all tokens so far, whose number does not change its size."""

  inputs_BxKxI: jax.Array  # the last K - 1 inputs of the convolution, which has K taps
  state_BxIxS: jax.Array  # the recurrent state of every channel, in float32


LayerCache = KVCache | MambaCache


class DecodePositions(NamedTuple):
  """The entries of a cache that L new tokens overwrite, and the positions of all used tokens."""

  entries_L: jax.Array  # entries that the new tokens overwrite
  queries_L: jax.Array  # positions of the new tokens
  kept_L: jax.Array | None  # positions that rotate the stored keys; None: rotated on use
  # For each new token, the positions of the C old entries, then of the L new tokens; None if these
  # begin the text and attend only to each other.
  keys_LxE: jax.Array | None


class DecodeState(NamedTuple):
  """A cache for each block of the pattern, with a leading axis of periods, and the tokens read."""

  layers: tuple[LayerCache, ...]
  tokens_read: jax.Array  # equal for all texts; learned sink tokens count


@dataclasses.dataclass(frozen=True)
class CachePolicy:
  """A cache that keeps the first `sinks` and the last `size - sinks` tokens of a text.

  sinks=0 is a sliding window, and sinks=4 is StreamingLLM. The `size` tokens that a query attends
  to include the query's token. Learned sink tokens count.

  Attributes:
    size: the number of tokens that the cache holds.
    sinks: the number of first tokens that are never dropped.
    positions: 'cache' counts the tokens in the cache, as StreamingLLM does, so that no position
      exceeds size - 1. 'text' counts the tokens of the text, and is faster, since keys are rotated
      once; rotary angles are then off by up to 0.06 radians after a million tokens.
  """

  size: int
  sinks: int = 0
  positions: str = 'cache'

  def __post_init__(self):
    check_types(self, 'CachePolicy')
    if not 0 <= self.sinks < self.size or self.positions not in ('cache', 'text'):
      raise ValueError(f"{self}: needs 0 <= sinks < size, and positions 'cache' or 'text'.")

  @property
  def recent(self) -> int:
    return self.size - self.sinks

  def first_positions(self, count: int) -> DecodePositions:
    """The positions of the first `count` tokens of a text, at most `size`."""
    tokens_L = jnp.arange(count)
    return DecodePositions(tokens_L, tokens_L, tokens_L if self.positions == 'text' else None, None)

  def next_positions(self, tokens_read: int | jax.Array, count: int) -> DecodePositions:
    """The positions of `count` further tokens, at most `recent`, as if read one by one."""
    new_L, entries_C = tokens_read + jnp.arange(count), jnp.arange(self.size)
    # The token in each entry. Entries fill up in order; then those after the sinks are a ring
    # buffer: the newest token overwrites the oldest, so that nothing is moved.
    last = new_L[0] - 1
    newest_C = last - (last - entries_C) % self.recent
    text_C = jnp.where((entries_C < self.sinks) | (last < self.size), entries_C, newest_C)
    text_C = jnp.where(text_C > last, EMPTY, text_C)
    entries_L = jnp.where(new_L < self.size, new_L, self.sinks + (new_L - self.sinks) % self.recent)
    text_E = jnp.concatenate([text_C, new_L])
    sink_E = text_E < self.sinks
    # A token sees the tokens that are in the cache after it is written.
    oldest_L = jnp.where(new_L < self.size, 0, new_L - self.recent + 1)
    seen_LxE = (text_E <= new_L[:, None]) & (sink_E | (text_E >= oldest_L[:, None]))
    if self.positions == 'text':
      return DecodePositions(entries_L, new_L, new_L, jnp.where(seen_LxE, text_E, EMPTY))
    # Sinks keep their positions; all others move up as tokens are dropped.
    dropped_L = jnp.maximum(new_L + 1 - self.size, 0)
    keys_LxE = jnp.where(sink_E, text_E, text_E - dropped_L[:, None])
    return DecodePositions(entries_L, new_L - dropped_L, None, jnp.where(seen_LxE, keys_LxE, EMPTY))


def attend_cached(
  spec: AttentionSpec,
  q_BxLxHxDh: jax.Array,
  cache: KVCache,
  new: KVCache,
  params: LayerParams,
  positions: DecodePositions,
) -> jax.Array:
  """Output (B, L, H, Dh) of attention, before the spec's head, for the next L tokens of a text.

  Queries come normalised and not rotated; `new` has the keys and values of their tokens.
  """
  # The transposes are folded into the products.
  k_BxExHkvxDh, v_BxExHkvxDh = (
    jnp.swapaxes(jnp.concatenate(parts, 2), 1, 2) for parts in zip(cache, new)
  )
  rotated = positions.kept_L is not None
  if rotated:
    k_BxExHkvxDh = spec.feature_map.features(k_BxExHkvxDh, params.get('feature_map', {}))
  q_BxLxHxDh = apply_position_and_features(
    spec, scaled_queries(spec, q_BxLxHxDh, positions.queries_L, params), positions.queries_L, params
  )

  def attend(q_BxHxDh, i, j_E):
    k = k_BxExHkvxDh if rotated else apply_position_and_features(spec, k_BxExHkvxDh, j_E, params)
    return reference.attend(spec, q_BxHxDh[:, None], k, v_BxExHkvxDh, params, i[None], j_E)[:, 0]

  return jax.vmap(attend, (1, 0, 0), 1)(q_BxLxHxDh, positions.queries_L, positions.keys_LxE)


def written(cache: LayerCache, new: LayerCache, entries_L: jax.Array) -> LayerCache:
  """The cache of some blocks after L tokens.

  The entries of all blocks are written at once, into the same memory: a loop with caches as inputs
  and outputs would copy all of them at every token.
  """
  if isinstance(cache, MambaCache):
    return new
  return KVCache(*(old.at[..., entries_L, :].set(x) for old, x in zip(cache, new)))


def empty_state(config: ModelConfig, policy: CachePolicy, batch: int) -> DecodeState:
  dims, dtype = config.dims, jnp.dtype(config.dtype)
  # The leading axis that the scan over blocks takes apart: one slice per period of the pattern.
  repeats = config.layers // len(config.pattern)
  shape = repeats, batch, dims.kv_heads, policy.size, dims.head_dim
  return DecodeState(
    tuple(
      MambaCache(
        jnp.zeros((repeats, batch, sizes.conv - 1, sizes.inner), dtype),
        jnp.zeros((repeats, batch, sizes.inner, sizes.state)),
      )
      if (sizes := layer.mamba)
      else KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
      for layer in config.pattern
    ),
    jnp.zeros((), jnp.int32),
  )


def state_bytes(config: ModelConfig, policy: CachePolicy, batch: int) -> int:
  """Bytes that the decoding state of `batch` texts takes."""
  shapes = jax.eval_shape(lambda: empty_state(config, policy, batch))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def check_policy(config: ModelConfig, policy: CachePolicy, length: int, at_once: int = 1) -> None:
  """Raises a ValueError unless a policy can read `length` tokens, `at_once` at a time."""
  if not config.vocab_size:
    raise ValueError('a model of continuous inputs has no tokens to generate or to score.')
  sinks, size = config.sink_tokens, policy.size
  total, together = length + sinks, min(at_once + sinks, size)
  if size <= sinks or (total > size and policy.sinks < sinks):
    raise ValueError(
      f'{policy} drops a learned sink token: give it sinks of at least {sinks} and '
      f'a size of at least {sinks + 1}.'
    )
  used = total if policy.positions == 'text' else min(total, size)  # positions
  spec = config.attention
  masks = [spec.mask for spec in config.attention_specs]
  for mask in masks:
    if mask.prefix and together < min(mask.prefix, total):
      raise ValueError(
        f'{mask}: the tokens of a prefix see each other, so all of them must be '
        f'read at once; here these are {together}. Give a longer prompt or cache.'
      )
  keys = max(min(mask.window or total, total) for mask in masks)
  for component, least in (
    (spec.kv_bias, spec.kv_bias.future or 0),  # it counts tokens to come
    (spec.temperature, keys if spec.temperature.counts_keys else 0),
  ):
    if size < least and used < total:
      raise ValueError(
        f'{component} depends on the length of the text, which positions of the '
        "cache do not give: give the cache positions='text', or a size of at "
        f'least {least}.'
      )
  spec.position.check_length(used - sinks)
