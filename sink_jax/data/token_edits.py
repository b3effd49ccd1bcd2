"""Edits of the token stream (Section 5): random or fixed tokens at the first positions.

They act on whole chunks of C + 1 tokens, before these are split into inputs and targets, in
training and validation alike: a replaced token at position p > 1 is also the target at p - 1. In a
loss of answers alone it has no weight, for what is written is no answer.
Positions count from 1, as in the paper. An edit has no state: what it writes into a chunk follows
from the row number of the chunk, so that chunks can be edited in any order and by any process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sink_jax.component import Component, check_integers
from sink_jax.data import counter_rng

# Keys of `counter_rng`: rows of the two splits have the same numbers, and must not get the same
# draws. Other keys would change the data of stored runs.
_SPLIT_KEYS = {'train': 0, 'valid': 1}


@dataclasses.dataclass(frozen=True)
class TokenEdit(Component):
  """A change of chunks, at random access."""

  def apply(self, chunks_BxT: np.ndarray, rows_B: np.ndarray, epochs_B: np.ndarray,
            split: str, vocab_size: int) -> np.ndarray:
    """Returns the changed chunks, int32, in a copy.

    Args:
      rows_B: the row number of each chunk in the whole split; the same in every epoch.
      epochs_B: the epoch, from 0, in which each chunk is read.
      split: 'train' or 'valid'.
      vocab_size: ids of the text.
    """
    raise NotImplementedError

  def check(self, chunk_length: int, vocab_size: int) -> None:
    """Raises a ValueError where the chunks or the vocabulary are too small for the edit."""
    raise NotImplementedError

  @property
  def written(self) -> slice:
    """The places of a chunk, from 0, that the edit writes."""
    raise NotImplementedError

  @property
  def frozen(self) -> bool:
    """Whether a chunk is changed alike in every epoch."""
    return True

  def vocab_size(self, vocab_size: int) -> int:
    """The ids that there are after the edit, where the text has ids below `vocab_size`."""
    return vocab_size


@dataclasses.dataclass(frozen=True)
class RandomTokens(TokenEdit):
  """Positions first..last become uniform integers in [0, vocabulary size).

  They are drawn once for each chunk and frozen over the epochs, as in the official implementation
  (sail-sg/Attention-Sink); `fresh=True` draws anew in every epoch. `below` > 0 draws in [0, below):
  the official implementation draws below its padded vocabulary, ids that no text has among them.
  """
  first: int = 1
  last: int = 1
  fresh: bool = False
  seed: int = 1024
  below: int = 0

  def __post_init__(self) -> None:
    check_integers(self, 'first', 'last', 'seed', 'below')
    if not 0 <= self.below < 2**31:
      raise ValueError(f'RandomTokens(below={self.below}) must be 0 (the vocabulary) or more, and '
                       'below 2**31.')
    if not 1 <= self.first <= self.last:
      raise ValueError(f'RandomTokens(first={self.first}, last={self.last}): positions count '
                       'from 1, and first <= last.')
    if self.seed < 0:
      raise ValueError(f'RandomTokens(seed={self.seed}) must be 0 or more.')

  def apply(self, chunks_BxT: np.ndarray, rows_B: np.ndarray, epochs_B: np.ndarray,
            split: str, vocab_size: int) -> np.ndarray:
    positions = np.arange(self.first, self.last + 1)
    # The keys of a draw name the place that it is for; a frozen one is of epoch 0 in all epochs.
    epochs = np.asarray(epochs_B)[:, None] if self.fresh else 0
    drawn = counter_rng.integers(self.below or vocab_size, self.seed, _SPLIT_KEYS[split],
                                 np.asarray(rows_B)[:, None], epochs, positions[None])
    chunks_BxT = chunks_BxT.copy()
    chunks_BxT[:, self.written] = drawn
    return chunks_BxT

  @property
  def written(self) -> slice:
    return slice(self.first - 1, self.last)

  @property
  def frozen(self) -> bool:
    return not self.fresh

  def check(self, chunk_length: int, vocab_size: int) -> None:
    if self.last > chunk_length:
      raise ValueError(f'{self!r}: chunks have only {chunk_length} tokens (context + 1).')

  def vocab_size(self, vocab_size: int) -> int:
    return max(vocab_size, self.below)


@dataclasses.dataclass(frozen=True)
class FixedToken(TokenEdit):
  """One position holds the same token in every chunk (Table 10, right)."""
  position: int = 1
  token: int = 1

  def __post_init__(self) -> None:
    check_integers(self, 'position', 'token')
    if self.position < 1 or self.token < 0:
      raise ValueError(f'FixedToken(position={self.position}, token={self.token}): positions '
                       'count from 1, token ids from 0.')

  def apply(self, chunks_BxT: np.ndarray, rows_B: np.ndarray, epochs_B: np.ndarray,
            split: str, vocab_size: int) -> np.ndarray:
    chunks_BxT = chunks_BxT.copy()
    chunks_BxT[:, self.written] = self.token
    return chunks_BxT

  @property
  def written(self) -> slice:
    return slice(self.position - 1, self.position)

  def check(self, chunk_length: int, vocab_size: int) -> None:
    if self.position > chunk_length:
      raise ValueError(f'{self!r}: chunks have only {chunk_length} tokens (context + 1).')
    if self.token >= vocab_size:
      raise ValueError(f'{self!r}: the vocabulary has only {vocab_size} tokens.')


def first_token(interventions: Sequence[TokenEdit]) -> int | None:
  """The token that every edited chunk begins with; None where chunks begin differently."""
  token = None
  for edit in interventions:  # a later edit overwrites an earlier one
    if isinstance(edit, FixedToken) and edit.position == 1:
      token = edit.token
    elif isinstance(edit, RandomTokens) and edit.first == 1:
      token = None
  return token
