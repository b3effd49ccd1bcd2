"""Verdicts on the paper's claims (`paper_claims`) from runs.

A condition is decided if the 99 % t interval of its mean over seeds lies on one side of its level;
seeds are paired if it compares two trials. An equality is decided by two one-sided tests. A claim
is reproduced if all of its conditions hold, not reproduced if one is refuted, and open if seeds are
fewer than 3 or vary too much, or leave a precondition open. It is not testable if runs are missing
or invalid, use several data sets, or fail a precondition. Ratios are compared as logarithms.

If the seeds of a rate agree within one head, their t interval says nothing of other seeds, of which
a share may differ. A verdict must then hold if that share has one head more or less: the ends of
the interval move by the share times one head. A level nearer to 0 than that cannot be held so (5
points with 8 heads and three seeds; six seeds suffice): a verdict that a rate lies below it is
about the seeds that were run, and states the share. To call two rates equal takes more evidence.
"""

from __future__ import annotations

import collections
import enum
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from sink_jax.evaluate import EPSILON
from sink_jax.report import paper
from sink_jax.report.conditions import Condition, is_rate, is_ratio, metric_name, number_text
from sink_jax.report.stats import Interval, compare, equal, interval

SEEDS = 3  # fewer decide nothing


class Verdict(enum.StrEnum):
  """On a claim, or on one trial of a condition."""

  REPRODUCED = 'reproduced'
  NOT_REPRODUCED = 'not reproduced'
  OPEN = 'open'
  NOT_TESTABLE = 'not testable here'


class Claim(NamedTuple):
  """A sentence of the paper, of one of its sections, and the conditions that decide it.

  says: what the sentence says; needs: what must hold before that can be judged. headline: the first
  screen of the results shows it.
  """

  key: str
  section: str
  sentence: str
  says: Sequence[Condition]
  needs: Sequence[Condition] = ()
  headline: bool = False

  @property
  def criterion(self) -> str:
    """'sink_1: default > 10 and untrained < 10': a metric is named once while it stays the same."""
    parts, last = [], ''
    for words in [condition.words for condition in self.says if condition.words]:
      metric, _, comparison = words.partition(': ')
      parts.append(comparison if metric == last else words)
      last = metric
    return ' and '.join(parts)


class Judgement(NamedTuple):
  """A verdict and why; n: fewest seeds of a trial; measured, paper: means, with other n."""

  verdict: Verdict
  n: int
  why: str
  measured: str
  paper: str


class ClaimPart(NamedTuple):
  """A trial of a condition: its verdict with the reasons.

  unseen: the share of seeds that may do otherwise.
  """

  verdict: Verdict
  n: int
  reasons: tuple[str, ...]
  unseen: float = 0.0


def judge(claim: Claim, table: pd.DataFrame) -> Judgement:
  """The verdict on a claim. table: `runs.table` of one task, with rows of `paper.open_models`."""
  pairs = dict.fromkeys(
    (condition.metric, trial)
    for condition in (*claim.needs, *claim.says)
    for trial in (*condition.trials, condition.other)
    if trial
  )
  trials = {'default' if trial == 'untrained' else trial for _, trial in pairs}
  models = set()
  if any(map(_published, trials)):
    models = {trial for trial in table.trial if _published(trial)}
  rows = table.query(f'trial in {[*trials, *models]}').to_dict('records')
  for row in rows:
    row['edited_sequences'] = float('"data.interventions"' in str(row['settings']))
  needs = [*_parts(claim.needs, rows, 'needs '), *_mixtures(rows)]
  parts = _parts(claim.says, rows)
  verdict, deciding = _deciding(needs, parts)
  why = []
  if verdict != Verdict.REPRODUCED:
    for part in deciding:
      why += part.reasons
  if share := max((part.unseen for part in deciding), default=0):
    why.append(f'the seeds agree: up to {100 * share:.0f} % of all seeds may do otherwise')
  n = min(part.n for part in (*deciding, *needs, *parts))
  # Numbers of other published models are shown, but decide nothing.
  others = [(metric, model) for metric, _ in pairs for model in sorted(models)]
  measured, reported = _numbers(rows, dict.fromkeys([*pairs, *others]), n)
  return Judgement(verdict, n, '; '.join(dict.fromkeys(why)), measured, reported)


