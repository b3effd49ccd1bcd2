"""What the probes of a training run measured, as typed values, and how its rows are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from sink_jax.evaluate.activations import Activations
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.report.jsontext import UNWRITTEN

EMERGENCE_LEVEL = 0.1  # Sink_1 has emerged once it stays at or above this share of heads
# The keys that rows of the probe have for fields of a `ProbeRecord`, where they are others.
_KEYS = {'sink_extra_key': 'sink_bias_slot', 'sink_extra_key_official': 'sink_bias_slot_released',
         'mean_extra_key': 'mean_bias_slot'}
# {kind: a norm of the first token over the mean of the other tokens', a number per block, or None
# where a model has no such vectors}. hidden: after the embedding and after each block.
# hidden_before_norm: of what enters the norm of a post-norm model. sink_token: the hidden states of
# a learned sink token in place of the first token's.
NormRatios = Mapping[str, Sequence[float | None] | None]
_RATIOS = ('value', 'key', 'hidden', 'hidden_before_norm', 'sink_token')


@dataclasses.dataclass(frozen=True)
class Curves:
  """Probed quantities against the step.

  sink_extra_key holds None without an extra key. value_ratio: the smallest over blocks.
  hidden_ratio: the largest over blocks; max_over_median: the largest |h| over the median |h| of
  the block where that is largest. None where they were not measured, or not finite.
  """

  step: Sequence[int]
  sink_1: Sequence[float]
  sink_extra_key: Sequence[float | None]
  largest_importance: Sequence[float]
  value_ratio: Sequence[float | None]
  hidden_ratio: Sequence[float | None]
  max_over_median: Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class BlockActivations:
  """Massive activations in what one block returns: its number, from 1, and its `Activations`.

  position: of the token, from 1; channel: from 0. A quantity is None where it was not finite.
  """

  block: int
  max: float | None
  median: float | None
  beyond_100: float | None
  beyond_1000: float | None
  kurtosis_moment: float | None
  kurtosis_channels: float | None
  position: int
  channel: int

  @property
  def max_over_median(self) -> float | None:
    """None where more than half of the entries are zero, or one of the two was not finite."""
    return None if self.max is None or not self.median else self.max / self.median


@dataclasses.dataclass(frozen=True)
class ProbeRecord:
  """What the probe measured: the last row, and the course of Sink_1 up to it.

  Sink rates are in percent of all heads. sink: Sink_k, k = 1, 2, ... sink_extra_key: Sink_*, of
  the extra key or the learned sink token; sink_extra_key_official: as the official implementation
  (sail-sg/Attention-Sink) counts it, with a dummy row of weight one. raw_mass_1: mean weight on
  the first token, as it multiplies the values; raw_row_mass: mean sum of a row. value_ratio: the
  smallest over blocks, at value_ratio_block (from 1). emergence_step: None where no sink has
  emerged. peak_sink_1: the largest Sink_1, at peak_step. nulls, last_nulls: the 99th percentiles of
  measures where there is no sink to find, by key, of the untrained model and of the last row:
  'sink_1' in percent, 'hidden_ratio' and more; empty for runs whose probe did not measure them.
  activations: of the last row, block by block; empty where it was not measured. dormant_heads: of
  the last row, in percent, see `SinkReport.summary`; None where it was not measured.
  """

  step: int
  sink_1: float
  sink: Sequence[float] = dataclasses.field(metadata=UNWRITTEN)
  sink_extra_key: float | None
  sink_extra_key_official: float | None
  largest_importance: float
  mean_importance: float
  mean_extra_key: float | None
  raw_mass_1: float
  largest_raw_mass_1: float
  raw_row_mass: float
  value_ratio: float
  value_ratio_block: int
  ratios: NormRatios
  emergence_step: int | None
  peak_sink_1: float
  peak_step: int
  curves: Curves = dataclasses.field(metadata=UNWRITTEN)
  nulls: Mapping[str, float]
  last_nulls: Mapping[str, float]
  activations: Sequence[BlockActivations]
  dormant_heads: float | None

  @property
  def first_massive(self) -> BlockActivations | None:
    """The first block with entries beyond 100 medians; None where none has them."""
    return next((block for block in self.activations if block.beyond_100), None)


def probe_record(rows: Sequence[Mapping[str, Any]], blocks: Sequence[int]) -> ProbeRecord:
  """The record of probe rows in order of step, the last of which is the result.

  blocks: the numbers, from 1, of the blocks with attention.

  Raises:
    KeyError, TypeError, ValueError, AttributeError: of a damaged row.
  """
  last = rows[-1]
  steps, rates = [row['step'] for row in rows], [row['sink_1'] for row in rows]
  # The first of several equal ones: when the rate got there, and not how long it stayed.
  peak = int(np.argmax(rates))
  # Sentences name the block where the first token's values are shortest against the others'.
  block = int(np.argmin(last['value_ratio']))
  return ProbeRecord(
      **{key: last[_KEYS.get(key, key)] for key in (
          'step', 'sink_1', 'sink', 'largest_importance', 'mean_importance', 'raw_mass_1',
          'largest_raw_mass_1', 'raw_row_mass', *_KEYS)},
      value_ratio=last['value_ratio'][block],
      # A row has ratios of the blocks with attention alone; one of more blocks than the config's is
      # numbered as it is.
      value_ratio_block=blocks[block] if block < len(blocks) else block + 1,
      ratios={kind: last.get(f'{kind}_ratio') for kind in _RATIOS},
      # Rates are percentages in metrics.jsonl, and shares in `evaluate`.
      emergence_step=emergence_step(steps, np.asarray(rates) / 100, EMERGENCE_LEVEL),
      peak_sink_1=rates[peak],
      peak_step=steps[peak],
      curves=Curves(*map(list, zip(*map(_point, rows)))),
      # A record that has lost its beginning has no row of the untrained model.
      nulls=_nulls(rows[0]) if rows[0]['step'] == 0 else {},
      last_nulls=_nulls(last),
      activations=_activations(last),
      dormant_heads=last.get('dormant_heads'),
  )


def is_number(value: Any) -> TypeGuard[float]:
  """Whether a value of a row is a quantity; to Python a truth is an int."""
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _point(row: Mapping[str, Any]) -> tuple[Any, ...]:
  """A row of the probe as the fields of `Curves`; those of blocks leave out the embedding."""
  return (row['step'], row['sink_1'], row['sink_bias_slot'], row['largest_importance'],
          min(row['value_ratio'], default=None), largest((row.get('hidden_ratio') or [])[1:]),
          largest(block.max_over_median for block in _activations(row)))


def largest(values: Iterable[float | None]) -> float | None:
  """The largest of those that are known; None where none is."""
  return max((value for value in values if value is not None), default=None)


def _activations(row: Mapping[str, Any]) -> list[BlockActivations]:
  """Those of the blocks of a probe row; none in the rows of older runs."""
  if 'activation_max' not in row:
    return []
  names = [re.sub('^activations?_', '', key) for key in Activations._fields]
  # Entry 0 is the embedding. A list that is shorter than others is of a damaged row.
  blocks = zip(*(row[key] for key in Activations._fields), strict=True)
  return [BlockActivations(block, **dict(zip(names, values)))
          for block, values in enumerate(blocks) if block]


def _nulls(row: Mapping[str, Any]) -> dict[str, float]:
  """The null percentiles of a probe row that are numbers."""
  return {key: float(value) for key, value in (row.get('null_p99') or {}).items()
          if is_number(value)}
