"""What the probes of a training run measured, as typed values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

EMERGENCE_LEVEL = 0.1  # Sink_1 has emerged once it stays at or above this share of heads


@dataclasses.dataclass(frozen=True)
class NormRatios:
  """Norm of the first token's vectors over the mean of the other tokens'; a number per block.

  None where a model has no such vectors. hidden: after the embedding and after each block.
  hidden_before_norm: of what enters the norm of a post-norm model. sink_token: the hidden states
  of a learned sink token in place of the first token's.
  """

  value: Sequence[float | None] | None = None
  key: Sequence[float | None] | None = None
  hidden: Sequence[float | None] | None = None
  hidden_before_norm: Sequence[float | None] | None = None
  sink_token: Sequence[float | None] | None = None


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
  """Massive activations in what one block returns, as `evaluate.activations` defines them.

  block: its number, from 1. position: of the token, from 1; channel: from 0. A quantity is None
  where it was not finite.
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
  the last row, in percent, see `SinkReport.head_norms`; None where it was not measured.
  """

  step: int
  sink_1: float
  sink: Sequence[float]
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
  curves: Curves
  nulls: Mapping[str, float] = dataclasses.field(default_factory=dict)
  last_nulls: Mapping[str, float] = dataclasses.field(default_factory=dict)
  activations: Sequence[BlockActivations] = ()
  dormant_heads: float | None = None

  @property
  def first_massive(self) -> BlockActivations | None:
    """The first block with entries beyond 100 medians; None where none has them."""
    return next((block for block in self.activations if block.beyond_100), None)