def _mixtures(rows: list[dict]) -> list[ClaimPart]:
  """A part that cannot be tested for each setting in which the runs of a claim differ."""
  mixtures = []
  for key in ('budget', 'protocol', 'content'):
    different = {row[key] for row in rows if isinstance(row[key], str)}
    if len(different) > 1:
      mixtures.append(ClaimPart(Verdict.NOT_TESTABLE, 0, (f'its runs differ in {key}',)))
  return mixtures


def _deciding(
  needs: Sequence[ClaimPart], parts: Sequence[ClaimPart]
) -> tuple[Verdict, Sequence[ClaimPart]]:
  """The verdict on a claim, and the preconditions or parts that it follows from."""
  with_verdict = lambda of, verdict: [part for part in of if part.verdict == verdict]
  for verdict in (Verdict.NOT_TESTABLE, Verdict.NOT_REPRODUCED):
    if failed := with_verdict(needs, verdict):
      return Verdict.NOT_TESTABLE, failed
  if undecided := with_verdict(needs, Verdict.OPEN):
    return Verdict.OPEN, undecided
  # One refuted part is enough, also if the runs of others are missing.
  for verdict in (Verdict.NOT_REPRODUCED, Verdict.NOT_TESTABLE, Verdict.OPEN, Verdict.REPRODUCED):
    if deciding := with_verdict(parts, verdict):
      return verdict, deciding
  nothing = ClaimPart(Verdict.NOT_TESTABLE, 0, ('the budget cannot express it',))
  return Verdict.NOT_TESTABLE, [nothing]


def _numbers(rows: list[dict], pairs: Iterable[tuple[str, str]], n: int) -> tuple[str, str]:
  """Our means and the paper's numbers of pairs (metric, trial), in words; n: without other n."""
  ours, theirs = collections.defaultdict(list), collections.defaultdict(list)
  for metric, trial in pairs:
    values, _ = seeds_of(rows, metric, trial)
    if values:
      mean = statistics.fmean(values.values())
      if is_ratio(metric):  # the arithmetic mean of ratios, as in the tables
        mean = math.log(statistics.fmean(map(math.exp, values.values())))
      other_n = f' (n = {len(values)})' * (len(values) != n)
      ours[metric].append(f'{trial} {number_text(metric, mean)}{other_n}')
    if number := paper.number(trial, metric):
      theirs[metric].append(f'{trial} {number}')
  return _by_metric(ours), _by_metric(theirs)


def _by_metric(texts: Mapping[str, list[str]]) -> str:
  """'Sink_1: default 18.18, sigmoid 0.44; valid loss: default 3.72'."""
  return '; '.join(f'{metric_name(metric)}: {", ".join(of)}' for metric, of in texts.items())


def seeds_of(
  rows: Iterable[Mapping], metric: str, trial: str
) -> tuple[dict[int, float] | None, str]:
  """{seed: value} of the valid runs of a trial, and which are not valid; None: not expressible."""
  if trial == 'untrained':
    metric, trial = f'untrained_{metric}', 'default'
  runs = [row for row in rows if row['trial'] == trial and row['status'] != 'not run']
  if not runs:
    return {}, f'needs {trial}' if _published(trial) else f'no run of {trial}'
  if all(row['status'] == 'not expressible' for row in runs):
    return None, ''
  values, reasons = collections.defaultdict[int, list[float]](list), []
  for row in runs:
    value = row.get(metric, math.nan)
    reason = _reason_against(row, metric)
    if reason:
      reasons.append(reason)
    elif not math.isnan(value):
      if metric.endswith('_step'):
        value = min(value, row['steps'])  # infinite: it never emerges
      if is_ratio(metric):
        value = math.log(max(value, 1e-9))
      values[row['seed']].append(value)
  words = f'{metric_name(metric)} of {trial} was not measured' if not values else ''
  if reasons:
    words = f'{trial}: {len(reasons)} of {len(runs)} runs {", ".join(dict.fromkeys(reasons))}'
  return {seed: sum(of) / len(of) for seed, of in values.items()}, words


def _reason_against(row: Mapping, metric: str) -> str:
  """Why a run is no evidence for a metric; '' if it is."""
  if metric == 'converges' and row['status'] in ('done', 'diverged'):  # both are outcomes of it
    return ''
  least_window = EPSILON * row.get('length', math.nan)
  if metric == 'sink_1' and row.get('window', math.nan) <= least_window:
    return 'with a window too small for a sink'  # the first token has window / length at most
  return row['valid']


