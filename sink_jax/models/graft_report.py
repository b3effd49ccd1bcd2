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
    start: how the new parameters start, 'identity' or 'random'.
    exact: whether the grafted model computes the same function as its source by construction, up
      to rounding.
    loss_before: the mean cross-entropy of the source on the batch, in nats per token; None for
      models of continuous inputs, for which no targets are given.
    loss_after: the same loss of the grafted model, before any training.
  """

  changed: tuple[str, ...]
  new: tuple[str, ...]
  removed: tuple[str, ...]
  start: str
  exact: bool
  loss_before: float | None
  loss_after: float | None

  def row(self) -> dict[str, str | float | None]:
    """Returns the fields as texts and numbers, as they stand in the metrics of a run."""
    return dataclasses.asdict(self) | {
        'changed': '; '.join(self.changed), 'new': ', '.join(self.new),
        'removed': ', '.join(self.removed)}

  @classmethod
  def from_row(cls, row: Mapping[str, Any]) -> GraftReport:
    """Returns the report with this `row`. Raises a KeyError if a field is missing."""
    parts = lambda key, mark: tuple(filter(None, row[key].split(mark)))
    return cls(parts('changed', '; '), parts('new', ', '), parts('removed', ', '), row['start'],
               row['exact'], row['loss_before'], row['loss_after'])

  def __str__(self) -> str:
    names = lambda label, paths: f'; {label}: {", ".join(paths)}' if paths else ''
    loss = 'not measured of continuous inputs'
    if self.loss_before is not None and self.loss_after is not None:
      loss = (f'{self.loss_before:.4f} -> {self.loss_after:.4f} nats '
              f'({self.loss_after - self.loss_before:+.2e})')
    return (f'graft: {"; ".join(self.changed)}{names("new", self.new)}'
            f'{names("removed", self.removed)}; start: {self.start}'
            f'{", the same function" if self.exact else ""}; loss before any training: {loss}')
