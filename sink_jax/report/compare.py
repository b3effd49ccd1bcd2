"""Trials against a baseline, paired by seed: remedies, grafts, fine-tuning.

Attention, values, hidden states and the loss move separately (Sun et al. 2603.05498, Owen et al.
2503.22329), so each is judged separately. The margins were written before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from sink_jax.report.runs import EMERGED
from sink_jax.report.stats import equal, holm, interval, unseen

ERROR = 0.05  # of all tests of one measure together
LEAST = 3  # seeds for a verdict
NO_SINK = 5  # percent of heads; a lower rate counts as no sink


class Measure(NamedTuple):
  """A column of the table of runs that is compared.

  margin: smaller differences count as none; points of a rate, nats, or the logarithm of a `ratio`.
  present: in a baseline above it (below it with `small`) a remedy has something to change; None: in
  every baseline.
  """

  heading: str
  margin: float
  ratio: bool = False
  present: float | None = None
  small: bool = False


MEASURES = {
  'sink_1': Measure('Sink_1, points', 5, present=EMERGED),
  'valid_loss': Measure('validation loss, nats', 0.02),
  'value_ratio': Measure('least value ratio, times', 0.1, True, 0.5, True),
  'hidden_ratio': Measure('largest hidden ratio, times', 0.1, True, 2),
}


def against(
  table: pd.DataFrame, baseline: str, measures: Mapping[str, Measure] = MEASURES
) -> pd.DataFrame:
  """Compares every trial with the baseline, with the same seed, data, budget and number of steps.

  Args:
    table: of `runs.table`; one task.

  Returns:
    A row for a trial and measure: trial, metric, ours and base (means of the pairs), star (mean
    Sink_*), difference (of logarithms for ratios), low, high (at 99 %), n, p (after Holm over the
    trials), verdict, and invalid: how many runs of the trial are left out and why, as 'dead 2'.
  """
  rows = []
  for metric, measure in measures.items():
    known = table[table.valid.eq('') & table[metric].notna()]
    known = known.fillna({'content': ''})
    same = ['seed', 'content', 'steps', 'budget', 'protocol']
    values = known.pivot_table(metric, same, 'trial')
    if baseline not in values:
      continue
    scale = cast(Any, np.log if measure.ratio else np.positive)  # of Series
    of_metric = []
    for trial, runs in table[table.trial != baseline].groupby('trial'):
      pairs = values.reindex(columns=[baseline, trial]).dropna()
      changes = scale(pairs[trial]) - scale(pairs[baseline])
      # Runs of one seed on several data, or at several budgets, are one draw of a seed.
      differences = changes.groupby('seed').mean().tolist()
      found = interval(differences)
      bad = runs.valid[runs.valid != ''].value_counts()
      of_metric.append(
        {
          'trial': trial,
          'metric': metric,
          'n': found.n,
          'difference': found.mean,
          'low': found.low,
          'high': found.high,
          'p': found.p,
          'ours': pairs[trial].mean(),
          'base': pairs[baseline].mean(),
          'star': known.sink_star[known.trial == trial].mean(),
          'same': equal(differences, measure.margin),
          'widest': max(changes.abs(), default=math.inf),
          'most': pairs[trial].max(),
          'invalid': ', '.join(f'{why} {n}' for why, n in bad.items()),
        }
      )
    adjusted = holm([row['p'] if row['n'] >= LEAST else math.nan for row in of_metric])
    for row, p in zip(of_metric, adjusted):
      rows.append(row | {'p': p, 'verdict': _verdict(row, p, measure)})
  return pd.DataFrame(rows)


def _verdict(row: Mapping[str, Any], p: float, measure: Measure) -> str:
  """Such as 'lower', 'removed', 'moved to the extra key', 'open' or 'not testable'."""
  if row['n'] < LEAST:
    return 'not testable' if row['invalid'] else 'open'
  if measure.present is not None and (row['base'] < measure.present) != measure.small:
    return 'nothing to change'
  sinks = row['metric'] == 'sink_1'
  if sinks and row['widest'] <= measure.margin:
    # Seeds that agree prove nothing about others: see `excluded`.
    return f'no difference in {row["n"]} seeds'
  if not sinks and row['same']:
    return 'no difference'
  if not p < ERROR or row['low'] <= 0 <= row['high']:
    return 'open'
  if abs(row['difference']) <= measure.margin:
    return 'open'
  if sinks and row['difference'] < 0 and row['most'] < NO_SINK:
    return 'moved to the extra key' if row['star'] >= EMERGED else 'removed'
  return 'lower' if row['difference'] < 0 else 'higher'


def written(row: Any, measure: Measure) -> str:
  """'-23.4 (-28.7 to -18.1), n = 3'; '0.83 (0.70 to 0.98), n = 5' of a ratio; '-' without pairs."""
  if not row.n:
    return '-'
  if measure.ratio:
    show = lambda x: f'{math.exp(min(x, 99)):.2f}'
  else:
    digits = 3 if 'nats' in measure.heading else 1
    show = lambda x: f'{x:+.{digits}f}'
  bounds = f' ({show(row.low)} to {show(row.high)})' if math.isfinite(row.high) else ''
  return f'{show(row.difference)}{bounds}, n = {row.n}'


def excluded(n: int) -> str:
  """The possibility that n seeds that agree cannot exclude, in words."""
  share = f'{100 * unseen(n):.0f} %'
  return f'{n} seeds that agree leave open whether up to {share} of all seeds do otherwise'
