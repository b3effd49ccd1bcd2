"""Sections of the results page: functions that take tables of runs and return Markdown."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import collections
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sink_jax.io.terminal import code, escaped, markdown_table, short
from sink_jax.report import compare, events, paper
from sink_jax.report.claims import Claim, Judgement, Verdict
from sink_jax.report.conditions import metric_name
from sink_jax.report.markdown import bullets, details, picture, plural, spread, value
from sink_jax.report.remedies import Task
from sink_jax.report.runs import EMERGED

Judged = Sequence[tuple[Claim, Judgement]]
Agreement = tuple[pd.DataFrame, float, int]  # of `paper.agreement`
Pictures = Mapping[str, str]  # {key: name of the file}
HEADLINE = {
  'default': 'softmax',
  'sigmoid-normalized': 'normalised sigmoid',
  'sigmoid': 'sigmoid',
  'k-bias': 'softmax with a K bias',
}
_FEW = 2  # numbers that a cell shows; more are behind a click


def first_screen(
  shown: pd.DataFrame,
  judged: Judged,
  agreement: Agreement,
  pictures: Pictures,
) -> str:
  """The first screen: how the sink emerges, what reproduces, and every headline claim.

  shown: rows of `runs.table`, of one budget.
  """
  headline = [(claim, judgement) for claim, judgement in judged if claim.headline]
  parts = []
  if 'dynamics' in pictures:
    words = (
      'Thin lines are seeds, thick lines means of those that are not invalid, dotted lines '
      'Sink\\_\\* of the bias. Grey dashed lines that end in a cross are invalid.'
    )
    parts.append(picture('Sink\\_1 against training steps', pictures['dynamics'], words))
  if len(shown):
    parts += verdict_sentences(shown, headline)
  parts.append(runs_sentence(shown))
  if 'scatter' in pictures:
    words = _agreement_words(agreement)
    parts.append(picture("The paper's Sink\\_1 and ours", pictures['scatter'], words))
  parts += ['## Headline claims', claims_table(headline)]
  return '\n\n'.join(parts)


def _agreement_words(agreement: Agreement) -> str:
  dots, rank, same = agreement
  words = (
    f'A dot for each of {len(dots)} experiments of the paper; orange dots lie on another side of '
    f'{EMERGED} % than in the paper, and {same} on the same.'
  )
  if not np.isnan(rank):
    words += f' The rank correlation is {rank:.2f}.'
  return words


def verdict_sentences(shown: pd.DataFrame, headline: Judged) -> list[str]:
  """Three sentences: what is reproduced, what is not, and what is open or cannot be tested."""

  def keys(verdict: Verdict) -> list[str]:
    return [claim.key for claim, judgement in headline if judgement.verdict == verdict]

  def named(verdict: Verdict) -> str:
    return '; '.join(key.replace('-', ' ') for key in keys(verdict)) or 'none'

  refuted = named(Verdict.NOT_REPRODUCED)
  if 'no-sink-without-normalisation' in keys(Verdict.NOT_REPRODUCED):
    refuted += f' ({compared(shown, "default", "sigmoid")})'
  return [
    f"**Reproduced**, of the {len(headline)} headline claims ('it' is the sink): "
    f'{named(Verdict.REPRODUCED)}.',
    f'**Not reproduced:** {refuted}.',
    f'**Open:** {named(Verdict.OPEN)}. **Not testable here:** {named(Verdict.NOT_TESTABLE)}.',
  ]


def compared(shown: pd.DataFrame, *trials: str) -> str:
  """Quantities of trials next to each other, means of their valid seeds."""
  good = shown[shown.valid.eq('') & shown.trial.isin(trials)]
  means = good.groupby('trial')[['largest_importance', 'value_ratio', 'raw_mass_1']].mean()
  words = {
    'largest_importance': 'largest importance',
    'value_ratio': 'least value norm ratio',
    'raw_mass_1': 'mean weight of the first token',
  }
  named = lambda metric: ' and '.join(
    f'{means.loc[trial, metric]:.2f} with {HEADLINE[trial]}' for trial in trials
  )
  return '; '.join(f'{word} {named(metric)}' for metric, word in words.items())


def runs_sentence(shown: pd.DataFrame) -> str:
  """How many runs there are, of what, and how many of them are no evidence."""
  mine = shown[shown.status == 'done']
  if mine.empty:
    return "**Run:** nothing yet. The tables have the paper's numbers only."
  seeds = mine.groupby('trial').seed.nunique()
  bad = mine.valid[mine.valid != ''].value_counts()
  span = f'{seeds.min()} to {seeds.max()}' if seeds.max() > seeds.min() else f'{seeds.max()}'
  trials = mine.trial.nunique()
  words = (
    f'{len(mine)} runs of {plural(trials, "experiment")} of the paper at the budget '
    f'"{escaped(mine.budget.iloc[0])}": {short(mine.tokens.median())} tokens, '
    f'{mine.heads.median():.0f} heads in all blocks together, {span} seeds each '
    '(the paper: 60M parameters, 21B tokens, one seed).'
  )
  if mine[mine.trial == 'default'].settings.str.contains('FixedToken').any():
    words += (
      ' A fixed token begins every sequence, unless a trial edits the tokens, so '
      '`fixed-1` has the settings of `default`.'
    )
  if len(bad):
    counts = ', '.join(f'{n} {escaped(why)}' for why, n in bad.items())
    words += f' Invalid and crossed out: {counts}.'
  return words


def claims_table(judged: Judged) -> str:
  """Sentence, our numbers, the paper's, seeds, verdict; long lists of trials behind a click."""
  rows = []
  for claim, judgement in judged:
    why = ''
    if judgement.why and judgement.verdict in (Verdict.OPEN, Verdict.NOT_TESTABLE):
      why = f': {escaped(judgement.why.split("; ")[0])}'
    rows.append(
      [
        escaped(claim.sentence),
        _folded(judgement.measured),
        _folded(judgement.paper),
        judgement.n or '-',
        f'**{judgement.verdict}**{why}',
      ]
    )
  return markdown_table(['claim', 'ours', 'the paper', 'n', 'verdict'], rows, left=(0, 1, 2, 4))


