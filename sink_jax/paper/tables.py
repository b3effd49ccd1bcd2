"""Rows of the paper's tables with the numbers of runs and of published models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sink_jax.paper import numbers, open_models
from sink_jax.paper.analysed import Analysed
from sink_jax.paper.cells import Cell, Entry, Row, Table
from sink_jax.paper.collect import Group
from sink_jax.paper.differences import difference, remark
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.numbers import PaperRow, PaperTable
from sink_jax.report.records import RunRecord


# By how the runs of a row ended whose training failed in the paper.
_FAILURES = {('diverged',): ': a training failure, as in the paper',
             ('done',): ': it trained, unlike in the paper',
             ('diverged', 'done'): ': some seeds fail, all do in the paper'}


def tables(groups: Sequence[Group], analysed: Analysed = Analysed()) -> list[Table]:
  """Tables 1 to 15 and the numbers of the text."""
  return [_table(table, groups, analysed) for table in numbers.ALL_TABLES]


def _table(table: PaperTable, groups: Sequence[Group], analysed: Analysed) -> Table:
  rows, lacking = [], []
  for row in table.rows:
    if table.needs == 'open models':
      entries, models = open_models.entries_of(table, row, analysed)
      lacking += models
    else:
      entries = [_entry(row, row.trial, table.metrics, group) for group in groups
                 if row.trial is not None and group.runs(row.trial)]
    rows.append(Row(row, {metric: _paper_text(row, metric) for metric in table.metrics}, entries))
  status = 'nothing to run' if table.needs == 'nothing' else ''
  return Table(table, open_models.needs_models(table, lacking) if lacking else status,
               {metric: METRICS[metric].heading for metric in table.metrics}, rows)


def _paper_text(row: PaperRow, metric: str) -> str:
  """The paper's value as it stands in a table: '0.44*', '1,000 to 2,000', 'below 1.00', '-'."""
  value, text = row.values.get(metric), METRICS[metric].text
  if value is None:
    return 'training failure' if row.failed else (
        'illegible' if row.note == 'illegible' else '-')
  if isinstance(value, tuple):
    low, high = value
    return (f'below {text(high)}' if low is None else
            f'above {text(low)}' if high is None else f'{text(low)} to {text(high)}')
  # The paper gives losses with two decimals; measured ones are shown with three.
  if metric == 'valid_loss':
    return f'{value:.2f}'
  return text(value) + ('*' if row.proxy and metric.startswith('sink_') else '')


def _entry(row: PaperRow, trial: str, metrics: Iterable[str], group: Group) -> Entry:
  runs, measured = group.runs(trial), group.measured(trial)
  # Seeds of a trial should have one config but for the seed; `inconsistencies` names others.
  setup = next((run.setup for run in runs if run.setup), None)
  status = group.status(trial)
  if group.same_as_default(trial):
    # Where a budget fixes what the trial is about, both train the same model.
    status += '; equal settings: at this budget the same run as default'
  if row.failed:
    status += _FAILURES.get(tuple(sorted({run.status for run in runs} & {'done', 'diverged'})), '')
  return Entry(
      budget=group.budget,
      protocol=group.protocol,
      status=status,
      cells={metric: cell for metric in metrics if (cell := _cell(row, metric, runs, measured))},
      steps=setup.steps if setup else None,
      tokens=_tokens_seen(measured[0]) if measured else None,
      unique_tokens=setup.experiment.data.max_tokens if setup else 0,
      sources=[run.name for run in runs],
  )


def _cell(row: PaperRow, metric: str, runs: Sequence[RunRecord], measured: Sequence[RunRecord]
          ) -> Cell | None:
  """The summary of a metric and its difference to the paper; None if it is unknown."""
  if metric == 'converges':  # divergence is a result, and no failure to measure
    measured = [run for run in runs if run.status in ('done', 'diverged')]
  summary = metric_summary(metric, measured)
  if summary is None:
    return None
  paper = row.values.get(metric)
  compared, words = remark(metric, [run for run in measured if run.name in summary.runs])
  if measured[0].status != 'done' and metric != 'converges':
    compared, words = False, 'not the last step'
  return Cell(
      paper=paper,
      difference=difference(summary.mean, paper) if compared else None,
      # A truth agrees where all seeds do: their mean is then exactly 0 or 1.
      agrees=summary.mean == float(paper) if isinstance(paper, bool) else None,
      remark=words if paper is not None else '',
      measured=summary.statistics())


def _tokens_seen(run: RunRecord) -> int:
  """Up to its last step on record."""
  setup = run.known_setup
  # A run under way has seen the tokens of the steps up to its last record; every step has equally
  # many.
  return setup.tokens if run.status == 'done' else setup.tokens // setup.steps * run.step
