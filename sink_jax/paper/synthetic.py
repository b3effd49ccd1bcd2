"""The synthetic axis: the paper's variants on the Bigram-Backcopy task, and their chapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sink_jax.paper import drawing
from sink_jax.paper.collect import SYNTHETIC, groups_of, is_synthetic
from sink_jax.paper.metrics import METRICS, Metric, Statistics, over_blocks, probed, summarize
from sink_jax.paper.tables import PROXIES, with_spread
from sink_jax.report.markup import bold, line
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord

# {metric: what it means}
COLUMNS = {
    METRICS['sink_1']: 'Share of heads whose importance of the first token exceeds epsilon.',
    METRICS['sink_star']: 'The same of the extra key or learned sink token.',
    Metric('largest importance', 'share', probed(lambda probe: probe.largest_importance)):
        'Of the first token, over heads.',
    Metric('raw mass, first', 'share', probed(lambda probe: probe.raw_mass_1)):
        'Mean weight on the first token, as it multiplies the values.',
    Metric('raw mass, row', 'share', probed(lambda probe: probe.raw_row_mass)):
        'Mean total weight of a row between tokens.',
    Metric('value ratio', 'share', over_blocks(min, lambda ratios: ratios['value'])):
        'Norm of the value of the first token over the mean of the others: the smallest over '
        'blocks.',
    Metric('key ratio', 'share', over_blocks(min, lambda ratios: ratios['key'])):
        'The same of the keys.',
    Metric('hidden ratio', 'share', METRICS['massive'].of):
        'The same of the hidden states after each block: the largest.',
    Metric('sink emerged', 'steps', METRICS['emergence_step'].of):
        'First probed step from which Sink_1 stays at or above 10 %.'}
_RATE = 'Sink_1 %'
_STARRED = (_RATE, 'largest importance')  # the columns where * marks proxies
_KINDS = {_RATE: 'Sink_1, first token', 'Sink_* %': 'Sink_*, extra key'}  # that are drawn


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
  losses = dict.fromkeys(key for run in runs for key in run.shown_losses)
  columns = {Metric(f'{key} loss', 'nats', lambda run, key=key: (run.losses or {}).get(key)):
             'Validation loss, nats.' if key == 'valid' else
             f'Validation loss on the {key} targets, nats.' for key in losses} | COLUMNS
  rows, groups = [], groups_of(runs, is_synthetic)
  for group in groups:
    for trial in group.trials:
      label, measured = group.runs(trial)[0].label, group.measured(trial)
      name = trial.removeprefix(SYNTHETIC)
      # A budget is named only where rows differ in it.
      if len(groups) > 1:
        name += f' ({", ".join(filter(None, (label.budget, label.protocol))) or "no budget"})'
      cells = {metric.heading: summary for metric in columns
               if (summary := summarize(metric, measured, metric.heading in _STARRED))}
      rows.append(SyntheticRow(
          name, trial, label.budget, label.protocol, group.status(trial), cells,
          [run.name for run in runs if run.label == label]))
  # The trials have the paper's names, among which 'default' is softmax.
  rows.sort(key=lambda row: (not row.variant.startswith('default'), row.variant))
  optimum = {entropy for run in runs if run.setup
             and (entropy := run.setup.facts.get('bigram_entropy')) is not None}
  # A column that no variant has a number for would only widen the table.
  meanings = {metric.heading: meaning for metric, meaning in columns.items()
              if any(metric.heading in row.cells for row in rows)}
  return SyntheticAxis(meanings, rows, sorted(optimum))


def add_axis(parts: Parts, axis: SyntheticAxis) -> None:
  """The chapter, but for its heading: a table, a picture of its rates, and what columns mean."""
  parts.paragraph("The paper's variants on the Bigram-Backcopy task, where one head has one thing "
                  'to do; default is softmax.')
  head = ['variant', *axis.columns, 'status and runs']
  table = [[row.variant, *(with_spread(row.cells[heading].text) if heading in row.cells else ''
                           for heading in axis.columns),
            (row.status, ', '.join(row.runs))] for row in axis.rows]
  parts.table(head, table, (0, len(head) - 1))
  if any('*' in str(cell) for row in table for cell in row):
    parts.paragraph(PROXIES)
  parts.paragraphs([f'The least possible loss is {value:.3f} nats on bigram targets and 0 on '
                    'back-copies.' for value in axis.optimum])
  rates = {row.variant + '*' * row.cells[_RATE].proxy: {
      kind: row.cells[heading].values for heading, kind in _KINDS.items() if heading in row.cells}
           for row in axis.rows if _RATE in row.cells}
  if rates:
    picture = drawing.png(drawing.seed_rows([drawing.SeedRows('', rates, {})]))
    parts.picture('synthetic.png', picture,
                  'Sink_1 and Sink_* by variant, on the Bigram-Backcopy task; * marks proxies.')
  with parts.details('Columns'):
    parts.items([line(bold(heading), ': ', words) for heading, words in axis.columns.items()])
