"""Conditions of claims: a plain function for each comparison, and the words of a quantity.

Each function returns a list of conditions, so that `+` joins them: above(...) + below(...).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

NOISE = 1  # points by which a step of a row A > B > C may go the wrong way
_RATE = re.compile('(untrained_|removed_|largest_)?sink(_|$)|lead_|prefix_')
_RATIO = re.compile('massive|window_|.+_ratio')
Trials = str | Sequence[str]


class Condition(NamedTuple):
  """Metrics of trials, or differences from `other` by seed, against a level; = is within +-.

  level: a logarithm for ratios. words: the condition, or a row of them, as the pages write it; ''
  for the steps of a row.
  """

  metric: str
  trials: tuple[str, ...]
  sign: str
  level: float
  other: str = ''
  words: str = ''


def above(metric: str, trials: Trials, level: float) -> list[Condition]:
  """Each of the trials lies above a level."""
  return _compared(metric, trials, '>', _as_compared(metric, level), f'{level:g}')


def below(metric: str, trials: Trials, level: float) -> list[Condition]:
  """Each of the trials lies below a level."""
  return _compared(metric, trials, '<', _as_compared(metric, level), f'{level:g}')


def greater(
  metric: str, trials: Trials, than: str, by: float = 0, times: float = 1
) -> list[Condition]:
  """Each of the trials exceeds another of the same seed by a margin; a ratio by a factor.

  Raises:
    ValueError: a factor for a quantity that is not a ratio, or a margin for a ratio.
  """
  margin, level = _signed(metric, by), by
  if times != 1:
    if not is_ratio(metric):
      raise ValueError(f'{metric} is not a ratio: by= has the margin, and not times=.')
    margin, level = f' * {times:g}', math.log(times)
  return _compared(metric, trials, '>', level, than + margin, than)


def less(metric: str, trials: Trials, than: str, plus: float = 0) -> list[Condition]:
  """Each of the trials lies below another of the same seed, or below that plus a tolerance."""
  return _compared(metric, trials, '<', plus, than + _signed(metric, plus), than)


def equal(metric: str, trials: Trials, other: str, within: float) -> list[Condition]:
  """Each of the trials differs from another of the same seed by less than a margin."""
  return _compared(metric, trials, '=', within, f'{other} +- {within:g}', other)


def ordered(
  metric: str, trials: Sequence[str], by: float = 0, rising: bool = False
) -> list[Condition]:
  """A row from the greatest trial to the least, or rising, whose ends differ by a margin.

  No step goes the wrong way by more than 1 point of a rate, or a 20th of the margin.
  """
  sign, way = ('<', -1) if rising else ('>', 1)
  noise = NOISE if is_rate(metric) else by / 20
  steps = [Condition(metric, (a,), sign, -way * noise, b) for a, b in pairwise(trials)]
  words = f'{metric}: {f" {sign} ".join(trials)}{_signed(metric, way * by)}'
  return [*steps, Condition(metric, (trials[0],), sign, way * by, trials[-1], words)]


def diverges(*trials: str) -> list[Condition]:
  """Each of the trials diverges."""
  return [Condition('converges', trials, '<', 0.5, words=f'diverges: {", ".join(trials)}')]


def trains(*trials: str) -> list[Condition]:
  """None of the trials diverges."""
  return [Condition('converges', trials, '>', 0.5, words=f'trains: {", ".join(trials)}')]


def _compared(
  metric: str, trials: Trials, sign: str, level: float, words: str, other: str = ''
) -> list[Condition]:
  """A condition of one or several trials; words: the level as the pages write it."""
  names = (trials,) if isinstance(trials, str) else tuple(trials)
  said = f'{metric}: {", ".join(names)} {sign} {words}'
  return [Condition(metric, names, sign, level, other, said)]


def _as_compared(metric: str, level: float) -> float:
  return math.log(level) if is_ratio(metric) else level


def _signed(metric: str, margin: float) -> str:
  """' + 2', ' - 2', or '' without a margin; ValueError for a margin between ratios."""
  if margin and is_ratio(metric):
    raise ValueError(f'{metric} is a ratio: compare it by a factor, greater(..., times=1.25).')
  return f' {"-" if margin < 0 else "+"} {abs(margin):g}' if margin else ''


def is_rate(metric: str) -> bool:
  """True for a share of heads and sequences, in percent."""
  return bool(_RATE.match(metric))


def is_ratio(metric: str) -> bool:
  """True for a quantity whose logarithms are compared."""
  return bool(_RATIO.match(metric))


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


def number_text(metric: str, value: float) -> str:
  """A rate with two decimals, a loss with three; a ratio, given as a logarithm, as the ratio."""
  if metric == 'converges':
    return f'{100 * value:.0f} %'
  if metric.endswith('_step'):
    return f'{value:,.0f}'
  if is_ratio(metric):
    value = math.exp(min(value, 700))
  if is_rate(metric):
    return f'{value:.2f}'
  return f'{value:.3f}' if 'loss' in metric else f'{value:.3g}'
