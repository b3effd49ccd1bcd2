"""The data interface of a training loop: `Batch`, and `Dataset`, which makes batches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sink_jax.data.tokenizer import TextTokenizer

_SAMPLED = 1024  # validation sequences whose targets are counted


class Batch(NamedTuple):
  """One batch on the host; row b, position t predicts `targets[b, t]`."""

  tokens: np.ndarray  # (B, T) int32; continuous tasks: (B, T, F) float32
  targets: np.ndarray  # (B, T) int32; continuous tasks: (B, T, F) float32
  weights: np.ndarray  # (B, T) float32; 0 = not part of the loss


class FixedBatches(Sequence):
  """Batches of a list of row numbers, made by `make` when asked for.

  The last batch is filled up with repeated rows of weight 0: a batch of another shape would be
  compiled again, and could not be divided among the devices. `max_batches` 0 = all; `rows`: the
  rows of each batch that this process makes, None for all.
  """

  def __init__(
    self,
    make: Callable[[np.ndarray], Batch],
    numbers: np.ndarray,
    batch_size: int,
    max_batches: int = 0,
    rows: np.ndarray | None = None,
  ):
    self._rows = np.arange(batch_size) if rows is None else rows
    self._make, self._batch_size = make, batch_size
    self._numbers = numbers[: max_batches * batch_size] if max_batches else numbers

  def __len__(self) -> int:
    return -(-len(self._numbers) // self._batch_size)

  def __getitem__(self, index: int) -> Batch:
    if not 0 <= index < len(self):
      raise IndexError(index)
    positions = index * self._batch_size + self._rows
    real = positions < len(self._numbers)
    batch = self._make(self._numbers[np.where(real, positions, 0)])
    return batch._replace(weights=batch.weights * real[:, None].astype(np.float32))


def read_ahead(batches: Sequence[Batch]) -> Iterator[Batch]:
  """Batches in their order; the next two are read while the caller works on one."""
  import grain

  ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
  return iter(grain.MapDataset.source(batches).to_iter_dataset(ahead))


class Dataset:
  """The training batches, validation batches and probe prompts of one `DataConfig`.

  Every batch is a pure function of its number and the seed. So a run resumes at any step without
  reading earlier batches, its checkpoint holds no state of a reader, and the processes of a job
  make their rows of a batch without communication.
  """

  vocab_size: int = 0  # 0 if the inputs are continuous
  input_features: int = 0  # 0 if the inputs are tokens
  output_features: int = 0
  tokenizer: TextTokenizer | None = None  # None if the data are not text
  _read_threads = 1  # one thread reads a disk in order, while the device computes

  def batch(self, step: int, batch_size: int, seed: int, rows: np.ndarray | None = None) -> Batch:
    """The given rows of global batch `step`; None: all rows.

    Processes that each make some of the rows together make the batch of a single process.
    """
    rows = np.arange(batch_size) if rows is None else rows
    return self._training_batch(step * batch_size + rows, seed)

  def batches(
    self, start_step: int, batch_size: int, seed: int, rows: np.ndarray | None = None
  ) -> Iterator[Batch]:
    """`batch(start_step, ...)`, `batch(start_step + 1, ...)`, ... without end, prefetched.

    Resuming reads nothing that came before `start_step`.
    """
    import grain

    steps = grain.MapDataset.range(start_step, sys.maxsize)
    batches = steps.map(lambda s: self.batch(s, batch_size, seed, rows))
    return iter(
      batches.to_iter_dataset(
        grain.ReadOptions(num_threads=self._read_threads, prefetch_buffer_size=16)
      )
    )

  def validation(
    self, batch_size: int, max_batches: int = 0, rows: np.ndarray | None = None
  ) -> dict[str, Sequence[Batch]]:
    """Named validation sets, the same each time; `max_batches` 0 = all of it."""
    raise NotImplementedError

  def probe_tokens(self, sequences: int = 100, length: int = 64) -> np.ndarray:
    """(S, T) int32 prompts to measure sinks on; continuous tasks: (S, T, F) float32."""
    raise NotImplementedError

  def remarks(self) -> list[str]:
    """Remarks for a person who trains on the data, a line each."""
    return []

  @functools.cached_property
  def unigram_loss(self) -> float:
    """The entropy of validation targets, in nats: a model that ignores its inputs has no less."""
    batch = self.validation(_SAMPLED)['valid'][0]
    counts_V = np.bincount(batch.targets.ravel(), batch.weights.ravel())
    shares = counts_V[counts_V > 0] / counts_V.sum()
    return float(-(shares * np.log(shares)).sum())

  def summary(self) -> dict[str, Any]:
    """Sizes for a log or a report, ready for JSON."""
    raise NotImplementedError

  def _training_batch(self, numbers: np.ndarray, seed: int) -> Batch:
    """The batch of these rows of the endless training stream, numbered across all epochs."""
    raise NotImplementedError
