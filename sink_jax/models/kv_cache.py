"""A key/value cache as a value: which tokens it keeps, and the positions at which they are used.

Keys are kept rotated. Where their positions change as tokens are dropped, as StreamingLLM has it
(Xiao et al. 2023), they are rotated by the numbers of their entries, which never change, and
queries are rotated to match. Keys that pass a feature map after their rotation cannot be kept so:
they are rotated whenever they are used, which takes several times as long as all the rest of
attention to a cache.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.kernels.cached import Turns

# Position of an entry without a token. It is later than any query, so every mask hides it.
EMPTY = 2**30
POSITIONS = ('cache', 'text')


class KVCache(NamedTuple):
  """Keys, normalised but not rotated, and values, as attention mixes them, of a layer's C entries.

  The entries of a head are neighbours in memory, since attention reads them together. In a
  `DecodeState` both have a leading axis over the layers (periods of the pattern).
  """

  k_BxHkvxCxDh: jax.Array
  v_BxHkvxCxDh: jax.Array


class RotatedKVCache(NamedTuple):
  """The same with rotated keys, by positions in the text or by entries, as `CachePolicy` has it."""

  k_BxHkvxCxDh: jax.Array
  v_BxHkvxCxDh: jax.Array


AttentionCache = KVCache | RotatedKVCache


def written(cache: AttentionCache, new: AttentionCache, entries_L: jax.Array) -> AttentionCache:
  """The cache with L tokens in these entries; `new` has their keys and values, on L entries."""
  # An entry is overwritten, not appended: shapes stay fixed, so one program decodes every token.
  return type(cache)(*(old.at[..., entries_L, :].set(x) for old, x in zip(cache, new)))


class MambaCache(NamedTuple):
  """What a Mamba mixer keeps of all tokens so far; its size does not depend on their number.

  inputs_BxKxI: the last K - 1 inputs of the convolution, which has K taps. state_BxIxS: the
  recurrent state of every channel, in float32, which sums up all tokens before.
  """

  inputs_BxKxI: jax.Array
  state_BxIxS: jax.Array


class DecodePositions(NamedTuple):
  """Where L new tokens are written in a cache of C entries, and at which positions all are used.

  entries_L: the entries that the new tokens overwrite. queries_L: positions of the new tokens.
  keys: of one new token, positions (C,) of all entries once it is written. Of several, which
  overwrite entries that the first of them still see, positions (L, C + L) at which each of them
  uses the entries as they were, and behind those the new tokens. turns: how the queries turn to
  keys that are rotated by the numbers of their entries; None where kept keys are rotated by their
  positions.
  """

  entries_L: jax.Array
  queries_L: jax.Array
  keys: jax.Array
  turns: Turns | None = None

  @property
  def kept_L(self) -> jax.Array:
    """The positions by which keys of the new tokens are rotated where they are kept so."""
    return self.queries_L if self.turns is None else self.entries_L


class DecodeState(NamedTuple):
  """What a model keeps of the texts that it has read.

  layers: one cache where all blocks are alike, otherwise a tuple with one for every block of the
  pattern; their leaves have a leading axis over periods. tokens_read: a whole number, equal for
  all texts of the batch, which counts a learned sink token too.
  """

  layers: AttentionCache | MambaCache | tuple[AttentionCache | MambaCache, ...]
  tokens_read: jax.Array


@dataclasses.dataclass(frozen=True)
class CachePolicy:
  """A cache that keeps the first `sinks` and the last `size - sinks` tokens of a text.

  sinks=0 is a sliding window, and sinks=4 is StreamingLLM. A text of at most `size` tokens is kept
  whole. The `size` tokens that a query attends to include its own. A learned sink token counts as
  the first token.

  Attributes:
    size: the number of tokens that the cache holds.
    sinks: the number of first tokens that are never dropped.
    positions: 'cache' counts the tokens in the cache, as StreamingLLM does, so that no position
      exceeds size - 1. 'text' counts the tokens of the text. The two differ once a token has been
      dropped. Angles of rotary encodings are float32: with 'text' they are off by up to 0.008
      radians after 131,072 tokens, and 0.06 after a million.

  Raises:
    ValueError: `size`, `sinks` or `positions` is out of range.
  """

  size: int
  sinks: int = 0
  positions: str = 'cache'

  def __post_init__(self):
    if not all(isinstance(n, (int, np.integer)) for n in (self.size, self.sinks)):
      raise ValueError(f'{self}: size and sinks must be whole numbers.')
    if self.size < 1 or not 0 <= self.sinks < self.size:
      raise ValueError(f'{self}: needs size >= 1 and 0 <= sinks < size.')
    if self.positions not in POSITIONS:
      raise ValueError(f"{self}: positions must be 'cache' or 'text'.")

  @property
  def recent(self) -> int:
    """The number of most recent tokens that the cache keeps, size - sinks."""
    return self.size - self.sinks

  def next_token_positions(self, tokens_read: int | jax.Array) -> DecodePositions:
    """Returns the positions for one token that follows `tokens_read` others."""
    tokens_read = jnp.asarray(tokens_read)
    text_C = self._tokens_of_entries(tokens_read)
    dropped = self._dropped(tokens_read)
    # Sinks keep their positions; in 'cache' positions all others move up as tokens are dropped.
    entries_C = jnp.arange(self.size)
    keys_C = jnp.where(entries_C < self.sinks, entries_C, text_C - dropped)
    entry_L, query_L = self._entry(tokens_read)[None], (tokens_read - dropped)[None]
    return DecodePositions(entry_L, query_L, jnp.where(text_C > tokens_read, EMPTY, keys_C),
                           self._turns(entry_L, entries_C))

  def next_positions(self, tokens_read: int | jax.Array, count: int) -> DecodePositions:
    """Returns the positions for `count` tokens that follow `tokens_read` others, read at once.

    Each of them sees what it would see if they were read one after another.

    Raises:
      ValueError: `count` exceeds `recent`, so that some tokens would see no entry.
    """
    if not 1 <= count <= self.recent:
      raise ValueError(f'{self} reads 1 to {self.recent} tokens at once, not {count}.')
    new_L = jnp.asarray(tokens_read) + jnp.arange(count)
    text_C = self._tokens_of_entries(new_L[0] - 1)
    # An entry that was not written yet belongs to a token later than all; see EMPTY.
    text_C = jnp.where(text_C >= new_L[0], EMPTY, text_C)
    text_E = jnp.concatenate([text_C, new_L])
    sink_E = text_E < self.sinks
    dropped_L = jnp.broadcast_to(self._dropped(new_L), new_L.shape)
    seen_LxE = (text_E <= new_L[:, None]) & (sink_E | (text_E > new_L[:, None] - self.recent)
                                             | (new_L[:, None] < self.size))
    keys_LxE = jnp.where(sink_E, text_E, text_E - dropped_L[:, None])
    entries_L, queries_L = self._entry(new_L), new_L - dropped_L
    entries_E = jnp.concatenate([jnp.arange(self.size), entries_L])
    return DecodePositions(entries_L, queries_L, jnp.where(seen_LxE, keys_LxE, EMPTY),
                           self._turns(entries_L, entries_E))

  def _turns(self, entries_L: jax.Array, entries_E: jax.Array) -> Turns | None:
    """How queries in entries (L,) turn to keys in entries (E,), of which sinks are the first."""
    if self.positions == 'text':
      return None
    # In the ring, entries up to the query's own were written in this lap, and are as far from it as
    # their tokens. The others were written a lap before, which adds the length of the ring. So
    # every key is rotated once, and no position reaches twice the size, however long the text.
    return Turns(jnp.arange(self.sinks), jnp.stack([entries_L, entries_L + self.recent], 1),
                 entries_E > entries_L[:, None])

  def _entry(self, token: jax.Array) -> jax.Array:
    """The entry that a token is written to."""
    # Entries fill up in order. Then the entries after the sinks are a ring: the new token
    # overwrites the oldest of them, and nothing is ever moved.
    return jnp.where(token < self.size, token, self.sinks + (token - self.sinks) % self.recent)

  def _tokens_of_entries(self, last: jax.Array) -> jax.Array:
    """The number of the token (C,) in each entry once token `last` is written."""
    entries_C = jnp.arange(self.size)
    # The newest token that was written to each entry of the ring: the largest number up to `last`
    # that is congruent to the entry modulo the ring's length.
    newest_C = last - (last - entries_C) % self.recent
    return jnp.where((entries_C < self.sinks) | (last < self.size), entries_C, newest_C)

  def _dropped(self, token: jax.Array) -> jax.Array | int:
    """How many tokens positions of the cache leave out, once a token is written."""
    # The token counts: with it, token + 1 tokens have been written to `size` entries.
    return jnp.maximum(token + 1 - self.size, 0) if self.positions == 'cache' else 0
