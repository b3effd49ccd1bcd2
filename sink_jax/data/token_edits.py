"""Edits of the token stream (Section 5): random or fixed tokens at the first positions.

They act on rows of C + 1 tokens, before these are split into inputs and targets, in training and
validation alike: a replaced token at position p > 1 is also the target at p - 1; in a loss of
answers it has no weight. Positions count from 1, as in the paper. The tokens that an edit writes
follow from the number of the row, so that rows can be edited in any order and by any process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sink_jax.component import Component
from sink_jax.data import counter_rng

# Keys of `counter_rng`: rows of the two splits have the same numbers, and must not get the same
# draws. Other keys would change the data of stored runs.
_SPLIT_KEYS = {'train': 0, 'valid': 1}


class TokenEdit(Component):
  """A change of rows, each by itself and in any order."""

  def apply(
    self, rows_BxT: np.ndarray, numbers_B: np.ndarray, split: str, vocab_size: int
  ) -> np.ndarray:
    """Returns the changed rows, int32, in a copy.

    Args:
      numbers_B: the number of each row in its split; the same in every epoch.
      split: 'train' or 'valid'.
      vocab_size: ids of the text.
    """
    raise NotImplementedError

  def check(self, row_length: int, vocab_size: int) -> None:
    """Raises a ValueError if the rows or the vocabulary are too small for the edit."""
    if self.written.stop > row_length:
      raise ValueError(f'{self!r}: rows have only {row_length} tokens (context + 1).')

  @property
  def written(self) -> slice:
    """The positions of a row, from 0, that the edit writes."""
    raise NotImplementedError

  def vocab_size(self, vocab_size: int) -> int:
    """The number of ids after the edit, if the text has ids below `vocab_size`."""
    return vocab_size


class RandomTokens(TokenEdit):
  """Positions first..last become uniform integers in [0, vocabulary size).

  They are drawn once for each row and frozen over the epochs, as in the official implementation
  (sail-sg/Attention-Sink). `below` > 0 draws in [0, below): the official implementation draws below
  its padded vocabulary, ids that no text has among them.
  """

  first: int = 1
  last: int = 1
  seed: int = 1024
  below: int = 0

  def __post_init__(self) -> None:
    if not (1 <= self.first <= self.last and 0 <= self.below < 2**31 and self.seed >= 0):
      raise ValueError(
        f'{self!r}: positions count from 1, first <= last; seed is 0 or more; below '
        'is 0 (the vocabulary) or more, and less than 2**31.'
      )

  def apply(
    self, rows_BxT: np.ndarray, numbers_B: np.ndarray, split: str, vocab_size: int
  ) -> np.ndarray:
    # The keys of a draw name its position; the 0 stands for all epochs.
    rows_BxT = rows_BxT.copy()
    rows_BxT[:, self.written] = counter_rng.integers(
      self.below or vocab_size,
      self.seed,
      _SPLIT_KEYS[split],
      np.asarray(numbers_B)[:, None],
      0,
      np.arange(self.first, self.last + 1),
    )
    return rows_BxT

  @property
  def written(self) -> slice:
    return slice(self.first - 1, self.last)

  def vocab_size(self, vocab_size: int) -> int:
    return max(vocab_size, self.below)


class FixedToken(TokenEdit):
  """One position holds the same token in every row (Table 10, right)."""

  position: int = 1
  token: int = 1

  def __post_init__(self) -> None:
    if self.position < 1 or self.token < 0:
      raise ValueError(f'{self!r}: positions count from 1, token ids from 0.')

  def apply(
    self, rows_BxT: np.ndarray, numbers_B: np.ndarray, split: str, vocab_size: int
  ) -> np.ndarray:
    rows_BxT = rows_BxT.copy()
    rows_BxT[:, self.written] = self.token
    return rows_BxT

  @property
  def written(self) -> slice:
    return slice(self.position - 1, self.position)

  def check(self, row_length: int, vocab_size: int) -> None:
    super().check(row_length, vocab_size)
    if self.token >= vocab_size:
      raise ValueError(f'{self!r}: the vocabulary has only {vocab_size} tokens.')


def first_token(interventions: Sequence[TokenEdit]) -> int | None:
  """The token that every edited row begins with; None where rows begin differently."""
  token = None
  for edit in interventions:  # a later edit overwrites an earlier one
    if edit.written.start == 0:
      token = edit.token if isinstance(edit, FixedToken) else None
  return token
