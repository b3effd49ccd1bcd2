"""The synthetic axis: the paper's variants on the Bigram-Backcopy task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from sink_jax.paper.collect import SYNTHETIC, Group, is_synthetic, seed_and_name
from sink_jax.paper.metrics import METRICS, Metric, Statistics, over_blocks, probed, summarize
from sink_jax.report.probe_record import ProbeRecord
from sink_jax.report.records import RunRecord
from sink_jax.train.experiment import Label


@dataclasses.dataclass(frozen=True)
class Column:
  """A column: its metric, what that means, and whether * marks proxies in it."""

  metric: Metric
  meaning: str
  proxies: bool = False


def _share(heading: str, of: Callable[[ProbeRecord], float]) -> Metric:
  return Metric(heading, 'share', probed(of))


COLUMNS = (
    Column(METRICS['sink_1'], 'Share of heads whose importance of the first token exceeds epsilon.',
           proxies=True),
    Column(METRICS['sink_star'], 'The same of the extra key or learned sink token.'),
    Column(_share('largest importance', lambda probe: probe.largest_importance),
           'Of the first token, over heads.', proxies=True),
    Column(_share('raw mass, first', lambda probe: probe.raw_mass_1),
           'Mean weight on the first token, as it multiplies the values.'),
    Column(_share('raw mass, row', lambda probe: probe.raw_row_mass),
           'Mean total weight of a row between tokens.'),
    Column(Metric('value ratio', 'share', over_blocks(min, lambda ratios: ratios['value'])),
           'Norm of the value of the first token over the mean of the others: the smallest over '
           'blocks.'),
    Column(Metric('key ratio', 'share', over_blocks(min, lambda ratios: ratios['key'])),
           'The same of the keys.'),
    Column(Metric('hidden ratio', 'share', METRICS['massive'].of),
           'The same of the hidden states after each block: the largest.'),
    Column(Metric('sink emerged', 'steps', METRICS['emergence_step'].of),
           'First probed step from which Sink_1 stays at or above 10 %.'),
)


@dataclasses.dataclass(frozen=True)
class SyntheticRow:
  """A variant on the synthetic task: the trial without its prefix. cells: by heading."""

  variant: str
  trial: str
  budget: str
  protocol: str
  status: str
  cells: Mapping[str, Statistics]
  runs: Sequence[str]


@dataclasses.dataclass(frozen=True)
class SyntheticAxis:
  """The variants on the synthetic task, softmax first.

  columns: {heading: meaning}. optimum: the least possible losses on bigram targets, in nats, one
  per task.
  """

  columns: Mapping[str, str]
  rows: Sequence[SyntheticRow]
  optimum: Sequence[float]


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
  columns = [Column(Metric(f'{key} loss', 'nats',
                           lambda run, key=key: (run.losses or {}).get(key)),
                    f'Validation loss on the {key} targets, nats.' if key != 'valid' else
                    'Validation loss, nats.') for key in losses] + list(COLUMNS)
  rows = [_row(label, members, columns, several) for label, members in trials.items()]
  # The trials have the paper's names, among which 'default' is softmax.
  rows.sort(key=lambda row: (not row.variant.startswith('default'), row.variant))
  optimum = {entropy for run in runs if run.setup
             and (entropy := run.setup.facts.get('bigram_entropy')) is not None}
  # A column that no variant has a number for would only widen the table.
  meanings = {column.metric.heading: column.meaning for column in columns
              if any(column.metric.heading in row.cells for row in rows)}
  return SyntheticAxis(meanings, rows, sorted(optimum))


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
  cells = {column.metric.heading: summary for column in columns
           if (summary := summarize(column.metric, measured, column.proxies))}
  return SyntheticRow(name, label.trial, label.budget, label.protocol, group.status(label.trial),
                      cells, [run.name for run in runs])
