"""What the paper reports (numbers.json), and our runs next to it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from sink_jax.evaluate import EPSILON

SINK = 10  # percent of heads, from which there is a sink
LENGTH = 64  # tokens of the inputs of open models
_CONTENT = json.loads((resources.files('sink_jax.report') / 'numbers.json').read_text('utf-8'))
TABLES: list[dict[str, Any]] = _CONTENT['tables'] + _CONTENT['text']  # and numbers of the running text
FIGURES: list[dict[str, Any]] = _CONTENT['figures']


def name_of(item: Mapping[str, Any]) -> str:
  """'Table 10 (left)', 'StreamingLLM, Figure 12'; the title of numbers of the text."""
  kind = 'Figure' if 'caption' in item else 'Table'
  half, other = f' ({item["half"]})' * bool(item['half']), f'{item.get("paper")}, ' * bool(item.get('paper'))
  return f'{other}{kind} {item["number"]}{half}' if item['number'] else item['title']


@functools.cache
def numbers() -> pd.DataFrame:
  """One row a number: table, name, setting, trial, metric, value (NaN: none, or a range), text, note."""
  rows = [{'table': item['key'], 'name': name_of(item), 'setting': row['setting'], 'trial': row['trial'],
           'metric': metric, 'value': value, 'text': _text(metric, value) if value is not None else
           'training failure' if row.get('failed') else '-', 'note': row.get('note', '')}
          for item in TABLES for row in item['rows'] for metric in item['metrics']
          for value in [row['values'].get(metric)]]
  table = pd.DataFrame(rows)
  return table.assign(value=[math.nan if value is None or isinstance(value, list) else float(value)
                             for value in table.value])


def _text(metric: str, value: float | list) -> str:
  """'18.18', 'yes', '1,000 to 2,000', 'below 4,000'."""
  if isinstance(value, list):
    low, high = (end if end is None else _text(metric, end) for end in value)
    return f'below {high}' if low is None else f'above {low}' if high is None else f'{low} to {high}'
  return str({True: 'yes', False: 'no'}[value]) if isinstance(value, bool) else (
      f'{value:,.0f}' if metric.endswith('_step') else f'{value:.2f}')


def number(trial: str, metric: str) -> str:
  """The first number that a table has of a trial; '' where there is none."""
  return next((_text(metric, row['values'][metric]) for item in TABLES for row in item['rows']
               if row['trial'] == trial and row['values'].get(metric) is not None), '')


def table_number(table: str, setting: str, metric: str) -> float | None:
  """One number of a table, by its key ('table-1-left'); None where the paper gives none."""
  return next((row['values'].get(metric) for item in TABLES if item['key'] == table
               for row in item['rows'] if row['setting'] == setting), None)


def same_bos(description: Mapping[str, Any]) -> bool:
  """Whether inputs begin as the paper's: text as the tokenizer has it, others without BOS."""
  return description['bos']['protocol'] == ('tokenizer' if description['kind'] == 'natural' else 'none')


def comparable(length: int, epsilon: float) -> bool:
  """Whether rates of these inputs can be compared with the paper's, of other text."""
  return length == LENGTH and epsilon == EPSILON


def beside(table: pd.DataFrame) -> pd.DataFrame:
  """`numbers` of trained models next to ours: mean, least, largest, n of valid finished runs, and invalid.

  table: of `runs.table`, of one task and budget. invalid: how many finished runs are not in the mean, as
  dead ones; what converges is counted over diverged runs, too.
  """
  known = numbers().dropna(subset='trial').reset_index(drop=True)
  finished, rows = table[table.status.isin(['done', 'diverged'])], []
  for trial, metric in zip(known.trial, known.metric):
    runs = finished[finished.trial == trial]
    valid = runs[(runs.valid == '') | (metric == 'converges')]
    values = (valid[metric] if metric in valid else pd.Series(dtype=float)).dropna()
    rows.append((values.mean(), values.min(), values.max(), len(values), len(runs) - len(valid)))
  return known.join(pd.DataFrame(rows, columns=['mean', 'least', 'largest', 'n', 'invalid']))


