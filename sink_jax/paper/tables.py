"""Rows of the paper's tables beside our runs."""

from __future__ import annotations

from collections.abc import Iterable

from sink_jax.paper import numbers, open_models
from sink_jax.paper.analysed import Analysed
from sink_jax.paper.collect import Group
from sink_jax.paper.differences import difference, remark
from sink_jax.paper.metrics import METRICS, summary
from sink_jax.report.records import RunRecord


def tables(groups: list[Group], analysed: Analysed = Analysed()) -> list[dict]:
  """Tables 1 to 15 and the numbers of the text, each with rows; see `row`."""
  return [_table(table, groups, analysed)
          for table in numbers.tables() + numbers.text_numbers()]


def _table(table, groups, analysed):
  rows = ([_open_row(table, entry, analysed) for entry in table['rows']]
          if table['needs'] == 'open models' else
          [row(entry, table['measures'], groups) for entry in table['rows']])
  return dict(table, name=numbers.name_of(table), status=_status(table, rows),
              headings={measure: METRICS[measure].heading for measure in table['measures']},
              rows=rows)


def _open_row(table, entry, analysed):
  """A row of open models, with at most one entry in `ours`; see `open_models.row_of`."""
  ours = open_models.row_of(table, entry, analysed)
  return dict(entry, paper={m: paper_text(entry, m) for m in table['measures']},
              ours=[] if ours is None else [ours])


def row(entry: dict, measures: Iterable[str], groups: list[Group]) -> dict:
  """A row of the paper with `paper` {measure: text} and `ours`, an entry per budget and protocol.

  Ours: budget, protocol, status, measures {measure: mean, spread, runs, difference, remark},
  steps, tokens and unique_tokens (0: all of the data) of one run, and the folders of all.
  """
  trial = entry['trial']
  shown = [group for group in groups if group.runs(trial)] if trial else []
  return dict(entry, paper={m: paper_text(entry, m) for m in measures},
              ours=[_ours(entry, measures, group) for group in shown])


def paper_text(entry: dict, measure: str) -> str:
  """The paper's value as it stands in a table: '0.44*', '1,000 to 2,000', 'below 1.00', '-'."""
  value, text = entry['values'].get(measure), METRICS[measure].text
  if value is None:
    return 'training failure' if entry.get('failed') else (
        'illegible' if entry.get('note') == 'illegible' else '-')
  if measure == 'valid_loss':
    return f'{value:.2f}'
  if isinstance(value, list):
    low, high = value
    return (f'below {text(high)}' if low is None else
            f'above {text(low)}' if high is None else f'{text(low)} to {text(high)}')
  return text(value) + ('*' if entry.get('proxy') and measure.startswith('sink_') else '')


def _ours(entry, measures, group):
  runs, measured = group.runs(entry['trial']), group.measured(entry['trial'])
  setup = next((run.setup for run in runs if run.setup), None)
  status = group.status(entry['trial'])
  if group.same_as_default(entry['trial']):
    status += '; equal settings: at this budget the same run as default'
  if entry.get('failed'):
    status += _failure(runs)
  return {
      'budget': group.budget, 'protocol': group.protocol, 'status': status,
      'finished': bool(group.done(entry['trial'])),
      'measures': {m: cell for m in measures if (cell := _cell(entry, m, runs, measured))},
      'steps': setup.steps if setup else None,
      'tokens': _tokens_seen(measured[0]) if measured else None,
      'unique_tokens': setup.experiment.data.max_tokens if setup else 0,
      'runs': [run.name for run in runs],
  }


def _cell(entry, measure, runs, measured):
  """The summary of a measure as a dict, with its difference to the paper; None if unknown."""
  if measure == 'converges':
    measured = [run for run in runs if run.status in ('done', 'diverged')]
  found = summary(measure, measured)
  if found is None:
    return None
  paper = entry['values'].get(measure)
  compared, words = remark(measure, [run for run in measured if run.name in found.runs])
  if measured[0].status != 'done' and measure != 'converges':
    compared, words = False, 'not the last step'
  delta = difference(found.mean, paper) if compared else None
  agrees = None if not isinstance(paper, bool) else found.mean == float(paper)
  return found.as_dict() | {'paper': paper, 'difference': delta, 'agrees': agrees,
                            'remark': words if paper is not None else ''}


def _failure(runs):
  """Whether ours failed where the paper's training did."""
  ended = {run.status for run in runs} & {'done', 'diverged'}
  if not ended:
    return ''
  return {frozenset({'diverged'}): ': a training failure, as in the paper',
          frozenset({'done'}): ': it trained, unlike in the paper'}.get(
              frozenset(ended), ': some seeds fail, all do in the paper')


def _tokens_seen(run: RunRecord) -> int:
  """Up to its last step on record."""
  setup = run.known_setup
  return setup.tokens if run.status == 'done' else setup.tokens // setup.steps * run.step


def _status(table, rows):
  if table['needs'] == 'open models':
    models = [model for row in rows for model in open_models.lacking(table, row)]
    return open_models.needs_models(table, list(dict.fromkeys(models))) if models else ''
  return 'nothing to run' if table['needs'] == 'nothing' else ''
