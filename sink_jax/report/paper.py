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
from sink_jax.report.markdown import plural
from sink_jax.report.runs import EMERGED
from sink_jax.train.workdir import read_object

_CONTENT = json.loads((resources.files('sink_jax.report') / 'numbers.json').read_text('utf-8'))
# Tables, and numbers of the running text.
TABLES: list[dict[str, Any]] = _CONTENT['tables'] + _CONTENT['text']
FIGURES: list[dict[str, Any]] = _CONTENT['figures']


def name_of(item: Mapping[str, Any]) -> str:
  """'Table 10 (left)', 'StreamingLLM, Figure 12'; the title of numbers of the text."""
  kind = 'Figure' if 'caption' in item else 'Table'
  if not item['number']:
    return item['title']
  half = f' ({item["half"]})' if item['half'] else ''
  other = f'{item["paper"]}, ' if item.get('paper') else ''
  return f'{other}{kind} {item["number"]}{half}'


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
  numbers = [(item, row) for item in TABLES for row in item['rows'] if row['trial']]
  for item, row in numbers:
    runs = [run for run in finished if run['trial'] == row['trial']]
    for metric in item['metrics']:
      value = row['values'].get(metric)
      is_proxy = row.get('proxy', False) and metric.startswith('sink')
      text = _text(metric, value) + '*' * is_proxy
      valid = [run for run in runs if not run['valid'] or metric == 'converges']
      ours = _by_seed(valid, metric)
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


def _by_seed(runs: list[dict[str, Any]], metric: str) -> pd.Series:
  """The known values of a metric by seed, means of runs that share one."""
  known = [(run['seed'], run.get(metric)) for run in runs]
  values = pd.DataFrame(known, columns=['seed', 'value'])
  if metric.endswith('_step'):  # infinite if no sink emerges
    most = max((run.get('steps', 0) for run in runs), default=0)
    values = values.assign(value=values.value.clip(upper=most))
  by_seed = values.dropna().astype(float).groupby('seed')
  return pd.Series(by_seed.value.mean())


def agreement(both: pd.DataFrame) -> tuple[pd.DataFrame, float, int]:
  """Sink_1 of every trial that both have (rows of `beside`: value is the paper's, mean ours).

  Returns:
    These rows, Spearman's rank correlation, and how many trials lie on the same side of 10 %.
  """
  dots = both.query('metric == "sink_1" and n > 0').dropna(subset='value').drop_duplicates('trial')
  theirs, ours = dots['value'], dots['mean']
  same = int(np.count_nonzero((theirs >= EMERGED) == (ours >= EMERGED)))
  rank, _ = np.asarray(stats.spearmanr(theirs, ours))
  return dots, float(rank), same


def coverage(table: pd.DataFrame, analysed: Mapping[str, Collection[str]]) -> pd.DataFrame:
  """Every table and figure of the paper: key, name, title, command, and where it was run.

  Args:
    table: of `runs.table`, of all tasks.
    analysed: names of the models that an analysis measured, by its name.
  """
  rows = []
  for item in TABLES + FIGURES:
    settings = item.get('rows', ())
    trials = [*dict.fromkeys(item.get('trials') or [row['trial'] for row in settings])]
    command, where, title = '', '', item.get('title') or item['caption']
    if 'analysis' in item:
      models = item.get('models', [row['setting'] for row in settings] or ['Pythia-14M', 'GPT2'])
      command = _analysis_command(item, models)
      where = _analysed(models, analysed.get(item['analysis'], ()))
    elif item['needs'] in ('training', 'fine-tuning'):
      task, folder = ('paper', 'desk') if item['needs'] == 'training' else ('sft', 'sft/paper')
      command = f'sweep --config=configs/{task}.py --budget=desk --seeds=1,2,3'
      command += f' --workdir=runs/{folder}' + f' --only={",".join(trials)}' * bool(trials)
      where = _trained(table, task, trials)
    if item['needs'] == 'fine-tuning':
      title = title.removesuffix('.') + ', after the trainings in docs/experiments.md.'
    rows.append(
      {
        'key': item['key'],
        'name': name_of(item),
        'title': title,
        'command': command and f'python -m sink_jax {command}',
        'run': where or ('nothing to run' if item['needs'] == 'nothing' else 'not run'),
      }
    )
  return pd.DataFrame(rows)


def _analysis_command(item: Mapping[str, Any], models: Sequence[str]) -> str:
  """The command that makes a table or a figure of published models."""
  checkpoints = f' --checkpoint="{",".join(models)}"' if models else ''
  return f'analyses {item["analysis"]}{checkpoints}{item.get("options", "")} --out=analyses'


def _analysed(models: Sequence[str], measured: Collection[str]) -> str:
  """Which of the models an analysis has measured; models: [] for any; '' if it has not run."""
  asked = [name for name in measured if name in models or not models]
  if asked or not measured:
    return ', '.join(asked)
  return f'not run; the same of {", ".join(measured)}'


def _trained(table: pd.DataFrame, task: str, trials: list[str]) -> str:
  """How many of the trials were trained, by budget; trials: [] for all of the task."""
  runs = [
    run
    for run in _finished(table)
    if run['task'] == task and (run['trial'] in trials or not trials)
  ]
  absent = table.loc[table.status.eq('not expressible') & table.trial.isin(trials)]
  return _counts(runs, trials, absent)


def _counts(runs: list[dict[str, Any]], trials: list[str], absent: pd.DataFrame) -> str:
  """'desk: 3 of 4 trials, 9 runs (the budget has no x)'; trials: of the item, or none for all."""
  parts = []
  for budget in sorted({run['budget'] for run in runs}):
    of_budget = [run for run in runs if run['budget'] == budget]
    ours = {run['trial'] for run in of_budget}
    words = f'{budget}: {len(ours)} of {len(trials) or len(ours)} trials'
    words += f', {plural(len(of_budget), "run")}'
    if lacks := sorted(set(absent.trial[absent.budget == budget])):
      words += f' (the budget has no {", ".join(lacks)})'
    parts.append(words)
  return '; '.join(parts)


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
      without_sink = 'head' in row and row.get('importance', 1) <= EPSILON
      if without_sink or row.get('epsilon', EPSILON) != EPSILON:
        continue
      kinds = (row.get(key) for key in ('kind', 'change'))
      kind = next((kind for kind in kinds if isinstance(kind, str)), '').replace(' ', '_')
      leads = {
        f'{name[:-6]}_lead': value - row[f'{name[:-6]}_others']
        for name, value in row.items()
        if name.endswith('_first')
      }
      for name, value in (row | leads).items():
        if isinstance(value, (int, float)):
          key = '_'.join(filter(None, (content['analysis'], kind, name)))
          found[row['model']][key].append(value)
  return pd.DataFrame([_model_row(model, numbers) for model, numbers in found.items()])


def _model_row(model: str, numbers: Mapping[str, list[float]]) -> dict[str, Any]:
  row = {'trial': model, 'seed': 0, 'status': 'done', 'valid': ''}
  for name, values in numbers.items():
    row[name] = sum(values) / len(values)
    row[f'{name}_range'] = max(values) - min(values)
  return row
