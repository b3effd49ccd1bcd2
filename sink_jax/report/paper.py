"""The numbers of the paper (numbers.json), and our runs next to them."""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from sink_jax.evaluate import EPSILON
from sink_jax.io.paths import AnyPath
from sink_jax.report.runs import EMERGED
from sink_jax.train.workdir import read_object

_CONTENT = json.loads((resources.files('sink_jax.report') / 'numbers.json').read_text('utf-8'))
TABLES: list[dict[str, Any]] = (
  _CONTENT['tables'] + _CONTENT['text']
)  # and numbers of the running text
FIGURES: list[dict[str, Any]] = _CONTENT['figures']


def name_of(item: Mapping[str, Any]) -> str:
  """'Table 10 (left)', 'StreamingLLM, Figure 12'; the title of numbers of the text."""
  kind = 'Figure' if 'caption' in item else 'Table'
  half, other = (
    f' ({item["half"]})' * bool(item['half']),
    f'{item.get("paper")}, ' * bool(item.get('paper')),
  )
  return f'{other}{kind} {item["number"]}{half}' if item['number'] else item['title']


def _text(metric: str, value: float | list | None) -> str:
  """'18.18', 'yes', '1,000 to 2,000', 'below 4,000', '-'."""
  if isinstance(value, list):
    low, high = (end and _text(metric, end) for end in value)
    return f'{low} to {high}' if low and high else f'above {low}' if low else f'below {high}'
  if value is None or isinstance(value, bool):
    return {None: '-', True: 'yes', False: 'no'}[value]
  return f'{value:,.0f}' if metric.endswith('_step') else f'{value:.2f}'


def number(trial: str, metric: str) -> str:
  """The first number that a table has of a trial, or of a published model; '' if there is none."""
  metric = re.sub(r'kinds_(\w+)_sink_1', r'sink_1_\1', metric)  # as `open_models` names it
  return next(
    (
      _text(metric, row['values'][metric])
      for item in TABLES
      for row in item['rows']
      if trial in (row['trial'], row['setting']) and row['values'].get(metric) is not None
    ),
    '',
  )


def table_number(table: str, setting: str, metric: str) -> float | None:
  """One number of a table, by its key ('table-1-left'); None if the paper gives none."""
  return next(
    (
      row['values'].get(metric)
      for item in TABLES
      if item['key'] == table
      for row in item['rows']
      if row['setting'] == setting
    ),
    None,
  )


def beside(table: pd.DataFrame) -> pd.DataFrame:
  """Every number of the paper about a trained model, and ours.

  Args:
    table: of `runs.table`, of one task and budget.

  Returns:
    table (its key), name, setting, trial, metric; value (NaN: none, or a range), text and note of
    the paper; mean, least, largest and n of our finished runs that are valid, and invalid, how many
    are not. Diverged runs count for `converges`. expressible: whether the budget has the trial.
  """
  rows, finished = [], _finished(table)
  absent = set(table.trial[table.status.eq('not expressible')])
  for item, row in ((item, row) for item in TABLES for row in item['rows'] if row['trial']):
    runs = [run for run in finished if run['trial'] == row['trial']]
    for metric in item['metrics']:
      value = row['values'].get(metric)
      text = _text(metric, value) + '*' * (row.get('proxy', False) and metric.startswith('sink'))
      valid = [run for run in runs if not run['valid'] or metric == 'converges']
      values = pd.DataFrame(
        [(run['seed'], run.get(metric)) for run in valid], columns=['seed', 'value']
      )
      if metric.endswith('_step'):  # infinite if no sink emerges
        values = values.assign(
          value=values.value.clip(upper=max((run.get('steps', 0) for run in valid), default=0))
        )
      ours = pd.Series(
        values.dropna().astype(float).groupby('seed').value.mean()
      )  # runs may share a seed
      rows.append(
        {
          'table': item['key'],
          'name': name_of(item),
          'setting': row['setting'],
          'trial': row['trial'],
          'metric': metric,
          'value': math.nan if value is None or isinstance(value, list) else float(value),
          'text': 'training failure' if value is None and row.get('failed') else text,
          'note': row.get('note', ''),
          'mean': ours.mean(),
          'least': ours.min(),
          'largest': ours.max(),
          'n': len(ours),
          'invalid': len(runs) - len(valid),
          'expressible': row['trial'] not in absent,
        }
      )
  return pd.DataFrame(rows)


