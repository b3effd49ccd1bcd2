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
    loss_before: the mean cross-entropy of the source on the batch, in nats per token; None for
      models of continuous inputs, for which no targets are given.
    loss_after: the same loss of the grafted model, before any training.
    fresh: those of `new` that start as in a fresh model: all with 'random', and with 'identity'
      those that have no values at which the function stays the same.
  """

  changed: tuple[str, ...]
  new: tuple[str, ...]
  removed: tuple[str, ...]
  start: str
  exact: bool
  loss_before: float | None
  loss_after: float | None
  fresh: tuple[str, ...] = ()

  def row(self) -> dict[str, str | float | None]:
    """Returns the fields as texts and numbers, as they stand in the metrics of a run."""
    return dataclasses.asdict(self) | {
        'changed': '; '.join(self.changed), 'new': ', '.join(self.new),
        'removed': ', '.join(self.removed), 'fresh': ', '.join(self.fresh)}

  @classmethod
  def from_row(cls, row: Mapping[str, Any]) -> GraftReport:
    """Returns the report with this `row`. Raises a KeyError if a field is missing."""
    parts = lambda key, mark: tuple(filter(None, row[key].split(mark)))
    return cls(parts('changed', '; '), parts('new', ', '), parts('removed', ', '), row['start'],
               row['exact'], row['loss_before'], row['loss_after'],
               tuple(filter(None, row.get('fresh', '').split(', '))))

  def __str__(self) -> str:
    names = lambda label, paths: f'; {label}: {", ".join(paths)}' if paths else ''
    loss = 'not measured of continuous inputs'
    if self.loss_before is not None and self.loss_after is not None:
      loss = (f'{self.loss_before:.4f} -> {self.loss_after:.4f} nats '
              f'({self.loss_after - self.loss_before:+.2e})')
    return (f'graft: {"; ".join(self.changed)}{names("new", self.new)}'
            f'{names("removed", self.removed)}; start: {self._outcome()}; '
            f'loss before any training: {loss}')

  def _outcome(self) -> str:
    """Returns how the new parameters start: identity where the function is the same, or why not."""
    if self.exact or self.start == 'random':
      return self.start
    near = [path for path in self.new if path not in self.fresh]
    return 'no identity start exists' + ''.join(
        f'; {words}: {", ".join(paths)}' for words, paths in (
            ('fresh', self.fresh), ('identity or next to it', near)) if paths)