def _folded(text: str) -> str:
  """Numbers of trials as a cell, those after the first few behind a click."""
  if not text:
    return '-'
  if text.count(', ') + text.count('; ') < _FEW:
    return escaped(text)
  title = escaped(text.split(', ')[0])
  return f'<details><summary>{title} ...</summary>{escaped(text)}</details>'


def how_to_read(shown: pd.DataFrame) -> str:
  """The needs of a verdict, the meaning of parentheses, and links to the parts of the page."""
  words = [
    'A verdict needs at least three seeds that are not invalid, and a 99 % interval of their mean '
    'that excludes the threshold; an equality needs two one-sided tests at 95 % instead. '
    'Parentheses in the table of claims hold this interval; elsewhere they hold the least and the '
    'largest seed.'
  ]
  if shown.heads.notna().any():
    points = 100 / shown.heads.median()
    words.append(
      f'A rate is a share of heads and sequences: one head in all sequences is {points:.3g} points.'
    )
  words += [
    f'Seeds that agree do not speak for all: {compare.excluded(3)}.',
    '[All claims](#all-claims), [tables](#tables-of-the-paper), [figures](#figures), [what was '
    'run and what was not](reproduction.md).',
  ]
  return ' '.join(words)


def order_of_events(found: pd.DataFrame, pictures: Pictures) -> str:
  """Two sentences and a picture on what comes first, of `events.events`."""
  if found.empty:
    return ''
  sentences = [
    _order_sentence(found, trial) for trial in events.TRIALS if trial in set(found.trial)
  ]
  words = (
    'A dot is a seed: the first probe from which a quantity stays beyond its threshold. Filled: '
    'the threshold that was written down; hollow: half of the final change. At the right edge: '
    'never.'
  )
  drawn = picture('The step of each event, by seed', pictures['events'], words)
  return '\n\n'.join(['## Order of events', ' '.join(sentences), drawn])


def _order_sentence(found: pd.DataFrame, trial: str) -> str:
  of_trial = found[found.trial == trial]
  seeds, pairs = of_trial.seed.nunique(), events.ordered(found, trial)
  words = [
    f'{events.EVENTS[first].words} before {events.EVENTS[second].words}' for first, second in pairs
  ]
  written = of_trial[of_trial.threshold == events.THRESHOLDS[0]]
  never = [name for name in events.EVENTS if np.isinf(written.step[written.event == name]).all()]
  text = f'With {HEADLINE[trial]} (n = {seeds}), ' + (
    '; '.join(words) if words else 'no two events are ordered in every seed by both thresholds'
  )
  if never:
    text += '; never: ' + ', '.join(events.EVENTS[name].words for name in never)
  return f'{text}.'.replace('Sink_', 'Sink\\_')


def remedies(tasks: Sequence[Task], pictures: Pictures) -> str:
  """How many remedies act on each task, and a link to their page."""
  if not tasks:
    return ''
  title = f'{tasks[0].title}: differences from softmax'
  return '\n\n'.join(
    [
      '## Remedies',
      bullets(f'{escaped(task.acting)} (softmax {task.rate}).' for task in tasks),
      picture(title, pictures[f'remedies-{tasks[0].key}']),
      '[All remedies, tasks and numbers](remedies.md)',
    ]
  )


