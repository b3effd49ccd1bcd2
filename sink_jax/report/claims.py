"""The paper's claims, a line each in claims.txt, and what runs say to them.

A condition is decided where the 99 % t interval of its mean over seeds, paired by seed where it compares
two trials, lies on one side of its level; an equality by two one-sided tests. A claim is reproduced where
all of its conditions are decided for it, not reproduced where one is decided against it, and open where
seeds are too few (less than 3) or too unlike. It is not testable where runs are missing or invalid, are of
several data sets, or where what it presupposes is not there. Ratios are compared as logarithms.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import pairwise
from typing import NamedTuple

import pandas as pd

from sink_jax.evaluate import EPSILON
from sink_jax.report import paper
from sink_jax.report.stats import compare, equal, interval

REPRODUCED, NOT_REPRODUCED, OPEN, NOT_TESTABLE = VERDICTS = (
    'reproduced', 'not reproduced', 'open', 'not testable here')
SEEDS = 3  # fewer decide nothing
NOISE = 1  # points by which a step of a row may go the other way
_PART = re.compile(r'(?:(\w+): )?(.+?)(?: ([<>=]) (.+?)(?: (\+-|[-+*]) ([\d.]+))?)?')
_ENDS = {'diverges': '<', 'trains': '>'}  # of `converges`, 1 or 0 by seed, against 0.5
_RATE = re.compile('(untrained_|removed_|largest_)?sink(_|$)|lead_|prefix_')
_RATIO = re.compile('massive|window_|.+_ratio')


class Condition(NamedTuple):
  """METRIC of each trial, or minus that of `other` by seed, compared ('<', '>', '=': +-) with a level."""

  metric: str
  trials: list[str]
  sign: str
  level: float
  other: str = ''


class Claim(NamedTuple):
  """A claim of the paper. criterion: its conditions as they stand in the file; needs: presuppositions."""

  key: str
  section: str
  sentence: str
  criterion: str
  conditions: list[Condition]
  needs: list[Condition]
  headline: bool


class Verdict(NamedTuple):
  """One of VERDICTS; n: seeds of the trial with fewest; measured, paper: the numbers, in words."""

  verdict: str
  n: int
  why: str
  measured: str
  paper: str


class Part(NamedTuple):
  """A trial of a condition, decided for (1) or against (-1) it, or open (0); None: nothing to judge.

  left: what seeds that agree leave open.
  """

  decided: int | None
  n: int
  words: str
  left: str = ''


def parse(text: str) -> list[Claim]:
  """The claims of a file; the first lines of claims.txt say how it is written.

  Raises:
    ValueError: a line cannot be read; names its number.
  """
  claims = []
  for number, line in enumerate(text.splitlines(), 1):
    if line and not line.startswith('#'):
      try:
        key, section, sentence, criterion, needs = (field.strip() for field in line.split('|'))
        claims.append(Claim(key.lstrip('*'), section, sentence, criterion, [*_conditions(criterion)],
                            [*_conditions(needs)], key.startswith('*')))
      except ValueError as error:
        raise ValueError(f'claims.txt, line {number}: {error}') from None
  return claims


def _conditions(text: str) -> Iterator[Condition]:
  metric = ''
  for part in filter(None, text.split(' and ')):
    found = _PART.fullmatch(part)
    named, trials, sign, rest, how, size = found.groups() if found else ('', '', '', '', '', '')
    metric, names = named or metric, trials.split(', ')
    if metric in _ENDS or metric == 'text':
      yield Condition('text' if metric == 'text' else 'converges', names, _ENDS.get(metric, ''), 0.5)
    elif not metric or not rest:
      raise ValueError(f'"{part}" is not METRIC: TRIALS > LEVEL, A > B + MARGIN or A = B +- MARGIN')
    elif re.fullmatch(r'[\d.]+', rest):
      level = float(rest)
      yield Condition(metric, names, sign, math.log(level) if _RATIO.match(metric) else level)
    else:
      row, margin = [trials, *rest.split(f' {sign} ')], float(size or 0) * (-1 if how == '-' else 1)
      noise = NOISE if _RATE.match(metric) else margin / 20
      for a, b in pairwise(row) if len(row) > 2 else ():
        yield Condition(metric, [a], sign, noise if sign == '<' else -noise, b)
      yield Condition(metric, names, sign, math.log(margin) if how == '*' else margin, row[-1])


def judge(claim: Claim, table: pd.DataFrame) -> Verdict:
  """What runs of one task say to a claim. table: of `runs.table`, and of `paper.open_models`."""
  conditions = [*claim.needs, *claim.conditions]
  trials = {'default' if trial == 'untrained' else trial for condition in conditions
            for trial in (*condition.trials, condition.other)}
  runs = table[table.trial.isin(trials)]
  mixed = [key for key in ('budget', 'protocol', 'content') if runs[key].nunique() > 1]
  needs, parts = _parts(claim.needs, table), _parts(claim.conditions, table)
  verdict, deciding = REPRODUCED, []
  if mixed:
    verdict, deciding = NOT_TESTABLE, [Part(None, 0, f'runs differ in {" and ".join(mixed)}')]
  elif failed := [part for part in needs if part.decided in (None, -1)]:
    verdict, deciding = NOT_TESTABLE, [
        part._replace(words=f'what it presupposes is not so: {part.words}') for part in failed]
  # One part against it is enough, whatever the others would say if their runs were there.
  elif failed := [part for part in parts if part.decided == -1]:
    verdict, deciding = NOT_REPRODUCED, failed
  elif not parts or any(part.decided is None for part in parts):
    verdict, deciding = NOT_TESTABLE, [part for part in parts if part.decided is None]
  elif undecided := [part for part in (*needs, *parts) if part.decided == 0]:
    verdict, deciding = OPEN, undecided
  why = [part.words for part in deciding] + [part.left for part in deciding or parts if part.left]
  measured, known = [], []
  for metric, trial in dict.fromkeys((condition.metric, trial) for condition in claim.conditions
                                     for trial in (*condition.trials, condition.other) if trial):
    values, _ = seeds_of(table, metric, trial)
    if values:
      of = interval([*values.values()])
      measured.append(f'{metric} of {trial} {_text(metric, of.mean)} (n = {of.n})')
    if number := paper.number(trial, metric):
      known.append(f'{metric} of {trial} {number}')
  return Verdict(verdict, min((part.n for part in parts), default=0), '; '.join(dict.fromkeys(why)),
                 ', '.join(measured), ', '.join(known))


def seeds_of(table: pd.DataFrame, metric: str, trial: str) -> tuple[dict[int, float] | None, str]:
  """{seed: value} of the runs of a trial that are valid, and which are not; None: not expressible."""
  if trial == 'untrained':
    metric, trial = f'untrained_{metric}', 'default'
  runs = table[(table.trial == trial) & (table.status != 'not run')]
  if runs.empty:
    return {}, f'needs {trial}' if _published(trial) else f'no run of {trial}'
  if (runs.status == 'not expressible').all():
    return None, ''
  if metric == 'converges':  # that a run diverged is what it shows
    invalid, remark = ~runs.status.isin(['done', 'diverged']), 'not finished'
  else:
    invalid, remark = runs.valid != '', ', '.join(runs.valid[runs.valid != ''].unique())
    if metric in ('sink_1', 'untrained_sink_1') and 'window' in runs:
      small = runs.window <= EPSILON * runs.length  # the first token has no more than window / length
      invalid, remark = invalid | small, 'a window that cannot show a sink' if small.any() else remark
  words = f'{trial}: {invalid.sum()} of {len(runs)} runs {remark}' if invalid.any() else ''
  runs = runs[~invalid]
  known = runs.assign(value=runs[metric] if metric in runs else math.nan).dropna(subset='value')
  if known.empty:
    return {}, words or f'{metric} of {trial} was not measured'
  if metric.endswith('_step'):  # a sink that never emerges comes after the last step
    known.value = known.value.clip(upper=known.steps)
  if _RATIO.match(metric):
    known.value = known.value.clip(lower=1e-9).map(math.log)
  return known.groupby('seed').value.mean().to_dict(), words


def _parts(conditions: Iterable[Condition], table: pd.DataFrame) -> list[Part]:
  parts = []
  for metric, trials, sign, level, other in conditions:
    for trial in trials:
      if metric == 'text':
        edits = {json.loads(text).get('data.interventions') for text in
                 table.settings[table.trial == trial].dropna()} - {None, ''}
        parts.append(Part(None if edits else 1, 0, f'sequences of {trial} are edited: {", ".join(edits)}'))
        continue
      found = [seeds_of(table, metric, name) for name in (trial, other) if name]
      if any(values is None for values, _ in found):
        continue  # the budget has no such trial
      remarks = ', '.join(remark for _, remark in found if remark)
      if not all(values for values, _ in found):
        parts.append(Part(None, 0, remarks))
        continue
      a, b = found[0][0] or {}, found[-1][0] or {}
      head = 0.5 if metric == 'converges' else (
          100 / table.heads[table.trial.isin(trials)].min() if _RATE.match(metric) else 0.0)
      x = compare(a, b, head=head) if other else interval([*a.values()], head=head)
      exact = metric == 'chain_difference' or _published(trial)  # no seed changes these
      if exact:
        x = x._replace(low=x.mean, high=x.mean)
      elif other and abs(x.mean) < head:
        x = x.widened(-100, 100)  # seeds that agree on no difference do not exclude one
      if sign == '=':
        same = abs(x.mean) < level if exact else equal([a[s] - b[s] for s in a.keys() & b.keys()], level,
                                                       head=head)
        decided = 1 if same else -1 if max(x.low, -x.high) > level else 0
      else:
        low, high = (x.low, x.high) if sign == '>' else (-x.high, -x.low)
        end = level if sign == '>' else -level
        decided = 1 if low > end else -1 if high < end else 0
      decided = decided if exact or x.n >= SEEDS else 0
      label = f'{metric} of {trial}' + f' minus {other}' * bool(other)
      mean, low, high = (_text(metric, value) for value in x[:3])
      words = f'{label} {mean} ({low} to {high}, n = {x.n})' + f' ({remarks})' * bool(remarks)
      left = f'{x.n} seeds agree on {label}: up to {x.unseen:.0%} of all may do otherwise' if x.unseen else ''
      parts.append(Part(decided, x.n, words, left))
  return parts


def _published(trial: str) -> bool:
  """Whether it is the name of a published model: those begin with a capital, trials do not."""
  return trial[0].isupper()


def _text(metric: str, value: float) -> str:
  """Two decimals of rates, three of losses; of ratios, whose values are logarithms, the ratio."""
  value = math.exp(min(value, 700)) if _RATIO.match(metric) else value
  return f'{value:.2f}' if _RATE.match(metric) else f'{value:.3f}' if 'loss' in metric else f'{value:.3g}'


CLAIMS = parse((resources.files('sink_jax.report') / 'claims.txt').read_text('utf-8'))
