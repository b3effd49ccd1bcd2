"""The page about remedies: every variant of a task against softmax of the same seed."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from sink_jax.io.terminal import escaped, markdown_table
from sink_jax.report import compare, figures
from sink_jax.report.compare import MEASURES
from sink_jax.report.markdown import bullets, details, joined, picture
from sink_jax.report.runs import EMERGED

TASKS = {'lm': 'Text', 'bigram': 'Bigram-Backcopy', 'trigger': 'Trigger averaging'}
_LOWERING = 'removed', 'moved to the extra key', 'lower'
_MANY = 12  # remedies, which a sentence counts and does not name
_GU, _QIU = 'Gu et al., 2410.10781', 'Qiu et al., 2505.06708'
_KAUL = 'Kaul et al., 2410.17174'
_MOE, _SMALL = '15B MoE, 1.7B', 'GPT-2, Llama-2'
_REPORTS = [  # remedies, their paper, its models, and what it reports
  (
    'k-bias, kv-bias, sink-token, sigmoid',
    _GU,
    '60M',
    'Sink\\_1 18.18 % becomes 0.0, 0.04, 0.0 and 0.44 % (Tables 4 and 6)',
  ),
  ('v-bias, sigmoid-normalized', _GU, '60M', 'Sink\\_1 17.53 and 30.24 %: it stays'),
  (
    'head-gate',
    _QIU,
    _MOE,
    'mean attention to the first token 0.467 becomes 0.073, largest activation 1053 becomes 98 '
    '(Table 4)',
  ),
  ('element-gate', _QIU, _MOE, '0.467 becomes 0.048, 1053 becomes 94 (Table 4)'),
  ('softpick', 'Zuhri et al., 2504.20966', '340M, 1.8B', 'a sink rate of 0 %'),
  (
    'zero-sink',
    _KAUL,
    _SMALL,
    'softmax-1 reduces the attention to the first token; outliers need OrthoAdam as well (Table 2)',
  ),
  (
    'zero-sink-orthoadam',
    _KAUL,
    _SMALL,
    'attention to the first token 65 % becomes 3.3 %, kurtosis 1657 becomes 3.1',
  ),
  ('ssnorm-muon', 'Park et al., 2506.19697', '1.4B', 'excess kurtosis 1818.56 becomes 0.04'),
]


class Task(NamedTuple):
  """A task on which remedies are compared with softmax.

  rows: of `compare.against`; softmax: its valid runs, rows of `runs.table`; heads: of the smallest
  model.
  """

  key: str
  title: str
  rows: pd.DataFrame
  softmax: pd.DataFrame
  heads: float

  @property
  def verdicts(self) -> Mapping[str, list[str]]:
    """{verdict on Sink_1: the remedies that have it}."""
    of_sinks = self.rows[self.rows.metric == 'sink_1']
    return of_sinks.groupby('verdict').trial.apply(sorted).to_dict()

  @property
  def acting(self) -> str:
    """How many remedies lower Sink_1, in words."""
    acts = sum(len(self.verdicts.get(verdict, ())) for verdict in _LOWERING)
    return f'{self.title}: {acts} of {self.rows.trial.nunique()} remedies lower Sink_1'

  @property
  def rate(self) -> str:
    """Sink_1 of softmax in words."""
    return f'{self.softmax.sink_1.mean():.0f} %, n = {self.softmax.sink_1.count()}'


def tasks_of(full: pd.DataFrame) -> list[Task]:
  """The tasks with a comparison. full: rows of `runs.table`, of all tasks."""
  tasks = []
  for key, title in TASKS.items():
    runs = full[full.task.eq(key)]
    runs = runs.assign(trial=runs.trial.str.replace(rf'^{key}-', '', regex=True))
    rows = compare.against(runs, 'softmax')
    if len(rows):
      softmax = runs[runs.trial.eq('softmax') & runs.valid.eq('')]
      tasks.append(Task(key, title, rows, softmax, runs.heads.min()))
  return tasks


def draw(task: Task) -> Figure:
  """Sink_1 and the loss of every remedy, as differences from softmax."""
  measures = {metric: MEASURES[metric] for metric in ('sink_1', 'valid_loss')}
  title = f'{task.acting}\n(difference from softmax by seed, 99 %)'
  return figures.forest(task.rows, title, measures)


def page(tasks: Sequence[Task], pictures: Mapping[str, str]) -> str:
  """The page in Markdown. pictures: {'remedies-' + key: name of the file}."""
  return joined(
    [
      '# Remedies against attention sinks',
      _method(),
      _words(),
      bullets(map(_summary, tasks)),
      'These models have one block of four heads. With one head (the quickstart, and '
      '`synthetic-*` on the results page) softmax and sigmoid both have a sink on '
      'Bigram-Backcopy.',
      f'Seeds that agree do not speak for all seeds: {compare.excluded(3)}; '
      f'{compare.excluded(5)}. "No difference in n seeds" says only this.',
      *[_section(task, pictures[f'remedies-{task.key}']) for task in tasks],
      _papers(),
    ]
  )


def _method() -> str:
  margins = '; '.join(
    f'{escaped(measure.heading)}: {measure.margin}' + ' of the logarithm' * measure.ratio
    for measure in MEASURES.values()
  )
  return (
    'Every variant is compared with softmax of the same seed, data and number of steps: '
    'differences with 99 % t intervals. A difference needs three pairs, an interval that '
    f'excludes zero, a difference beyond the margin ({margins}) and p < {compare.ERROR} after '
    "Holm's correction for all remedies of a task. `configs/remedies.py` has what each remedy "
    'changes, docs/attention.md how its parts compute.'
  )


def _words() -> str:
  below = f'below {compare.NO_SINK} % in every seed'
  return (
    f'*Removed*: Sink\\_1 is lower, and {below}. *Moved to the extra key*: the same, and the '
    f'extra key has a Sink\\_\\* of {EMERGED} % or more. *Lower*: it is lower, but not {below}. '
    '*No difference*: two one-sided tests at 95 % put the mean within the margin; *in n seeds*: '
    'those that were run differ by less than the margin. *Open*: the seeds do not decide.'
  )


def _summary(task: Task) -> str:
  """How many heads softmax has, and the remedies of each verdict."""
  parts = []
  for verdict, names in task.verdicts.items():
    few = len(names) < _MANY
    parts.append(f'{verdict}: {escaped(", ".join(names)) if few else f"{len(names)} remedies"}')
  return (
    f'**{task.title}** (softmax: Sink\\_1 {task.rate}; one head is {100 / task.heads:.3g} '
    f'points): {"; ".join(parts)}.'
  )


def _section(task: Task, name: str) -> str:
  words = (
    'Blue: Sink\\_1 or the loss is lower; green: the sink moves to the extra key; orange: '
    'higher; grey: open or no difference; a cross: fewer than three pairs of seeds. Intervals '
    'are cut at the axes.'
  )
  return '\n\n'.join(
    [
      f'## {task.title}',
      picture(f'{task.title}: differences from softmax', name, words),
      details('Every number', _numbers(task.rows)),
    ]
  )


def _numbers(rows: pd.DataFrame) -> str:
  """A row for each remedy: differences of every measure, two with their verdicts."""
  head = ['remedy', 'Sink_1, points', 'verdict', 'loss, nats', 'verdict']
  head += ['value ratio, times', 'hidden ratio, times', 'Sink_* %', 'invalid']
  lines = []
  for trial, of_trial in rows.groupby('trial', sort=False):
    by_metric = {row.metric: row for row in of_trial.itertuples()}
    cells = [escaped(trial)]
    for metric, measure in MEASURES.items():
      row = by_metric.get(metric)
      cells.append(compare.written(row, measure) if row else '-')
      if metric in ('sink_1', 'valid_loss'):
        cells.append(row.verdict if row else '-')
    first = of_trial.iloc[0]
    star = '-' if math.isnan(first.star) else f'{first.star:.1f}'
    lines.append([*cells, star, escaped(first.invalid or '-')])
  return markdown_table(head, lines, left=(0, 2, 4, 8))


def _papers() -> str:
  """The numbers of other papers, next to which ours stand."""
  return '\n\n'.join(
    [
      '## What the papers of the remedies report',
      'The models of these papers are a thousand to a million times as large as ours: agreement '
      'suggests the same mechanism, disagreement says little.',
      markdown_table(['remedy', 'paper', 'models', 'reports'], _REPORTS, left=range(4)),
    ]
  )