def fine_tuning(tuned: pd.DataFrame, pictures: Pictures) -> str:
  """Sigmoid against softmax in fine-tuning. tuned: rows of `runs.table`."""
  if 'figure-30' not in pictures:
    return ''
  measures = {'train_loss': compare.Measure('training loss, nats', 0.02)}
  lines = []
  for protocol, of_protocol in tuned.groupby('protocol'):
    tokens = 'all tokens' if protocol == 'paper' else escaped(protocol)
    for row in compare.against(of_protocol, 'sft-softmax', measures).itertuples():
      if row.trial == 'sft-sigmoid':
        left = f'; left out: {escaped(row.invalid)}' if row.invalid else ''
        lines.append(
          f'Sigmoid without normalisation against softmax, loss of {tokens}: training loss '
          f'{compare.written(row, measures["train_loss"])} ({row.verdict}{left}).'
        )
  lines.append(
    '`sft-unstable` is a positive control with 1,000 times the learning rate. Models this small '
    "do not test the paper's sentence on 1B models."
  )
  drawn = picture('Training loss and gradient norm', pictures['figure-30'])
  return '\n\n'.join(['## Fine-tuning (Figure 30)', '\n'.join(lines), drawn])


def tables_of_the_paper(beside: pd.DataFrame) -> str:
  """Each table of the paper with a run of ours. beside: of `paper.beside`."""
  words = (
    "Ours: the mean of seeds that are not invalid (least to largest). Settings have the paper's "
    'names; the budget (docs/experiments.md) scales ours, so that "5B unique tokens" are fewer '
    'here. Losses are of other texts and cannot be compared. \\*: measured on the weights divided '
    'by their row sums, as ours are for these operations.'
  )
  parts = ['## Tables of the paper', words]
  for item in paper.TABLES:
    rows = beside[beside.table == item['key']]
    if rows.n.any() or rows.invalid.any():
      name = f'{paper.name_of(item)}: ' if item['number'] else ''
      parts.append(details(name + item['title'], _table_beside(rows)))
  return '\n\n'.join(parts)


def _table_beside(rows: pd.DataFrame) -> str:
  lines = []
  for row in rows.itertuples():
    if row.n or row.invalid or not np.isnan(row.value):
      note = f' ({escaped(row.note)})' if row.note and row.metric == 'sink_1' else ''
      invalid = f', {row.invalid} invalid' if row.invalid else ''
      lines.append(
        [
          escaped(row.setting) + note,
          escaped(metric_name(row.metric)),
          escaped(row.text),
          _ours(row),
          f'{row.n or "-"}{invalid}',
        ]
      )
  return markdown_table(['', 'quantity', 'the paper', 'ours', 'n'], lines, left=(0, 1))


def _ours(row: Any) -> str:
  """'25.0 (20.0 to 30.0)', '100 % of runs', 'not at this budget'; row: of `paper.beside`."""
  if row.metric == 'converges' and row.n:
    return f'{100 * row.mean:.0f} % of runs'
  if not row.expressible:
    return 'not at this budget'
  digits = 3 if 'loss' in row.metric else 0 if 'step' in row.metric else 1
  words = value(row.mean, digits)
  if row.n > 1:
    words += f' ({value(row.least, digits)} to {value(row.largest, digits)})'
  return words


def figures_of_the_paper(pictures: Pictures) -> str:
  """Each figure of the paper that was drawn from runs."""
  parts = ['## Figures']
  for item in paper.FIGURES:
    if item['key'] in pictures and item['key'] != 'figure-30':
      name = paper.name_of(item)
      shown = [picture(name, pictures[item['key']]), item.get('ours', '')]
      parts.append(details(f'{name}: {item["caption"]}', '\n\n'.join(filter(None, shown))))
  return '\n\n'.join(parts)


def all_claims(judged: Judged) -> str:
  """Every claim by the sections of the paper: its criterion, our numbers, the verdict and why."""
  words = (
    'A criterion compares means over seeds: `A > B + 2` with a margin of 2, `A = B +- 0.1` within '
    "0.1. A reason that begins with 'needs' names a precondition that is not met. `massive` is "
    "the smaller of two ratios: the largest activation over 100 medians, and the first token's "
    'norm ratio over that before training; above 1, activations are massive.'
  )
  by_section = collections.defaultdict(list)
  for claim, judgement in judged:
    by_section[claim.section].append((claim, judgement))
  parts = ['## All claims', words]
  for section, of_section in sorted(by_section.items()):
    keys = ', '.join(claim.key for claim, _ in of_section)
    parts.append(details(f'Section {section}, claims: {keys}', _criteria(of_section)))
  return '\n\n'.join(parts)


