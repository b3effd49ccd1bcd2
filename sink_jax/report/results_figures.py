"""The pictures of the results page that are drawn from training runs."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sink_jax.report import figures, paper
from sink_jax.report.runs import EMERGED, Runs
from sink_jax.report.sections import HEADLINE, Agreement
from sink_jax.report.validity import probed


def dynamics(runs: Runs, shown: pd.DataFrame) -> Figure | None:
  """Sink_1 of the headline trials during training; None if none of them was probed."""
  trials = _probed_trials(shown, list(HEADLINE))
  if not trials:
    return None
  rates = probed(shown).groupby('trial').sink_1.mean()
  sinks = [HEADLINE[trial] for trial in trials if rates.get(trial, 0) >= EMERGED]
  names = ' and '.join(sinks) or 'in none'
  title = f'Mean Sink_1 of {EMERGED} % or more: {names}'
  return figures.curves(runs, shown, trials, ['sink_1'], title=title)


def scatter(shown: pd.DataFrame, beside: pd.DataFrame, agreement: Agreement) -> Figure | None:
  """The paper's Sink_1 and ours, also of trials without a valid run; None of few trials.

  beside, agreement: of `paper`.
  """
  dots, rank, alike = agreement
  if len(dots) < 3:  # fewer show no agreement
    return None
  known = beside[beside.metric.eq('sink_1') & beside.value.notna()]
  bad = known[known.n.eq(0) & known.invalid.gt(0)]
  means = shown.groupby('trial').sink_1.mean()
  bad = bad.assign(crossed=True, mean=bad.trial.map(means))
  both = pd.concat([dots.assign(crossed=False), bad])
  title = f'{alike} of {len(dots)} experiments lie on the same side of {EMERGED} %'
  if not math.isnan(rank):
    title += f'\n(rank correlation {rank:.2f})'
  return figures.scatter(both, title)


def of_paper(
  item: Mapping[str, Any], runs: Runs, shown: pd.DataFrame, tuned: pd.DataFrame
) -> Figure | None:
  """A figure of the paper, an item of `paper.FIGURES`, from training runs; None without any."""
  kind, name = item['kind'], paper.name_of(item)
  trials = _probed_trials(shown, item['trials'])
  good = shown[shown.valid.eq('') & shown.trial.isin(trials)]
  if kind == 'ratios':
    range_of_means = _range(good, 'hidden_ratio', 'largest ratio')
  else:
    range_of_means = _range(good, 'sink_1', 'Sink_1')
  title = '\n'.join(filter(None, (name, range_of_means)))
  if kind == 'fine-tuning' and len(tuned):
    # 'paper', not 'answers', where there are both.
    tuned = tuned[tuned.protocol == max(tuned.protocol)]
    tuned_trials = sorted(set(tuned.trial))
    return figures.curves(runs, tuned, tuned_trials, ['train_loss', 'grad_norm'], title=title)
  if not trials:
    return None
  if kind == 'prefix':
    return figures.positions(shown, trials, title)
  if kind in ('dynamics', 'learning rates'):
    losses = ['train_loss', 'valid_loss'] if kind == 'dynamics' else ['train_loss']
    return figures.curves(runs, shown, trials, [*losses, 'sink_1'], title=title)
  if kind == 'ratios':
    dotted = item.get('dotted', '')
    return figures.curves(runs, shown, trials, ['hidden_ratio'], 'block', title, dotted)
  if kind == 'window map':
    columns = ['window_absolute', 'window_relative']
    return figures.sweep(shown, trials, 'window', columns, name)
  if item['number'] == '6':
    return figures.sweep(shown, trials, 'window', ['sink_1', 'valid_loss'], title)
  columns = ['sink_1', 'train_loss', 'valid_loss']
  return figures.sweep(shown, trials, 'unique_tokens', columns, title)


def _probed_trials(shown: pd.DataFrame, trials: list[str]) -> list[str]:
  known = set(shown.trial[shown.sink_1.notna()])
  return [trial for trial in trials if trial in known]


def _range(good: pd.DataFrame, column: str, words: str) -> str:
  """'Sink_1 0.5 (sigmoid) to 30 (default)', the least and the largest mean; '' without runs."""
  means = pd.Series(good.groupby('trial')[column].mean()).sort_values()
  if means.empty:
    return ''
  ends = dict.fromkeys((means.index[0], means.index[-1]))
  return f'{words} ' + ' to '.join(f'{means[trial]:.3g} ({trial})' for trial in ends)
