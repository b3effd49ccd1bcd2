"""What a training loop sees: `Batch`, and the interface `Data` that makes batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
  """One batch on the host; row b, position t predicts `targets[b, t]`."""
  tokens: np.ndarray   # (B, T) int32; continuous tasks: (B, T, F) float32
  targets: np.ndarray  # (B, T) int32; continuous tasks: (B, T, F) float32
  weights: np.ndarray  # (B, T) float32; 0 = not part of the loss


def local_size(batch_size: int, process_index: int, process_count: int) -> int:
  """Rows of the global batch that one process makes."""
  if batch_size < 1 or batch_size % process_count:
    raise ValueError(f'batch_size={batch_size} must be a positive multiple of the '
                     f'{process_count} processes.')
  if not 0 <= process_index < process_count:
    raise ValueError(f'process_index={process_index} is not one of {process_count} processes.')
  return batch_size // process_count


class FixedBatches(Sequence):
  """Batches of a fixed list of rows, made when asked for, all of one shape.

  The last batch is filled up with repeated rows of weight 0. `make(rows)` makes
  the batch of an array of row numbers.
  """

  def __init__(self, make: Callable[[np.ndarray], Batch], rows: np.ndarray, batch_size: int,
               max_batches: int = 0, process_index: int = 0, process_count: int = 1):
    self._local = local_size(batch_size, process_index, process_count)
    self._first = process_index * self._local
    self._make, self._batch_size = make, batch_size
    self._rows = rows[:max_batches * batch_size] if max_batches else rows

  def __len__(self) -> int:
    return -(-len(self._rows) // self._batch_size)

  def __getitem__(self, index: int) -> Batch:
    if not 0 <= index < len(self):
      raise IndexError(index)
    slots = index * self._batch_size + self._first + np.arange(self._local)
    real = slots < len(self._rows)
    batch = self._make(self._rows[np.where(real, slots, 0)])
    return batch._replace(weights=batch.weights * real[:, None].astype(np.float32))


class Data:
  """Training batches, validation batches and probe prompts of one `DataConfig`."""
  vocab_size: int = 0       # 0 where the inputs are continuous
  input_features: int = 0   # 0 where the inputs are tokens
  output_features: int = 0

  def batch(self, step: int, batch_size: int, seed: int,
            process_index: int = 0, process_count: int = 1) -> Batch:
    """This process's rows of global batch `step`; a pure function of its arguments.

    Process p holds the p-th contiguous block of rows, so the blocks in process
    order are the batch of a single process.
    """
    local = local_size(batch_size, process_index, process_count)
    first = step * batch_size + process_index * local
    return self._training_batch(first, local, seed)

  def batches(self, start_step: int, batch_size: int, seed: int,
              process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
    """`batch(start_step, ...)`, `batch(start_step + 1, ...)`, ... without end, prefetched.

    Resuming reads nothing that came before `start_step`.
    """
    import grain
    local_size(batch_size, process_index, process_count)  # fail here, not in a thread
    steps = grain.MapDataset.range(start_step, sys.maxsize)
    made = steps.map(lambda s: self.batch(s, batch_size, seed, process_index, process_count))
    return iter(made.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)))

  def validation(self, batch_size: int, max_batches: int = 0, process_index: int = 0,
                 process_count: int = 1) -> dict[str, Sequence[Batch]]:
    """Named validation sets, the same each time; `max_batches` 0 = all of it."""
    raise NotImplementedError

  def probe_tokens(self, sequences: int = 100, length: int = 64) -> np.ndarray:
    """(S, T) int32 prompts to measure sinks on; continuous tasks: (S, T, F) float32."""
    raise NotImplementedError

  def summary(self) -> dict:
    """Sizes for a log or a report; plain numbers and strings."""
    raise NotImplementedError

  def decode(self, ids: Sequence[int]) -> str:
    """The text of the ids."""
    raise NotImplementedError

  def _training_batch(self, first: int, count: int, seed: int) -> Batch:
    """Rows first, ..., first + count - 1 of the endless training stream."""
    raise NotImplementedError
