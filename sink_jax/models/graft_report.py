"""GraftReport: what a graft changed, and what it did to the loss before any training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class GraftReport:
  """What `sink_jax.graft` made of a model.

  changed: lines 'attention.head: PlainOutput() -> HeadGate()'.
  new, removed: names of parameters, such as 'blocks/attention/head_kernel'; one whose shape
    changed is both.
  start: 'identity' or 'random'.
  exact: whether the model computes what the source does, but for rounding, by construction.
  loss_before, loss_after: mean cross-entropy of the next tokens of the batch, in nats; None of
    continuous inputs, which come without targets.
  """

  changed: tuple[str, ...]
  new: tuple[str, ...]
  removed: tuple[str, ...]
  start: str
  exact: bool
  loss_before: float | None
  loss_after: float | None

  def row(self) -> dict[str, str | float | None]:
    """The fields as texts and numbers, of the metrics of a run."""
    return dataclasses.asdict(self) | {
        'changed': '; '.join(self.changed), 'new': ', '.join(self.new),
        'removed': ', '.join(self.removed)}

  @classmethod
  def from_row(cls, row: Mapping[str, Any]) -> GraftReport:
    """The report that has this row. Raises KeyError where a field is missing."""
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