def agreement(both: pd.DataFrame) -> tuple[pd.DataFrame, float, int]:
  """Sink_1 of every trial that both have (rows of `beside`: value is the paper's, mean ours).

  Returns:
    These rows, Spearman's rank correlation, and how many trials lie on the same side of 10 %.
  """
  dots = both[(both.metric == 'sink_1') & both.value.notna() & (both.n > 0)].drop_duplicates('trial')
  same = (dots['value'] >= SINK) == (dots['mean'] >= SINK)
  return dots, float(dots['value'].corr(dots['mean'], method='spearman')), int(same.sum())


def coverage(table: pd.DataFrame, analysed: Mapping[str, Collection[str]]) -> pd.DataFrame:
  """Every table and figure of the paper: key, name, title, command, and where it was run.

  Args:
    table: of `runs.table`, of all tasks.
    analysed: names of the models that an analysis measured, by its name.
  """
  rows, done = [], table[table.status.isin(['done', 'diverged'])]
  for item in TABLES + FIGURES:
    trials = [*dict.fromkeys(item.get('trials') or [row['trial'] for row in item.get('rows', ())])]
    command = run = ''
    if analysis := item.get('analysis'):
      names = item.get('models', [row['setting'] for row in item.get('rows', ())] or ['Pythia-14M', 'GPT2'])
      command = f'analyses {analysis}' + f' --checkpoint="{",".join(names)}"' * bool(names) + item.get('options', '')
      measured = analysed.get(analysis, ())
      ours = [name for name in measured if name in names or not names]
      run = ', '.join(ours) or 'other models: ' * bool(measured) + ', '.join(measured)
    elif item['needs'] in ('training', 'fine-tuning'):
      tuned = item['needs'] == 'fine-tuning'
      command = 'sweep --config=configs/' + ('sft.py' if tuned else f'paper.py --only={",".join(trials)}')
      runs = done[done.task == 'sft'] if tuned else done[(done.task == 'paper') & done.trial.isin(trials)]
      of = f'{len(runs)} runs' if tuned else f'{runs.trial.nunique()} of {len(trials)} trials, {len(runs)} runs'
      run = f'{", ".join(runs.budget.dropna().unique())}: {of}' if len(runs) else ''
    elif item.get('kind') == 'mask':
      run = 'drawn'
    rows.append({'key': item['key'], 'name': name_of(item), 'title': item.get('title') or item['caption'],
                 'command': command and f'python -m sink_jax {command}', 'run': run or 'not run'})
  return pd.DataFrame(rows)


def open_models(folder: Path) -> pd.DataFrame:
  """Numbers of published models, a row each like those of `runs.table`, of files of `sink_jax analyses`.

  Columns: ANALYSIS_[KIND_]COLUMN, the mean over the rows of a model; ..._range, the largest minus the least;
  of X_first and X_others also X_lead. At epsilon 0.3, and of heads those with a sink.
  """
  found = [pd.DataFrame()]
  for path in sorted(folder.glob('*.json')):
    content = json.loads(path.read_text('utf-8'))
    rows = pd.DataFrame(content.get('rows', ()))
    if 'model' in rows:
      rows = rows[rows.epsilon == EPSILON] if 'epsilon' in rows else rows
      rows = rows[rows.importance > EPSILON] if 'head' in rows else rows
      leads = {f'{name[:-6]}_lead': rows[name] - rows[f'{name[:-6]}_others'] for name in rows
               if name.endswith('_first')}
      rows = rows.assign(kind=rows.get('kind', rows.get('change', '')), **leads)
      by = rows.groupby(['model', 'kind'])[rows.select_dtypes('number').columns]
      wide = pd.concat([by.mean(), (by.max() - by.min()).add_suffix('_range')], axis=1).unstack()
      wide.columns = ['_'.join(filter(None, (content['analysis'], kind.replace(' ', '_'), name)))
                      for name, kind in wide.columns]
      found.append(wide)
  table = pd.concat(found).groupby(level=0).first() if len(found) > 1 else pd.DataFrame()
  return table.rename_axis('trial').reset_index().assign(seed=0, status='done', valid='')
