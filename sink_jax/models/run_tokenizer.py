"""The tokenizer of a run, as generation and probes use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class RunTokenizer(Protocol):
  """What a model's texts are read and written with; `sink_jax.data` has the one class of it."""

  @property
  def prefix(self) -> tuple[int, ...]:
    """Ids that are put before every text."""
    ...

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Ids that end a text; () where none is known."""
    ...

  def encode(self, text: str) -> list[int]:
    """The ids of a text, without the prefix."""
    ...

  def with_prefix(self, ids: Sequence[int] | np.ndarray, bos: str) -> np.ndarray:
    """The ids of a text with what stands before it."""
    ...

  def tokens(self, texts: str | Sequence[str], length: int | None = None, bos: str = 'tokenizer'
             ) -> list[np.ndarray] | np.ndarray:
    """Token ids of texts, see `sink_jax.tokenize`."""
    ...

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """The text of token ids."""
    ...
