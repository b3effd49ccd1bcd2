"""Sections of the results page: functions that take tables of runs and return Markdown."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sink_jax.io.terminal import escaped, markdown_table, short
from sink_jax.report import events
from sink_jax.report.claims import Claim, Judgement, Verdict
from sink_jax.report.runs import EMERGED

Judged = Sequence[tuple[Claim, Judgement]]
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
  agreement: tuple[pd.DataFrame, float, int],
  pictures: Mapping[str, str],
) -> str:
  """What a reader sees first: how the sink emerges, what reproduces, and every headline claim.

  shown: rows of `runs.table`, of one budget. agreement: of `paper.agreement`.
  """
  headline = [(claim, judgement) for claim, judgement in judged if claim.headline]
  parts = [
    _picture(
      'dynamics',
      'Sink\\_1 against training steps',
      pictures,
      'Thin lines are seeds, thick lines means of those that are not invalid, dotted '
      'lines Sink\\_\\* of the bias. Grey dashed lines that end in a cross are invalid.',
    ),
    *(verdict_sentences(shown, headline) if len(shown) else ()),
    runs_sentence(shown),
  ]
  if 'scatter' in pictures:
    dots, rank, same = agreement
    words = (
      f'A dot for each of {len(dots)} experiments of the paper; orange dots lie on another side of '
    )
    words += f'{EMERGED} % than in the paper, and {same} on the same.'
    words += f' The rank correlation is {rank:.2f}.' if rank == rank else ''
    parts.append(_picture('scatter', "The paper's Sink\\_1 and ours", pictures, words))
  parts += ['## Headline claims', claims_table(headline)]
  return '\n\n'.join(part for part in parts if part)


def verdict_sentences(shown: pd.DataFrame, headline: Judged) -> list[str]:
  """Three sentences: what is reproduced, what is not, and what is open or cannot be tested."""

  def named(verdict: Verdict) -> str:
    keys = [claim.key for claim, judgement in headline if judgement.verdict == verdict]
    return '; '.join(key.replace('-', ' ') for key in keys) or 'none'

  refuted = named(Verdict.NOT_REPRODUCED)
  if 'no sink without normalisation' in refuted:
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
    f'{len(mine)} runs of {trials} experiment{"s" * (trials > 1)} of the paper at the budget '
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
    words += (
      ' Invalid and crossed out: '
      + ', '.join(f'{n} {escaped(why)}' for why, n in bad.items())
      + '.'
    )
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
        str(judgement.n or '-'),
        f'**{judgement.verdict}**{why}',
      ]
    )
  head = ['claim', 'ours', 'the paper', 'n', 'verdict']
  lines = [head, ['---', '---', '---', '---:', '---'], *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def order_of_events(found: pd.DataFrame, pictures: Mapping[str, str]) -> str:
  """Two sentences and a picture on what comes first, of `events.events`."""
  if found.empty:
    return ''
  sentences = [
    _order_sentence(found, trial) for trial in events.TRIALS if trial in set(found.trial)
  ]
  return '\n\n'.join(
    [
      '## Order of events',
      ' '.join(sentences),
      _picture(
        'events',
        'The step of each event, by seed',
        pictures,
        'A dot is a seed: the first probe from which a quantity stays beyond its threshold. '
        'Filled: the threshold that was written down; hollow: half of the final change. '
        'At the right edge: never.',
      ),
    ]
  )


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
  return '\n'.join(
    [
      '## How the learning rate was chosen',
      '',
      'Before all other runs, by the least validation loss of softmax and nothing else: '
      f"{best.rate:g}, at the paper's product of rate, decay and updates, 0.8. One seed each.",
      '',
      *markdown_table(['rate', 'validation loss, nats', 'Sink_1 %'], rows, left=()),
    ]
  )


def _picture(key: str, title: str, pictures: Mapping[str, str], words: str) -> str:
  return f'![{title}]({pictures[key]})\n\n*{words}*' if key in pictures else ''


def _folded(text: str) -> str:
  """Numbers of trials as a cell, those after the first few behind a click."""
  if not text:
    return '-'
  if text.count(', ') + text.count('; ') < _FEW:
    return escaped(text)
  return f'<details><summary>{escaped(text.split(", ")[0])} ...</summary>{escaped(text)}</details>'