def _criteria(judged: Judged) -> str:
  rows = [
    [
      escaped(claim.sentence),
      escaped(claim.criterion),
      escaped(judgement.measured or '-'),
      judgement.n or '-',
      judgement.verdict,
      escaped(judgement.why or '-'),
    ]
    for claim, judgement in judged
  ]
  head = ['claim', 'criterion', 'ours', 'n', 'verdict', 'why']
  return markdown_table(head, rows, left=(0, 1, 2, 4, 5))


def learning_rates(grid: pd.DataFrame) -> str:
  """How the rate of a budget was chosen. grid: rows of `runs.table` of the task 'grid'."""
  rates = pd.to_numeric(grid.trial.str.removeprefix('rate-'), errors='coerce')
  done = grid.assign(rate=rates)
  done = done[done.status.eq('done') & done.rate.notna()]
  if done.empty:
    return ''
  rows = [
    [f'{run.rate:g}', f'{run.valid_loss:.3f}', f'{run.sink_1:.1f}']
    for run in done.sort_values('rate').itertuples()
  ]
  best = done.loc[done.valid_loss.idxmin()]
  words = (
    'Before all other runs, by the least validation loss of softmax and nothing else: '
    f"{best.rate:g}, at the paper's product of rate, decay and updates, 0.8. One seed each."
  )
  head = ['rate', 'validation loss, nats', 'Sink_1 %']
  return '\n\n'.join(
    ['## How the learning rate was chosen', words, markdown_table(head, rows, left=())]
  )


def other_runs(others: pd.DataFrame) -> str:
  """Runs of tasks that no other section shows. others: rows of `runs.table`."""
  if others.empty:
    return ''
  titles = {
    'synthetic': 'The experiments on Bigram-Backcopy, with one head',
    '': 'Without a task',
  }
  parts = ['## Other runs']
  for task, of_task in others.groupby('task'):
    rows = []
    for trial, runs in of_task.groupby('trial'):
      good = runs[runs.valid == '']
      numbers = spread(good.sink_1), spread(good.sink_star), spread(good.valid_loss, 3)
      rows.append([escaped(trial or '-'), *numbers])
    numbers = markdown_table(['trial', 'Sink_1 %', 'Sink_* %', 'validation loss'], rows)
    parts.append(details(titles.get(task, html.escape(task)), numbers))
  return '\n\n'.join(parts)


def how_made(begun: pd.DataFrame, stored: bool) -> str:
  """Commands, code, hardware and dates of all runs that began, rows of `runs.table`.

  stored: whether the pages lie next to the table that they were made of.
  """
  parts = ['## How these pages were made']
  if stored:
    parts.append(
      '`python -m sink_jax report --runs=results --analyses=results/open_models --out=results` '
      'from [metrics.csv.gz](metrics.csv.gz) and [runs.csv.gz](runs.csv.gz), which '
      "`sj.read_runs('results')` reads."
    )
  head = ['task', 'runs', 'hours of steps', 'dates', 'commits; +: with changes', 'hardware']
  head.append('one of the commands')
  rows = [_made_row(*key, row) for key, row in _made(begun).iterrows()]
  made = markdown_table(head, rows, left=(0, 3, 4, 5, 6))
  return '\n\n'.join([*parts, details('Commands, code, hardware and dates', made)])


def _made(begun: pd.DataFrame) -> pd.DataFrame:
  """By task, budget and hardware: runs, hours, dates, commits and the shortest command."""
  known = begun[begun.code.notna()]
  seconds = known.tokens / known.tokens_per_second
  timed = known.assign(hours=seconds / 3600)
  groups = timed.groupby(['task', 'budget', 'hardware'], dropna=False)
  return groups.agg(
    runs=('run', 'size'),
    hours=('hours', 'sum'),
    first=('date', 'min'),
    last=('date', 'max'),
    code=('code', _commits),
    command=('command', lambda commands: min(commands.dropna(), key=len, default=None)),
  )


def _made_row(task: str, budget: str, hardware: str, row: pd.Series) -> list[object]:
  """The cells of a row of `_made`; what is unknown is NaN."""
  command = '-'
  if isinstance(row.command, str):
    command = code(row.command).replace('|', '\\|')
  return [
    f'{escaped(task)}, {escaped(budget)}' if budget else escaped(task),
    row.runs,
    f'{row.hours:.2f}' if row.hours else '-',
    f'{escaped(row["first"])} to {escaped(row["last"])}',
    escaped(row.code),
    escaped(hardware),
    command,
  ]


def _commits(codes: pd.Series) -> str:
  """The commits that made runs, eight digits of each, with a plus where files were changed."""
  words = (
    re.sub(r'commit ([0-9a-f]{8})[0-9a-f]*(, clean)?', r'\1', commit).replace('-dirty', '+')
    for commit in codes.dropna()
  )
  return ', '.join(dict.fromkeys(words))
