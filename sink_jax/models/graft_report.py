"""GraftReport: what a graft changed, and what it did to the loss before any training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class GraftReport:
  """What `sink_jax.graft` changed in a model, and the loss before and after.

  Attributes:
    changed: the changes, one line each: 'attention.head: PlainOutput() -> HeadGate()'.
    new: the names of new parameters, such as 'blocks/attention/head_kernel'.
    removed: the names of removed parameters. One whose shape changed is both removed and new.
    start: how new parameters were to start, 'identity' or 'random'.
    exact: whether the grafted model computes the same function as its source by construction, up
      to rounding.
    loss_before: the mean cross-entropy of the source on the batch, in nats per token.
    loss_after: the same loss of the grafted model, before any training.
    fresh: those of `new` that start as in a fresh model: all with 'random', and with 'identity'
      those that have no values at which the function stays the same.
  """

  changed: tuple[str, ...]
  new: tuple[str, ...]
  removed: tuple[str, ...]
  start: str
  exact: bool
  loss_before: float
  loss_after: float
  fresh: tuple[str, ...] = ()

  @classmethod
  def from_row(cls, row: Mapping[str, Any]) -> GraftReport:
    """Returns the report of a row of metrics: `dataclasses.asdict`, with lists for tuples."""
    return cls(**{key: tuple(row[key]) if isinstance(row[key], list) else row[key]
                  for key in cls.__dataclass_fields__})

  def __str__(self) -> str:
    start = self.start if self.exact or self.start == 'random' else 'no identity start exists'
    parts = [*self.changed, *(f'{label}: {", ".join(paths)}' for label, paths in (
        ('new', self.new), ('removed', self.removed), ('as in a fresh model', self.fresh)) if paths)]
    return (f'graft: {"; ".join(parts)}; start: {start}; loss before any training: '
            f'{self.loss_before:.4f} -> {self.loss_after:.4f} nats '
            f'({self.loss_after - self.loss_before:+.2e})')
