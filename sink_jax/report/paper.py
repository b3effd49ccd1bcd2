"""What the paper reports (numbers.json), and our runs next to it."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from sink_jax.evaluate import EPSILON

SINK = 10  # percent of heads, from which there is a sink
LENGTH = 64  # tokens of the inputs of open models
# The domains in the paper's order (Appendix B.2), by the names that the Pile itself uses.
PILE = ('Pile-CC', 'PubMed Central', 'ArXiv', 'Github', 'FreeLaw', 'StackExchange',
        'USPTO Backgrounds', 'PubMed Abstracts', 'Gutenberg (PG-19)', 'Wikipedia (en)',
        'DM Mathematics', 'Ubuntu IRC', 'EuroParl', 'HackerNews', 'PhilPapers', 'NIH ExPorter',
        'Enron Emails')
_CONTENT = json.loads((resources.files('sink_jax.report') / 'numbers.json').read_text('utf-8'))
TITLE: str = _CONTENT['paper']
TABLES: list[dict[str, Any]] = _CONTENT['tables'] + _CONTENT['text']  # numbers of the text have no number
FIGURES: list[dict[str, Any]] = _CONTENT['figures']
_OPTIONS = {'last_query': ' --sequences=256', 'domains':
            ' --source="Jsonl(path=\'pile.jsonl\', domain_field=\'meta.pile_set_name\')"'}


def name_of(item: Mapping[str, Any]) -> str:
  """'Table 10 (left)', 'StreamingLLM, Figure 12'; the title of numbers of the text."""
  if not item['number']:
    return item['title']
  kind = 'Figure' if 'caption' in item else 'Table'
  return (f'{item["paper"]}, ' if item.get('paper') else '') + f'{kind} {item["number"]}' + (
      f' ({item["half"]})' if item['half'] else '')


@functools.cache
def numbers() -> pd.DataFrame:
  """One row a number: table, name, setting, trial, metric, value (NaN: none, or a range), text, note."""
  rows = []
  for item in TABLES:
    for row in item['rows']:
      for metric in item['metrics']:
        value = row['values'].get(metric)
        text = ('training failure' if row.get('failed') else row.get('note') or '-') if value is None else (
            _text(metric, value) + ('*' if row.get('proxy') and metric.startswith('sink') else ''))
        rows.append({
            'table': item['key'], 'name': name_of(item), 'setting': row['setting'], 'trial': row['trial'],
            'metric': metric, 'value': float('nan') if isinstance(value, list) or value is None else
            float(value), 'text': text, 'note': row.get('note', '')})
  return pd.DataFrame(rows)


def _text(metric: str, value: float | list) -> str:
  """'18.18', 'yes', '1,000 to 2,000', 'below 4,000'."""
  if isinstance(value, bool):
    return 'yes' if value else 'no'
  if isinstance(value, list):
    low, high = (end if end is None else _text(metric, end) for end in value)
    return f'below {high}' if low is None else f'above {low}' if high is None else f'{low} to {high}'
  return f'{value:,.0f}' if metric.endswith('_step') else f'{value:.2f}'


def number(trial: str, metric: str) -> str:
  """The first number that a table has of a trial; '' where there is none."""
  known = numbers()
  known = known[(known.trial == trial) & (known.metric == metric) & known.value.notna()]
  return '' if known.empty else known.text.iloc[0]


def table_number(table: str, setting: str, metric: str) -> float | None:
  """One number of a table, by its key ('table-1-left'); None where the paper gives none."""
  known = numbers()
  known = known[(known.table == table) & (known.setting == setting) & (known.metric == metric)].value.dropna()
  return None if known.empty else float(known.iloc[0])


def same_bos(description: Mapping[str, Any]) -> bool:
  """Whether inputs begin as the paper's: text as the tokenizer has it, others without BOS."""
  return description['bos']['protocol'] == ('tokenizer' if description['kind'] == 'natural' else 'none')


def comparable(length: int, epsilon: float) -> bool:
  """Whether rates of these inputs can be compared with the paper's, of other text."""
  return length == LENGTH and epsilon == EPSILON


def beside(table: pd.DataFrame) -> pd.DataFrame:
  """The paper's numbers of trained models and ours.

  table: of `runs.table`, of one task. Adds mean, least, largest and n, over finished runs that are valid, and
  invalid: how many are not. A trial without a run has n = 0; `converges` counts diverged runs, too.
  """
  known = numbers()
  known = known[known.trial.notna()].reset_index(drop=True)
  rows = []
  for trial, metric in zip(known.trial, known.metric):
    runs = table[(table.trial == trial) & table.status.isin(['done', 'diverged'])]
    valid = (runs.valid == '') | (metric == 'converges')
    values = runs[valid][metric].dropna() if metric in runs else pd.Series(dtype=float)
    rows.append((values.mean(), values.min(), values.max(), len(values), int((~valid).sum())))
  return known.join(pd.DataFrame(rows, columns=['mean', 'least', 'largest', 'n', 'invalid']))


