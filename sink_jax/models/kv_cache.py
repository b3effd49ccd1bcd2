"""A key/value cache as a value: which tokens it keeps, and the positions at which they are used.

Keys are kept as projected and normalised, and rotated when they are used, so that one
cache serves both kinds of positions of StreamingLLM (Xiao et al. 2023).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Position of an entry without a token. It is later than any query, so every mask hides it.
EMPTY = 2**30
POSITIONS = ('cache', 'text')


class KVCache(NamedTuple):
  """Keys, normalised but not rotated, and values, as attention mixes them, of a layer's C entries.

  In a `DecodeState` both have a leading axis over the layers (periods of the pattern).
  """

  k_BxCxHkvxDh: jax.Array
  v_BxCxHkvxDh: jax.Array


class MambaCache(NamedTuple):
  """What a Mamba mixer keeps of all tokens so far; its size does not depend on their number.

  inputs_BxKxI: the last K - 1 inputs of the convolution, which has K taps. state_BxIxS: the
  recurrent state of every channel, in float32, which sums up all tokens before.
  """

  inputs_BxKxI: jax.Array
  state_BxIxS: jax.Array


class DecodePositions(NamedTuple):
  """Where L new tokens are written in a cache of C entries, and at which positions all are used."""

  entries_L: jax.Array  # the entries that the new tokens overwrite
  queries_L: jax.Array  # positions of the new tokens
  keys_C: jax.Array  # positions of all entries once the new tokens are written


class DecodeState(NamedTuple):
  """What a model keeps of the texts that it has read.

  layers: one cache where all blocks are alike, otherwise a tuple with one for every block of the
  pattern; their leaves have a leading axis over periods. tokens_read: a whole number, equal for
  all texts of the batch, which counts a learned sink token too.
  """

  layers: KVCache | MambaCache | tuple[KVCache | MambaCache, ...]
  tokens_read: jax.Array


@dataclasses.dataclass(frozen=True)
class CachePolicy:
  """The cache keeps the first `sinks` tokens and the last `size - sinks`; of shorter texts, all.

  sinks=0 is a sliding window, sinks=4 is StreamingLLM, and a size that is not exceeded
  keeps everything. A query is among the `size` tokens that it attends to. A learned sink token
  counts as the first token.

  positions: 'cache' counts the tokens in the cache, as StreamingLLM does: no position ever
    exceeds size - 1. 'text' counts the tokens of the text. They differ once a token was dropped.
    Angles of rotary encodings are float32: 'text' is off by 0.002 radians after 131,072 tokens, by
    0.04 after a million.

  Raises:
    ValueError: `size`, `sinks` or `positions` out of range.
  """

  size: int
  sinks: int = 0
  positions: str = 'cache'

  def __post_init__(self):
    if self.size < 1 or not 0 <= self.sinks < self.size:
      raise ValueError(f'{self}: needs size >= 1 and 0 <= sinks < size.')
    if self.positions not in POSITIONS:
      raise ValueError(f"{self}: positions must be 'cache' or 'text'.")

  def next_token_positions(self, tokens_read: int | jax.Array) -> DecodePositions:
    """Positions for the one token that comes after `tokens_read` others."""
    tokens_read, recent = jnp.asarray(tokens_read), self.size - self.sinks
    # Entries fill up in order. Then the entries after the sinks are a ring: the new token
    # overwrites the oldest of them, and nothing is ever moved.
    entry = jnp.where(tokens_read < self.size, tokens_read,
                      self.sinks + (tokens_read - self.sinks) % recent)
    entries_C = jnp.arange(self.size)
    # The newest token that was written to each entry of the ring, the new token included: the
    # largest number up to tokens_read that is congruent to the entry modulo the ring's length.
    newest_C = tokens_read - (tokens_read - entries_C) % recent
    text_C = jnp.where((entries_C < self.sinks) | (tokens_read < self.size), entries_C, newest_C)
    # The new token counts: with it, tokens_read + 1 tokens have been written to `size` entries.
    dropped = jnp.maximum(tokens_read + 1 - self.size, 0) if self.positions == 'cache' else 0
    # Sinks keep their positions; in 'cache' positions all others move up as tokens are dropped.
    keys_C = jnp.where(entries_C < self.sinks, entries_C, text_C - dropped)
    return DecodePositions(entry[None], (tokens_read - dropped)[None],
                           jnp.where(text_C > tokens_read, EMPTY, keys_C))
