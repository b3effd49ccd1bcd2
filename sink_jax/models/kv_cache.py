"""A key/value cache as a value: which tokens it keeps, and where they stand.

Keys are kept as projected and normalised, and rotated when they are used, so that one
cache serves both kinds of positions of StreamingLLM (Xiao et al. 2023).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

EMPTY = 2**30  # position of a slot without a token: later than any query, so never seen
POSITIONS = ('cache', 'text')


class KVCache(NamedTuple):
  """Keys, normalised but not rotated, and values of C slots."""

  k_BxCxHkvxDh: jax.Array
  v_BxCxHkvxDh: jax.Array


class DecodePositions(NamedTuple):
  """Where the tokens of one step stand: L new ones, C slots."""

  slots_L: jax.Array  # where the new tokens are written
  queries_L: jax.Array  # their positions
  keys_C: jax.Array  # positions of all slots once they are written


class DecodeState(NamedTuple):
  """What a model remembers of a text: its layers' caches, and the number of tokens seen."""

  layers: Any
  seen: jax.Array


@dataclasses.dataclass(frozen=True)
class CachePolicy:
  """The first `sinks` tokens and the last `size - sinks`; of shorter texts, all.

  sinks=0 is a sliding window, sinks=4 is StreamingLLM, and a size that is not exceeded
  keeps everything. A query is among the `size` tokens it sees. A learned sink token counts
  as the first token.

  positions: 'cache' counts the tokens in the cache, as StreamingLLM does: no position ever
    exceeds size - 1. 'text' counts the tokens of the text. They differ once a token was dropped.
    Angles of rotary encodings are float32: 'text' is off by 0.002 radians after 131,072 tokens, by
    0.04 after a million.
  """

  size: int
  sinks: int = 0
  positions: str = 'cache'

  def __post_init__(self):
    if self.size < 1 or not 0 <= self.sinks < self.size:
      raise ValueError(f'{self}: needs size >= 1 and 0 <= sinks < size.')
    if self.positions not in POSITIONS:
      raise ValueError(f"{self}: positions must be 'cache' or 'text'.")

  def step(self, seen) -> DecodePositions:
    """The step of the one token that comes after `seen` others."""
    seen, recent = jnp.asarray(seen), self.size - self.sinks
    slot = jnp.where(seen < self.size, seen, self.sinks + (seen - self.sinks) % recent)
    slots_C = jnp.arange(self.size)
    # The newest token that was written to each slot, `seen` itself included.
    newest = seen - (seen - slots_C) % recent
    text = jnp.where((slots_C < self.sinks) | (seen < self.size), slots_C, newest)
    dropped = jnp.maximum(seen + 1 - self.size, 0) if self.positions == 'cache' else 0
    keys = jnp.where(slots_C < self.sinks, slots_C, text - dropped)
    return DecodePositions(slot[None], (seen - dropped)[None], jnp.where(text > seen, EMPTY, keys))
