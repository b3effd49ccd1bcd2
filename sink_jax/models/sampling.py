"""How the next token is chosen, and where a text ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_COLDEST = 1e-6  # temperature; below it the most likely token is taken


class Sampling(NamedTuple):
  """How the next token is chosen; calls with equal values share a compiled program.

  Attributes:
    temperature: 0 takes the most likely token, 1 samples from the model's distribution.
    top_k: the number of most likely tokens that are sampled from; None for all.
    top_p: the least total probability of the most likely tokens that are sampled from, at this
      temperature and among those of top_k (nucleus sampling, arXiv:1904.09751); None for all.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None

  def checked(self, vocab_size: int) -> Sampling:
    """The same with a temperature that is a float.

    Raises:
      ValueError: an option out of range; names it.
    """
    if not 0 <= self.temperature < math.inf:
      raise ValueError(f'temperature = {self.temperature} must be a number from 0 on.')
    if self.top_k is not None and not 1 <= self.top_k <= vocab_size:
      raise ValueError(f'top_k = {self.top_k} must lie between 1 and {vocab_size}.')
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f'top_p = {self.top_p} must lie above 0, and be 1 at most.')
    return self._replace(temperature=float(self.temperature))

  def sample(self, logits_SxV: jax.Array, key: jax.Array) -> jax.Array:
    """The next token (S,) of each text."""
    if self.temperature < _COLDEST:
      return jnp.argmax(logits_SxV, -1)
    logits_SxV = logits_SxV / self.temperature
    if self.top_k is None and self.top_p is None:
      return jax.random.categorical(key, logits_SxV)
    best_SxK, ids_SxK = jax.lax.top_k(logits_SxV, self.top_k or logits_SxV.shape[-1])
    if self.top_p is not None:
      p_SxK = jax.nn.softmax(best_SxK, -1)
      # A token is left out where those before it suffice; the first one never is.
      best_SxK = jnp.where(jnp.cumsum(p_SxK, -1) - p_SxK < self.top_p, best_SxK, -jnp.inf)
    chosen_S = jax.random.categorical(key, best_SxK)
    return jnp.take_along_axis(ids_SxK, chosen_S[:, None], -1)[:, 0]


class Endings:
  """Follows the new tokens of several texts, of which each ends with its first end-of-text token.

  eos_token_id: an id, several of which each ends a text, or None for texts that go on.
  """

  def __init__(self, texts: int, eos_token_id: int | Sequence[int] | None, vocab_size: int):
    ids = () if eos_token_id is None else np.atleast_1d(np.asarray(eos_token_id))
    if any(not 0 <= i < vocab_size for i in ids):
      raise ValueError(f'eos_token_id = {eos_token_id} must be ids of the vocabulary, 0 to '
                       f'{vocab_size - 1}.')
    self._ids = np.asarray(ids, np.int32)
    self._ended_S = np.zeros(texts, bool)

  @property
  def all(self) -> bool:
    """Whether every text has ended."""
    return bool(self._ended_S.all())

  def cut(self, row: int, tokens_n: np.ndarray) -> np.ndarray:
    """The next tokens of a text, up to its end; none of one that has ended."""
    if self._ended_S[row]:
      return tokens_n[:0]
    ends = np.flatnonzero(np.isin(tokens_n, self._ids))
    self._ended_S[row] = ends.size > 0
    return tokens_n[:ends[0] + 1] if ends.size else tokens_n

  def filled(self, tokens_Sxn: np.ndarray) -> np.ndarray:
    """The next tokens of all texts, after whose end there are end-of-text tokens.

    There are fewer columns where all texts have ended.
    """
    if not self._ids.size:
      return tokens_Sxn
    rows = [self.cut(row, tokens_n) for row, tokens_n in enumerate(tokens_Sxn)]
    width = max(map(len, rows)) if self.all else tokens_Sxn.shape[1]
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=self._ids[0])
                     for row in rows])
