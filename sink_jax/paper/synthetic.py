"""The synthetic axis: the paper's variants on the Bigram-Backcopy task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sink_jax.paper.collect import SYNTHETIC, Group, is_synthetic, seed_and_name
from sink_jax.paper.content import SyntheticAxis, SyntheticRow
from sink_jax.paper.metrics import METRICS, Metric, over_blocks, probed, summarize
from sink_jax.report.records import RunRecord
from sink_jax.train.experiment import Label


@dataclasses.dataclass(frozen=True)
class Column:
  """A column: its heading, what it means, its metric, and whether * marks proxies in it."""

  heading: str
  meaning: str
  metric: Metric
  proxies: bool = False


def _column(heading: str, meaning: str, of: Callable[[RunRecord], float | bool | None],
            unit: str = 'share', proxies: bool = False) -> Column:
  return Column(heading, meaning, Metric(heading, unit, of), proxies)


COLUMNS = (
    _column('Sink_1 %', 'Share of heads whose importance of the first token exceeds epsilon.',
            METRICS['sink_1'].of, 'percent', True),
    _column('Sink_* %', 'The same of the extra key or learned sink token.',
            METRICS['sink_star'].of, 'percent'),
    _column('largest importance', 'Of the first token, over heads.',
            probed(lambda probe: probe.largest_importance), proxies=True),
    _column('raw mass, first', 'Mean weight on the first token, as it multiplies the values.',
            probed(lambda probe: probe.raw_mass_1)),
    _column('raw mass, row', 'Mean total weight of a row between tokens.',
            probed(lambda probe: probe.raw_row_mass)),
    _column('value ratio', 'Norm of the value of the first token over the mean of the others: the '
            'smallest over blocks.', over_blocks(min, lambda ratios: ratios.value)),
    _column('key ratio', 'The same of the keys.', over_blocks(min, lambda ratios: ratios.key)),
    _column('hidden ratio', 'The same of the hidden states after each block: the largest.',
            METRICS['massive'].of),
    _column('sink emerged', 'First probed step from which Sink_1 stays at or above 10 %.',
            METRICS['emergence_step'].of, 'steps'),
)


def section(runs: Sequence[RunRecord]) -> SyntheticAxis | None:
  """Rows of all variants, the softmax baseline first; None without a synthetic run."""
  runs = [run for run in runs if is_synthetic(run)]
  if not runs:
    return None
  trials: dict[Label, list[RunRecord]] = {}
  for run in runs:
    trials.setdefault(run.label, []).append(run)
  # A budget is named only where rows differ in it.
  several = len({(label.budget, label.protocol) for label in trials}) > 1
  losses = dict.fromkeys(key for run in runs for key in run.shown_losses)
  columns = [_column(f'{key} loss', f'Validation loss on the {key} targets, nats.' if key != 'valid'
                     else 'Validation loss, nats.',
                     lambda run, key=key: (run.losses or {}).get(key), 'nats')
             for key in losses] + list(COLUMNS)
  rows = [_row(label, members, columns, several) for label, members in trials.items()]
  # The trials have the paper's names, among which 'default' is softmax.
  rows.sort(key=lambda row: (not row.variant.startswith('default'), row.variant))
  optimum = {entropy for run in runs if run.setup
             and (entropy := run.setup.facts.get('bigram_entropy')) is not None}
  # A column that no variant has a number for would only widen the table.
  shown = [column for column in columns if any(column.heading in row.cells for row in rows)]
  return SyntheticAxis({column.heading: column.meaning for column in shown}, rows, sorted(optimum))


def _row(label: Label, runs: Sequence[RunRecord], columns: Sequence[Column], several: bool
         ) -> SyntheticRow:
  """A row of all seeds of a trial; several: the name tells budgets and protocols apart."""
  # A group of this trial alone, for its rules on which runs are shown and how their states are
  # worded.
  group = Group(label.budget, label.protocol,
                {label.trial: tuple(sorted(runs, key=seed_and_name))})
  measured = group.measured(label.trial)
  name = label.trial.removeprefix(SYNTHETIC)
  if several:
    name += f' ({", ".join(filter(None, (label.budget, label.protocol))) or "no budget"})'
  cells = {column.heading: summary.statistics() for column in columns
           if (summary := summarize(column.metric, measured, column.proxies))}
  return SyntheticRow(name, label.trial, label.budget, label.protocol, group.status(label.trial),
                      cells, [run.name for run in runs])