def decide(
  condition: Condition, a: dict[int, float], b: dict[int, float], head: float
) -> tuple[Verdict, Interval]:
  """The verdict on one trial by its values {seed: value}, and the interval that decides.

  b: of the other trial, or {}. head: the points of one head, of a rate; else 0.
  """
  sign, level, other = condition.sign, condition.level, condition.other
  x = compare(a, b, head=head) if other else interval([*a.values()], head=head)
  # No seed changes these.
  exact = condition.metric == 'chain_difference' or _published(condition.trials[0])
  if exact:
    x = x._replace(low=x.mean, high=x.mean)
  elif x.n < SEEDS:
    return Verdict.OPEN, x
  elif other and abs(x.mean) < head:
    x = x.widened()  # seeds that agree on no difference do not exclude one
  elif sign == '>' or other or level > x.unseen * head:
    x = x.moved(head)
  if sign == '=':
    differences = [a[seed] - b[seed] for seed in a.keys() & b.keys()]
    holds = equal([x.mean] * SEEDS if exact else differences, level, head=head)
    fails = max(x.low, -x.high) > level
  elif sign == '>':
    holds, fails = x.low > level, x.high < level
  else:
    holds, fails = x.high < level, x.low > level
  if holds:
    return Verdict.REPRODUCED, x
  return Verdict.NOT_REPRODUCED if fails else Verdict.OPEN, x


def _parts(conditions: Iterable[Condition], rows: list[dict], prefix: str = '') -> list[ClaimPart]:
  """A part for each trial of the conditions, but for those that the budget has not."""
  parts = []
  for condition in conditions:
    for trial in condition.trials:
      part = _part(condition, trial, rows, prefix)
      if part is not None:
        parts.append(part)
  return parts


def _part(condition: Condition, trial: str, rows: list[dict], prefix: str) -> ClaimPart | None:
  metric, other = condition.metric, condition.other
  a, remark = seeds_of(rows, metric, trial)
  b, other_remark = seeds_of(rows, metric, other) if other else ({}, '')
  if a is None or b is None:
    return None  # the budget has no such trial
  remarks = tuple(filter(None, (remark, other_remark)))
  if not a or other and not b:
    return ClaimPart(Verdict.NOT_TESTABLE, 0, remarks)
  head = _one_head(metric, [row for row in rows if row['trial'] in (trial, other, 'default')])
  verdict, x = decide(condition, a, b, head)
  words = prefix + _measurement(condition, trial, x)
  if remarks:
    words += f' ({"; ".join(remarks)})'
  unseen = x.unseen if verdict != Verdict.OPEN or condition.sign == '=' else 0.0
  return ClaimPart(verdict, x.n, (words,), unseen)


def _one_head(metric: str, rows: Iterable[Mapping]) -> float:
  """The points of one head of a rate, of the model with the fewest; 0 for other quantities."""
  if metric == 'converges':
    return 0.5
  heads = [row['heads'] for row in rows if row['heads'] > 0]
  return 100 / min(heads) if heads and is_rate(metric) else 0.0


def _measurement(condition: Condition, trial: str, x: Interval) -> str:
  """'Sink_1 of sigmoid minus default < -5.00: -21.00 (-25.00 to -17.00, n = 3)'."""
  metric, other = condition.metric, condition.other
  if is_rate(metric) and not other:
    x = x._replace(low=max(x.low, 0.0), high=min(x.high, 100.0))
  values = x.mean, x.low, x.high, condition.level
  mean, low, high, level = (number_text(metric, value) for value in values)
  sign = 'within +-' if condition.sign == '=' else f'{condition.sign} '
  than = f' {"over" if is_ratio(metric) else "minus"} {other}' if other else ''
  kind = 'geometric mean ' if is_ratio(metric) else ''
  bounds = f'{low} to {high}, ' if x.n > 1 else ''
  claimed = f'{metric_name(metric)} of {trial}{than} {sign}{level}'
  return f'{claimed}: {kind}{mean} ({bounds}n = {x.n})'


def _published(trial: str) -> bool:
  """True for a published model: its name begins with a capital, and that of a trial does not."""
  return trial[0].isupper()
