"""The paper's claims, a line each in claims.txt, and their verdicts from runs.

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
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from itertools import pairwise
from typing import NamedTuple

import pandas as pd

from sink_jax.evaluate import EPSILON
from sink_jax.report import paper
from sink_jax.report.stats import Interval, compare, equal, interval

REPRODUCED, NOT_REPRODUCED, OPEN, NOT_TESTABLE = VERDICTS = (
  'reproduced',
  'not reproduced',
  'open',
  'not testable here',
)
SEEDS = 3  # fewer decide nothing
NOISE = 1  # points by which a step of a row A > B > C may go the wrong way
_PART = re.compile(r'(?:(\w+): )?(.+?)(?: ([<>=]) (.+?)(?: (\+-|[-+*]) ([\d.]+))?)?')
_ENDS = {'diverges': '<', 'trains': '>'}  # of `converges`, 1 or 0 by seed, against 0.5
_RATE = re.compile('(untrained_|removed_|largest_)?sink(_|$)|lead_|prefix_')
_RATIO = re.compile('massive|window_|.+_ratio')


class Condition(NamedTuple):
  """Metrics of trials, or differences from `other` by seed, against a level; = is within +-."""

  metric: str
  trials: list[str]
  sign: str
  level: float
  other: str = ''


class Claim(NamedTuple):
  """A claim. criterion: its conditions as written in the file; needs: its preconditions."""

  key: str
  section: str
  sentence: str
  criterion: str
  conditions: list[Condition]
  needs: list[Condition]
  headline: bool


class Verdict(NamedTuple):
  """verdict: one of VERDICTS; n: fewest seeds of a trial; measured, paper: means, with other n."""

  verdict: str
  n: int
  why: str
  measured: str
  paper: str


class ClaimPart(NamedTuple):
  """A trial of a condition: decided for (1) or against (-1) it, open (0) or not judged (None)."""

  decided: int | None
  n: int
  words: str
  unseen: float = 0.0


def parse(text: str) -> list[Claim]:
  """The claims of a file; the first lines of claims.txt say how it is written.

  Raises:
    ValueError: a line cannot be read; names its number.
  """
  claims = []
  for number, line in enumerate(text.splitlines(), 1):
    if line and not line.startswith('#'):
      try:
        claims.append(_claim(line))
      except ValueError as error:
        raise ValueError(f'claims.txt, line {number}: {error}') from None
  return claims


def _claim(line: str) -> Claim:
  key, section, sentence, criterion, needs = (field.strip() for field in line.split('|'))
  return Claim(
    key.lstrip('*'),
    section,
    sentence,
    criterion,
    [*_conditions(criterion)],
    [*_conditions(needs)],
    headline=key.startswith('*'),
  )


def _conditions(text: str) -> Iterator[Condition]:
  metric = ''
  for part in filter(None, text.split(' and ')):
    found = _PART.fullmatch(part)
    named, trials, sign, rest, how, size = found.groups() if found else [''] * 6
    metric = named or metric
    names = trials.split(', ')
    if metric in _ENDS:
      yield Condition('converges', names, _ENDS[metric], 0.5)
    elif not metric or not rest:
      raise ValueError(f'"{part}" is not METRIC: TRIALS > LEVEL, A > B + MARGIN or A = B +- MARGIN')
    elif re.fullmatch(r'[\d.]+', rest):
      level = float(rest)
      yield Condition(metric, names, sign, math.log(level) if _RATIO.match(metric) else level)
    else:
      row = [trials, *rest.split(f' {sign} ')]
      margin = float(size or 0)
      if how == '-':
        margin = -margin
      noise = NOISE if _RATE.match(metric) else margin / 20
      if sign != '<':
        noise = -noise
      for a, b in pairwise(row) if len(row) > 2 else ():
        yield Condition(metric, [a], sign, noise, b)
      level = math.log(margin) if how == '*' else margin
      yield Condition(metric, names, sign, level, row[-1])


def judge(claim: Claim, table: pd.DataFrame) -> Verdict:
  """The verdict on a claim. table: `runs.table` of one task, with rows of `paper.open_models`."""
  pairs = dict.fromkeys(
    (metric, trial)
    for metric, trials, _, _, other in (*claim.needs, *claim.conditions)
    for trial in (*trials, other)
    if trial
  )
  trials = {'default' if trial == 'untrained' else trial for _, trial in pairs}
  models = set()
  if any(map(_published, trials)):
    models = {trial for trial in table.trial if _published(trial)}
  rows = table.query(f'trial in {[*trials, *models]}').to_dict('records')
  for row in rows:
    row['edited_sequences'] = float('"data.interventions"' in str(row['settings']))
  needs = _parts(claim.needs, rows, 'needs ')
  parts = _parts(claim.conditions, rows)
  for key in ('budget', 'protocol', 'content'):
    different = {row[key] for row in rows if isinstance(row[key], str)}
    if len(different) > 1:
      needs.append(ClaimPart(None, 0, f'its runs differ in {key}'))
  # One refuted part is enough, also if the runs of others are missing.
  order = (
    (needs, None, NOT_TESTABLE),
    (needs, -1, NOT_TESTABLE),
    (needs, 0, OPEN),
    (parts, -1, NOT_REPRODUCED),
    (parts, None, NOT_TESTABLE),
    (parts, 0, OPEN),
    (parts, 1, REPRODUCED),
  )
  verdict, deciding = next(
    (
      (verdict, found)
      for of, decided, verdict in order
      if (found := [part for part in of if part.decided == decided])
    ),
    (NOT_TESTABLE, [ClaimPart(None, 0, 'the budget cannot express it')]),
  )
  why = [part.words for part in deciding if verdict != REPRODUCED]
  if share := max((part.unseen for part in deciding), default=0):
    why.append(f'the seeds agree: up to {100 * share:.0f} % of all seeds may do otherwise')
  n = min(part.n for part in (*deciding, *needs, *parts))
  # Numbers of other published models are shown, but decide nothing.
  others = [(metric, model) for metric, _ in pairs for model in sorted(models)]
  measured, reported = _numbers(rows, dict.fromkeys([*pairs, *others]), n)
  return Verdict(verdict, n, '; '.join(dict.fromkeys(why)), measured, reported)


def _numbers(rows: list[dict], pairs: Iterable[tuple[str, str]], n: int) -> tuple[str, str]:
  """Our means and the paper's numbers of pairs (metric, trial), in words; n: without other n."""
  ours, theirs = collections.defaultdict(list), collections.defaultdict(list)
  for metric, trial in pairs:
    values, _ = seeds_of(rows, metric, trial)
    if values:
      mean = statistics.fmean(values.values())
      if _RATIO.match(metric):  # the arithmetic mean of ratios, as in the tables
        mean = math.log(statistics.fmean(map(math.exp, values.values())))
      other_n = f' (n = {len(values)})' * (len(values) != n)
      ours[metric].append(f'{trial} {_text(metric, mean)}{other_n}')
    if number := paper.number(trial, metric):
      theirs[metric].append(f'{trial} {number}')
  measured, reported = (
    '; '.join(f'{metric_name(metric)}: {", ".join(texts)}' for metric, texts in of.items())
    for of in (ours, theirs)
  )
  return measured, reported


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
      if _RATIO.match(metric):
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
) -> tuple[int, Interval]:
  """1, -1 or 0 (open) of one trial by its values {seed: value}, and the interval that decides.

  b: of the other trial, or {}. head: the points of one head, of a rate; else 0.
  """
  metric, trials, sign, level, other = condition
  x = compare(a, b, head=head) if other else interval([*a.values()], head=head)
  exact = metric == 'chain_difference' or _published(trials[0])  # no seed changes these
  if exact:
    x = x._replace(low=x.mean, high=x.mean)
  elif x.n < SEEDS:
    return 0, x
  elif other and abs(x.mean) < head:
    x = x.widened()  # seeds that agree on no difference do not exclude one
  elif sign == '>' or other or level > x.unseen * head:
    x = x.moved(head)
  if sign == '=':
    differences = [a[seed] - b[seed] for seed in a.keys() & b.keys()]
    if equal([x.mean] * SEEDS if exact else differences, level, head=head):
      return 1, x
    return -1 if max(x.low, -x.high) > level else 0, x
  above, below = x.low > level, x.high < level
  holds, fails = (above, below) if sign == '>' else (below, above)
  return 1 if holds else -1 if fails else 0, x