def agreement(both: pd.DataFrame) -> tuple[pd.DataFrame, float, int]:
  """Sink_1 of every trial that both have (rows of `beside`: value is the paper's, mean ours).

  Returns:
    These rows, Spearman's rank correlation, and how many trials lie on the same side of 10 %.
  """
  dots = both.query('metric == "sink_1" and n > 0').dropna(subset='value').drop_duplicates('trial')
  same = sum(
    (theirs >= EMERGED) == (ours >= EMERGED) for theirs, ours in zip(dots['value'], dots['mean'])
  )
  return dots, float(np.asarray(stats.spearmanr(dots['value'], dots['mean']))[0]), same


def coverage(table: pd.DataFrame, analysed: Mapping[str, Collection[str]]) -> pd.DataFrame:
  """Every table and figure of the paper: key, name, title, command, and where it was run.

  Args:
    table: of `runs.table`, of all tasks.
    analysed: names of the models that an analysis measured, by its name.
  """
  rows, finished = [], _finished(table)
  for item in TABLES + FIGURES:
    settings = item.get('rows', ())
    trials = [*dict.fromkeys(item.get('trials') or [row['trial'] for row in settings])]
    command = run = ''
    if analysis := item.get('analysis'):
      models = item.get('models', [row['setting'] for row in settings] or ['Pythia-14M', 'GPT2'])
      command = f'analyses {analysis}' + f' --checkpoint="{",".join(models)}"' * bool(models)
      command += item.get('options', '') + ' --out=analyses'
      measured = analysed.get(analysis, ())
      run = ', '.join(name for name in measured if name in models or not models) or (
        f'not run; the same of {", ".join(measured)}' if measured else ''
      )
    elif item['needs'] in ('training', 'fine-tuning'):
      task, folder = ('paper', 'desk') if item['needs'] == 'training' else ('sft', 'sft/paper')
      command = (
        f'sweep --config=configs/{task}.py --budget=desk --seeds=1,2,3 --workdir=runs/{folder}'
        + f' --only={",".join(trials)}' * bool(trials)
      )
      runs = [
        run for run in finished if run['task'] == task and (run['trial'] in trials or not trials)
      ]
      absent = table[table.status.eq('not expressible') & table.trial.isin(trials)]
      parts = []
      for budget in sorted({run['budget'] for run in runs}):
        of = [run for run in runs if run['budget'] == budget]
        ours, lacks = (
          {run['trial'] for run in of},
          sorted(set(absent.trial[absent.budget == budget])),
        )
        parts.append(
          f'{budget}: {len(ours)} of {len(trials) or len(ours)} trials, {len(of)} run{"s" * (len(of) > 1)}'
          + f' (the budget has no {", ".join(lacks)})' * bool(lacks)
        )
      run = '; '.join(parts)
    title = item.get('title') or item['caption']
    if item['needs'] == 'fine-tuning':
      title = title.removesuffix('.') + ', after the trainings in docs/experiments.md.'
    rows.append(
      {
        'key': item['key'],
        'name': name_of(item),
        'title': title,
        'command': command and f'python -m sink_jax {command}',
        'run': run or ('nothing to run' if item['needs'] == 'nothing' else 'not run'),
      }
    )
  return pd.DataFrame(rows)


def _finished(table: pd.DataFrame) -> list[dict[str, Any]]:
  return table.query('status in ["done", "diverged"]').to_dict('records')


def open_models(paths: Sequence[AnyPath]) -> pd.DataFrame:
  """Numbers of published models as rows of `runs.table`, from files of `sink_jax analyses`.

  Columns: ANALYSIS_[KIND_]COLUMN, the mean over the rows of a model; ..._range, the largest minus
  the least; X_lead from X_first and X_others. They are at epsilon 0.3, and over heads with a sink.
  """
  found: dict[str, dict[str, list[float]]] = collections.defaultdict(
    lambda: collections.defaultdict(list)
  )
  for path in paths:
    content = read_object(path)
    for row in content.get('rows', ()):
      if row.get('epsilon', EPSILON) == EPSILON and not (
        'head' in row and row.get('importance', 1) <= EPSILON
      ):
        kind = next(
          (x for key in ('kind', 'change') if isinstance(x := row.get(key), str)), ''
        ).replace(' ', '_')
        leads = {
          f'{name[:-6]}_lead': value - row[f'{name[:-6]}_others']
          for name, value in row.items()
          if name.endswith('_first')
        }
        for name, value in (row | leads).items():
          if isinstance(value, (int, float)):
            found[row['model']]['_'.join(filter(None, (content['analysis'], kind, name)))].append(
              value
            )
  return pd.DataFrame(
    [
      {'trial': model, 'seed': 0, 'status': 'done', 'valid': ''}
      | {
        key: value
        for name, of in numbers.items()
        for key, value in ((name, sum(of) / len(of)), (f'{name}_range', max(of) - min(of)))
      }
      for model, numbers in found.items()
    ]
  )
