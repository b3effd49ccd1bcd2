"""From a `DataConfig` to a `Dataset`: the one entry point of this room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sink_jax.component import option
from sink_jax.data.batches import Batch, Dataset, FixedBatches
from sink_jax.data.corpus import CorpusDataset
from sink_jax.data.documents import DocumentSource, Source
from sink_jax.data.prepare import open_pair
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.synthetic import SyntheticTask
from sink_jax.data.token_edits import TokenEdit
from sink_jax.data.tokenizer import Bytes, Tokenizer

__all__ = ['Batch', 'DataConfig', 'Dataset', 'Source', 'SyntheticDataset', 'open_data']


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Everything that decides the tokens of a run, but for seed and batch size.

  With a `valid_source` nothing of `source` is held out, and each of them has domains of its own.
  A synthetic task has no use for `eos` and `cache_dir`, and its `length` must equal `context`.
  """
  source: Source = Stdlib(split='content')  # documents or a synthetic task
  tokenizer: Tokenizer = Bytes()
  context: int = 64          # C: the model sees C tokens, chunks have C + 1
  bos: bool = False          # BOS before each document
  eos: bool = True           # EOS after each document
  domain_weights: tuple[tuple[str, float], ...] = ()  # () = in proportion to size
  max_tokens: int = 0        # amount of training data (Figure 5, right); 0 = all
  interventions: tuple[TokenEdit, ...] = ()
  valid_fraction: float = 0.05  # of the documents; without effect on a pair of sources
  valid_source: Source | None = None  # None: documents of `source` are held out
  cache_dir: str = option('', 'of packed text; empty: $SINK_JAX_CACHE or ~/.cache/sink_jax', where=True)

  def __post_init__(self) -> None:
    if self.context < 1:
      raise ValueError(f'context={self.context} must be at least 1.')
    if not 0 < self.valid_fraction < 1:
      raise ValueError(f'valid_fraction={self.valid_fraction} must be between 0 and 1.')
    if self.max_tokens < 0:
      raise ValueError(f'max_tokens={self.max_tokens} must be 0 (all) or more.')


def open_data(config: DataConfig) -> Dataset:
  """Opens the data of a config; builds the chunk cache first where there is none.

  Raises:
    ValueError: anything wrong with the corpus or the options, with the remedy.
  """
  if isinstance(config.source, SyntheticTask):
    return _synthetic(config, config.source)
  if isinstance(config.valid_source, SyntheticTask):
    raise ValueError(f'data.valid_source = {config.valid_source!r} has no text; name documents.')
  assert isinstance(config.source, DocumentSource)
  assert config.valid_source is None or isinstance(config.valid_source, DocumentSource)
  cache, valid_cache = open_pair(
      config.source, config.valid_source, config.tokenizer, config.context, config.bos, config.eos,
      config.valid_fraction, config.cache_dir)
  return CorpusDataset(cache, config.domain_weights, config.max_tokens, config.interventions,
                       valid_cache)


def _synthetic(config: DataConfig, task: SyntheticTask) -> SyntheticDataset:
  for option in ('valid_source', 'valid_fraction', 'tokenizer', 'bos', 'domain_weights',
                 'max_tokens', 'interventions'):
    if getattr(config, option) != getattr(DataConfig, option):
      raise ValueError(f'{option} is for document corpora; leave it out with {task!r}.')
  if config.context != task.length:
    raise ValueError(f'context={config.context} must equal the length {task.length} of {task!r}: '
                     'change one of them.')
  return SyntheticDataset(task)


class SyntheticDataset(Dataset):
  """The data of a synthetic task: an endless training stream, and a fixed validation set."""

  def __init__(self, task: SyntheticTask):
    self.task = task
    self.vocab_size = task.vocab_size
    self.input_features, self.output_features = task.input_features, task.output_features

  def validation(self, batch_size: int, max_batches: int = 0,
                 rows: np.ndarray | None = None) -> dict[str, Sequence[Batch]]:
    """'valid', and one set for each named part of the targets (the same sequences)."""
    listed = np.arange(self.task.valid_sequences)
    # Every batch has the same named parts, so that one sequence is enough to learn their names.
    names = [None, *self.task.target_sets(self.task.batch('valid', 0, listed[:1]))]
    return {name or 'valid': FixedBatches(self._maker(name), listed, batch_size, max_batches, rows)
            for name in names}

  def probe_tokens(self, sequences: int = 100, length: int = 64) -> np.ndarray:
    """The first `length` inputs of the validation sequences, BOS included."""
    if not 1 <= length <= self.task.length:
      raise ValueError(f'length={length} must be between 1 and {self.task.length}, the length '
                       f'of {self.task!r}.')
    return self.task.batch('valid', 0, np.arange(sequences)).tokens[:, :length]

  def summary(self) -> dict[str, Any]:
    return {'source': repr(self.task), 'content': repr(self.task), 'vocab_size': self.vocab_size,
            'context': self.task.length, 'validation_sequences': self.task.valid_sequences,
            **self.task.facts()}

  def decode(self, ids: Sequence[int]) -> str:
    return ' '.join(str(int(i)) for i in ids)

  def _maker(self, target_set: str | None) -> Callable[[np.ndarray], Batch]:
    def make(rows):
      batch = self.task.batch('valid', 0, rows)
      if target_set:
        batch = batch._replace(weights=self.task.target_sets(batch)[target_set])
      return batch
    return make

  def _training_batch(self, numbers: np.ndarray, seed: int) -> Batch:
    return self.task.batch('train', seed, numbers)