def _parts(conditions: Iterable[Condition], rows: list[dict], prefix: str = '') -> list[ClaimPart]:
  parts = []
  for condition in conditions:
    metric, other = condition.metric, condition.other
    for trial in condition.trials:
      found = [seeds_of(rows, metric, name) for name in (trial, other) if name]
      remarks = '; '.join(words for _, words in found if words)
      if any(values is None for values, _ in found):
        continue  # the budget has no such trial
      if not all(values for values, _ in found):
        parts.append(ClaimPart(None, 0, remarks))
        continue
      head = _one_head(metric, [row for row in rows if row['trial'] in (trial, other, 'default')])
      decided, x = decide(condition, found[0][0] or {}, found[-1][0] or {}, head)
      words = prefix + _measurement(condition, trial, x)
      if remarks:
        words += f' ({remarks})'
      unseen = x.unseen if decided or condition.sign == '=' else 0.0
      parts.append(ClaimPart(decided, x.n, words, unseen))
  return parts


def _one_head(metric: str, rows: Iterable[Mapping]) -> float:
  """The points of one head of a rate, of the model with the fewest; 0 for other quantities."""
  if metric == 'converges':
    return 0.5
  heads = [row['heads'] for row in rows if row['heads'] > 0]
  return 100 / min(heads) if heads and _RATE.match(metric) else 0.0


