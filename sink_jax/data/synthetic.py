"""Synthetic tasks with a known optimum; a sequence is a pure function of its number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sink_jax.data import counter_rng
from sink_jax.data.batches import Batch, Dataset, FixedBatches
from sink_jax.data.sources import Source

_STREAMS = {'train': 0, 'valid': 1}
_TASK_STREAM = 2  # draws that define the task itself


class SyntheticTask(Source):
  """A task: sequences that are computed from their number, and named sets of their targets."""

  abstract = True
  # Without annotations these are not fields, which would come before a subclass's fields in its
  # `repr` and its config string.
  length = 0  # T
  valid_sequences = 0  # in the validation set
  vocab_size = 0  # 0 if the inputs are continuous
  input_features = 0  # 0 if the inputs are tokens
  output_features = 0

  def batch(self, stream: str, seed: int, indices_B: np.ndarray) -> Batch:
    """Sequences `indices_B` of the 'train' or 'valid' stream of a seed."""
    raise NotImplementedError

  def target_sets(self, batch: Batch) -> dict[str, np.ndarray]:
    """The weights (B, T), float32, of each named part of the targets of a batch."""
    return {}

  def facts(self) -> dict[str, float]:
    """Known quantities of the optimum, for reports."""
    return {}

  def _check(self, **at_least: float) -> None:
    """Raises a ValueError if a field is below its bound."""
    for name, least in at_least.items():
      if getattr(self, name) < least:
        raise ValueError(f'{self!r}: {name} must be at least {least}.')


class BigramBackcopy(SyntheticTask):
  """Bigram-Backcopy (Guo et al. 2024, arXiv 2410.13835) at laptop scale.

  Ids: 0 = BOS; 1, ..., triggers = the triggers; the rest are ordinary; vocab_size in all.
  Bigram table P over the ids but BOS: softmax of sharpness * N(0, 1) along rows;
  then the trigger columns times `boost` and trigger -> trigger set to 0; then
  rows normalised. (N(0, 1) is drawn from `seed`.)
  Sequence x_0, ..., x_T with T = length: x_0 = BOS; x_1 ~ the stationary
  distribution of P without the triggers; for t >= 2, if x_{t-1} is a trigger then
  x_t = x_{t-2} (a back-copy), else x_t ~ P[x_{t-1}]. Two triggers never meet,
  and BOS is never copied. The model reads x_0, ..., x_{T-1} and predicts the next.
  `backcopy=False` is the control: always x_t ~ P[x_{t-1}].

  Target sets: 'backcopy' (targets that are back-copies; their entropy is 0) and 'bigram' (all
  others).
  """

  vocab_size: int = 64
  length: int = 64
  triggers: int = 3
  sharpness: float = 1.5
  boost: float = 4.0
  backcopy: bool = True
  seed: int = 0
  valid_sequences: int = 256

  def __post_init__(self) -> None:
    self._check(
      triggers=1,
      vocab_size=self.triggers + 3,
      length=2,
      sharpness=0,
      seed=0,
      valid_sequences=1,
      boost=0,
    )

  @functools.cached_property
  def transitions(self) -> np.ndarray:
    """(V, V) float64: row u is the distribution after u; row 0 (BOS) is the distribution of x_1."""
    first_ordinary, ids = self.triggers + 1, np.arange(self.vocab_size)
    logits = self.sharpness * counter_rng.normal(_TASK_STREAM, self.seed, ids[:, None], ids[None])
    table = np.exp(logits)
    table[:, 0] = 0
    table[:, 1:first_ordinary] *= self.boost
    table[1:first_ordinary, 1:first_ordinary] = 0
    table /= table.sum(-1, keepdims=True)
    # Over the ids from 1 on, so start[i] belongs to id i + 1. Triggers are left out, since the
    # token after x_1 would otherwise copy x_0, the BOS.
    start = _stationary(table[1:, 1:])
    start[: self.triggers] = 0
    table[0, 1:] = start / start.sum()
    return table

  def batch(self, stream: str, seed: int, indices_B: np.ndarray) -> Batch:
    sequences = self._sequences(stream, seed, indices_B)
    return Batch(
      sequences[:, :-1], sequences[:, 1:], np.ones((len(sequences), self.length), np.float32)
    )

  def target_sets(self, batch: Batch) -> dict[str, np.ndarray]:
    if not self.backcopy:
      return {}
    copied = self._is_trigger(batch.tokens)  # the last token read decides
    return {'backcopy': copied.astype(np.float32), 'bigram': (~copied).astype(np.float32)}

  def _is_trigger(self, tokens: np.ndarray) -> np.ndarray:
    return (tokens >= 1) & (tokens <= self.triggers)

  def _sequences(self, stream: str, seed: int, indices_B: np.ndarray) -> np.ndarray:
    """(B, T + 1) int32: x_0, ..., x_T of each sequence."""
    # One uniform number for each sequence and step, independent of earlier draws: so sequence i is
    # the same in every process and in every batch.
    draws = counter_rng.uniform(
      _STREAMS[stream], seed, np.asarray(indices_B)[:, None], np.arange(self.length)[None]
    )
    steps = np.cumsum(self.transitions, axis=-1)
    steps /= steps[:, -1:]
    sequences = np.zeros((len(draws), self.length + 1), np.int32)
    for t in range(1, self.length + 1):
      last = sequences[:, t - 1]
      # The first id whose cumulative probability is above the draw; one of probability 0 never is.
      sequences[:, t] = np.sum(steps[last] <= draws[:, t - 1, None], axis=-1)
      if self.backcopy and t >= 2:
        sequences[:, t] = np.where(self._is_trigger(last), sequences[:, t - 2], sequences[:, t])
    return sequences


class TriggerAveraging(SyntheticTask):
  """Trigger-conditional averaging (after Ran-Milo 2026, arXiv 2603.11487): regression.

  Inputs (B, T, content + 3) float32: the content, then the flags BOS, trigger,
  other (one of them 1). Position 1 is BOS with content 0. One trigger stands
  uniformly at 3, ..., T; all positions but BOS have content from N(0, 1).
  Targets (B, T, content) float32: at the trigger the mean of the contents before
  it, BOS excluded; 0 elsewhere. Every weight is 1. The squared error of
  predicting 0, summed over positions and features, is content * mean(1/n) over
  n = 1, ..., T - 2 (3.72 by default); the optimum is 0.
  """

  length: int = 16
  content: int = 16
  valid_sequences: int = 256

  def __post_init__(self) -> None:
    self._check(length=3, content=1, valid_sequences=1)

  @property
  def input_features(self) -> int:
    return self.content + 3

  @property
  def output_features(self) -> int:
    return self.content

  def batch(self, stream: str, seed: int, indices_B: np.ndarray) -> Batch:
    index = np.asarray(indices_B)[:, None]
    positions, features = np.arange(self.length), np.arange(self.content)
    key = _STREAMS[stream]
    content = counter_rng.normal(key, seed, index[..., None], positions[:, None], features)
    content[:, 0] = 0
    # No content has the position `length`, so this draw is independent of all contents.
    trigger = 2 + counter_rng.integers(self.length - 2, key, seed, index, self.length)
    flag = np.where(positions == 0, 0, np.where(positions == trigger, 1, 2))
    tokens = np.concatenate([content, np.eye(3)[flag]], -1)
    before = (positions < trigger)[..., None]  # BOS adds its content of 0
    # With `trigger` counted from 0, positions 1 to trigger - 1 hold the contents before it.
    mean = np.sum(content * before, axis=1) / (trigger - 1)
    targets = mean[:, None] * (flag == 1)[..., None]
    return Batch(
      tokens.astype(np.float32), targets.astype(np.float32), np.ones(flag.shape, np.float32)
    )

  def facts(self) -> dict[str, float]:
    earlier = np.arange(1, self.length - 1)
    return {'loss_of_zero': float(self.content * np.mean(1 / earlier))}


class SyntheticDataset(Dataset):
  """The data of a synthetic task: an endless training stream, and a fixed validation set."""

  def __init__(self, task: SyntheticTask):
    self.task = task
    self.vocab_size = task.vocab_size
    self.input_features, self.output_features = task.input_features, task.output_features

  def validation(
    self, batch_size: int, max_batches: int = 0, rows: np.ndarray | None = None
  ) -> dict[str, Sequence[Batch]]:
    """'valid', and one set for each named part of the targets (the same sequences)."""
    numbers = np.arange(self.task.valid_sequences)
    # Every batch has the same named parts, so that one sequence is enough to learn their names.
    parts = self.task.target_sets(self.task.batch('valid', 0, numbers[:1]))
    makers = {name: functools.partial(self._valid_batch, name) for name in ['valid', *parts]}
    return {
      name: FixedBatches(make, numbers, batch_size, max_batches, rows)
      for name, make in makers.items()
    }

  def probe_tokens(self, sequences: int = 100, length: int = 64) -> np.ndarray:
    """The first `length` inputs of the validation sequences, BOS included."""
    return self.task.batch('valid', 0, np.arange(sequences)).tokens[:, :length]

  def summary(self) -> dict[str, Any]:
    summary = {
      'source': repr(self.task),
      'content': repr(self.task),
      'vocab_size': self.vocab_size,
      'context': self.task.length,
      'validation_sequences': self.task.valid_sequences,
      **self.task.facts(),
    }
    return summary | ({'unigram_loss': self.unigram_loss} if self.vocab_size else {})

  def _valid_batch(self, part: str, rows: np.ndarray) -> Batch:
    batch = self.task.batch('valid', 0, rows)
    weights = {'valid': batch.weights, **self.task.target_sets(batch)}
    return batch._replace(weights=weights[part])

  def _training_batch(self, numbers: np.ndarray, seed: int) -> Batch:
    return self.task.batch('train', seed, numbers)


def _stationary(table: np.ndarray) -> np.ndarray:
  """The distribution that one step of the Markov chain leaves as it is."""
  size = len(table)
  # p P = p and sum(p) = 1: one equation more than unknowns, solved exactly by least squares.
  equations = np.vstack([table.T - np.eye(size), np.ones(size)])
  return np.linalg.lstsq(equations, np.eye(size + 1)[size], rcond=None)[0]