def agreement(both: pd.DataFrame) -> tuple[pd.DataFrame, float, int]:
  """Sink_1 of every trial that both have: trial, value (the paper's), mean (ours), n.

  Args:
    both: of `beside`.

  Returns:
    The trials, Spearman's rank correlation, and how many lie on the same side of 10 %.
  """
  dots = both[(both.metric == 'sink_1') & both.value.notna() & (both.n > 0)].drop_duplicates('trial')
  same = (dots.value >= SINK) == (dots['mean'] >= SINK)
  return dots, float(dots.value.corr(dots['mean'], method='spearman')), int(same.sum())


def coverage(table: pd.DataFrame, analysed: Mapping[str, Collection[str]]) -> pd.DataFrame:
  """Every table and figure of the paper: name, title, command, where it was run, key.

  Args:
    table: of `runs.table`, of all tasks.
    analysed: names of the models by analysis.
  """
  rows = []
  for item in TABLES + FIGURES:
    analysis, needs = item.get('analysis'), item['needs']
    trials = dict.fromkeys(item.get('trials') or [row['trial'] for row in item.get('rows', ()) if row['trial']])
    if analysis:
      models = item.get('models') or [row['setting'] for row in item.get('rows', ())] or ['Pythia-14M', 'GPT2']
      command = f'analyses {analysis} --checkpoint="{",".join(models)}"{_OPTIONS.get(analysis, "")}'
      run = ', '.join(analysed.get(analysis, ()))
    elif needs == 'fine-tuning':
      command, runs = 'sweep --config=configs/sft.py', table[(table.task == 'sft') & (table.status == 'done')]
      run = f'{len(runs)} runs' if len(runs) else ''
    elif trials:
      command = f'sweep --config=configs/paper.py --only={",".join(trials)}'
      done = table[(table.task == 'paper') & table.trial.isin(trials) & table.status.isin(['done', 'diverged'])]
      run = f'{done.budget.iloc[0]}: {done.trial.nunique()} of {len(trials)} trials, {len(done)} runs' if len(
          done) else ''
    else:
      command, run = '', 'drawn' if item.get('kind') == 'mask' else ''
    rows.append({'key': item['key'], 'name': name_of(item), 'title': item.get('title') or item['caption'],
                 'command': command and f'python -m sink_jax {command}', 'run': run or 'not run'})
  return pd.DataFrame(rows)


def open_models(folder: Path) -> pd.DataFrame:
  """What claims ask of published models: one row a model, of the files that `sink_jax analyses` wrote.

  Columns as of `runs.table` and sink_1_natural, _random, _repeat; domain_spread (largest minus least Sink_1);
  hidden_ratio (largest over blocks); key_ratio, value_ratio (medians over blocks); cosine_lead and
  norm_product_ratio (first key against the others, means over heads with a sink); swapped_sink_1 and _t.
  """
  found = [pd.DataFrame(index=pd.Index([], name='model'))]
  for path in sorted(folder.glob('*.json')):
    content = json.loads(path.read_text('utf-8'))
    rows = pd.DataFrame(content.get('rows', []))
    if not len(rows):
      continue
    rows = rows[rows.epsilon == EPSILON] if 'epsilon' in rows else rows
    by = rows.groupby('model')
    match content['analysis']:
      case 'kinds':
        found.append(rows.pivot_table('sink_1', 'model', 'kind').add_prefix('sink_1_'))
      case 'chat' | 'scale':
        found.append(by.sink_1.mean().to_frame('sink_1_natural'))
      case 'domains':
        found.append((by.sink_1.max() - by.sink_1.min()).to_frame('domain_spread'))
      case 'norms':
        of = lambda kind: rows[rows.kind == kind].groupby('model').ratio
        found.append(pd.DataFrame({'hidden_ratio': of('hidden states').max(), 'key_ratio': of(
            'keys').median(), 'value_ratio': of('values').median()}))
      case 'angles':
        mean = rows[rows.importance > EPSILON].groupby('model').mean(numeric_only=True)
        found.append(pd.DataFrame({'cosine_lead': mean.cosine_first - mean.cosine_others,
                                   'norm_product_ratio': mean.norm_product_first / mean.norm_product_others}))
      case 'positions':
        mean = rows[rows.change == 'swapped'].groupby('model')[['sink_1', 'sink_t']].mean()
        found.append(mean.add_prefix('swapped_'))
  table = pd.concat(found).groupby(level=0).first()
  return table.rename_axis('trial').reset_index().assign(seed=0, status='done', valid='')