def _measurement(condition: Condition, trial: str, x: Interval) -> str:
  """'Sink_1 of sigmoid minus default < -5.00: -21.00 (-25.00 to -17.00, n = 3)'."""
  metric, other = condition.metric, condition.other
  if _RATE.match(metric) and not other:
    x = x._replace(low=max(x.low, 0.0), high=min(x.high, 100.0))
  values = x.mean, x.low, x.high, condition.level
  mean, low, high, level = (_text(metric, value) for value in values)
  is_ratio = bool(_RATIO.match(metric))
  sign = 'within +-' if condition.sign == '=' else f'{condition.sign} '
  than = f' {"over" if is_ratio else "minus"} {other}' if other else ''
  kind = 'geometric mean ' if is_ratio else ''
  bounds = f'{low} to {high}, ' if x.n > 1 else ''
  claimed = f'{metric_name(metric)} of {trial}{than} {sign}{level}'
  return f'{claimed}: {kind}{mean} ({bounds}n = {x.n})'


def _published(trial: str) -> bool:
  """True for a published model: its name begins with a capital, and that of a trial does not."""
  return trial[0].isupper()


def metric_name(metric: str) -> str:
  """'Sink_1', 'Sink_*', 'valid loss', 'Sink_1 (random)'."""
  metric = re.sub(r'^kinds_(\w+)_sink_1', r'sink_1 (\1)', metric.replace('_star', '_*'))
  metric = re.sub(r'^lead_(\d)', r'sink_\1 minus the next rate', metric)
  metric = re.sub(r'sink_(?=\d|\*)', 'Sink_', metric)
  metric = {
    'edited_sequences': 'share of sequences with a replaced token',
    'emergence_step': 'step of emergence (the last one if none)',
  }.get(metric, metric)
  return re.sub('(?<!Sink)_', ' ', metric)


def _text(metric: str, value: float) -> str:
  """A rate with two decimals, a loss with three; a ratio, given as a logarithm, as the ratio."""
  if metric == 'converges' or metric.endswith('_step'):
    return f'{100 * value:.0f} %' if metric == 'converges' else f'{value:,.0f}'
  if _RATIO.match(metric):
    value = math.exp(min(value, 700))
  if _RATE.match(metric):
    return f'{value:.2f}'
  return f'{value:.3f}' if 'loss' in metric else f'{value:.3g}'


CLAIMS = parse((resources.files('sink_jax.report') / 'claims.txt').read_text('utf-8'))
