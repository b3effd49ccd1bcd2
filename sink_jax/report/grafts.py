"""The section of the results page about grafts: an open model with another attention."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from sink_jax.io.terminal import escaped, markdown_table
from sink_jax.report import compare, figures
from sink_jax.report.markdown import bullets, picture
from sink_jax.report.runs import Runs

_DIGITS = {
  'sink_1': 1,
  'sink_star': 1,
  'valid_loss': 3,
  'max_over_median': 0,
  'value_ratio': 2,
}
# {trial: {metric: 'its first to its last value', and 'n'}} of valid runs, means over them.
Courses = Mapping[str, Mapping[str, str]]


def courses_of(runs: Runs, grafts: pd.DataFrame) -> Courses:
  """The courses of all trials. grafts: rows of `runs.table`."""
  valid = grafts[grafts.valid == '']
  of_model = runs.metrics[runs.metrics.block.isna()]
  measured: pd.DataFrame = of_model[of_model.run.isin(valid.run)]
  by_run = measured.sort_values('step').groupby(['trial', 'metric', 'run'])
  ends = by_run.value.agg(['first', 'last'])
  means = ends.groupby(['trial', 'metric']).mean()
  courses = {}
  for trial in sorted(set(measured.trial)):
    course = {'n': str(valid.seed[valid.trial == trial].nunique())}
    for metric, digits in _DIGITS.items():
      if (trial, metric) in means.index:
        first, last = means.loc[trial, metric][['first', 'last']]
        course[metric] = f'{first:,.{digits}f} to {last:,.{digits}f}'
    courses[trial] = course
  return courses


def draw(runs: Runs, grafts: pd.DataFrame, courses: Courses) -> Figure | None:
  """Training after grafts; None without a graft."""
  if not len(grafts):
    return None
  trials = sorted(set(grafts.trial))[: len(figures.LINES)]  # one colour each; the table has all
  ends = sorted(
    (float(course['sink_1'].split()[-1]), trial)
    for trial, course in courses.items()
    if trial in trials and 'sink_1' in course
  )
  extremes = dict.fromkeys(ends[:1] + ends[-1:])
  words = ' to '.join(f'{rate:.0f} % ({trial})' for rate, trial in extremes)
  title = f'After training Sink_1 is {words}' if words else 'Sink_1 after a graft'
  metrics = [metric for metric in _DIGITS if metric != 'sink_star']
  return figures.curves(runs, grafts, trials, metrics, title=title)


def section(grafts: pd.DataFrame, courses: Courses, pictures: Mapping[str, str]) -> str:
  """How every graft began and ended, and how it differs from the unchanged model."""
  if not courses:
    return ''
  words = (
    'SmolLM2-135M-Instruct is given another attention and trained on (`configs/graft.py`); '
    '`continued` is the control, the model as it is, trained on for as long.'
  )
  if 'random-continued' in courses:
    words += ' In `random-*` all sequences of training and validation begin with a random token.'
  words += (
    " Sink\\_1 is measured on the run's own probe sequences, before the first step and after "
    'the last:'
  )
  shown = 'Dotted: Sink\\_\\* of the extra key. The table has all trials.'
  return '\n\n'.join(
    [
      '## Grafts',
      words,
      _table(courses),
      *_differences(grafts),
      picture('Sink\\_1 after a graft', pictures['grafts'], shown),
    ]
  )


def _table(courses: Courses) -> str:
  head = ['trial', 'Sink_1 %', 'Sink_* %', 'validation loss']
  head += ['largest activation, times the median', 'least value norm ratio', 'n']
  rows = []
  for trial, course in courses.items():
    cells = [course.get(metric, '-') for metric in (*_DIGITS, 'n')]
    rows.append([escaped(trial), *cells])
  return markdown_table(head, rows)


def _differences(grafts: pd.DataFrame) -> list[str]:
  """Every trial against the control: a sentence and a list, or nothing without enough seeds."""
  lines = []
  for row in compare.against(grafts, 'continued').itertuples():
    measure = compare.MEASURES[row.metric]
    if row.n >= compare.LEAST:
      difference = f'{escaped(measure.heading)} {compare.written(row, measure)}'
      lines.append(f'{escaped(row.trial)}: {difference} ({row.verdict})')
  if not lines:
    return []
  words = (
    'Differences from `continued` after training, with the same order of the data (99 % intervals):'
  )
  return [words, bullets(lines)]
