"""What the runs of each group say to the claims, as the first screen and a terminal have it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from sink_jax.paper import numbers
from sink_jax.paper.analysed import Analysed
from sink_jax.paper.claims import (
  PLURAL,
  PRESUPPOSED,
  UNDECIDED,
  UNKNOWN,
  Claim,
  SecondLook,
  Verdict,
)
from sink_jax.paper.collect import Group, inconsistencies
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.parts import Part
from sink_jax.paper.pictures import Figure
from sink_jax.paper.spread import CONFIDENCE, FALSE_VERDICTS, MIN_SEEDS
from sink_jax.paper.tables import Table

_DEFAULT = ('sink_1', 'valid_loss', 'massive')  # what most claims are measured against
_CEILING = 90  # percent, from where one seed in ten that collapses cannot be seen in five seeds
# On all claims.
NOTES = (
    f'Judged on runs that are done. Each part of a criterion is decided where the '
    f'{100 * CONFIDENCE:g} % interval of its mean over seeds, by their own spread joined with the '
    f"median of the budget's other trials, lies on one side of its level; {MIN_SEEDS} seeds are "
    'the least. '
    'A claim holds where all parts are decided so, and does not hold where one is decided against '
    'it, whose chance is divided by their number; of training, all seeds have to end alike. Each '
    'criterion was chosen here, not by the paper, and stands below its claim. Where probes say '
    'what Sink_1 and the hidden norm ratio of random positions of the untrained model are, their '
    '99th percentiles are the levels of a sink and of massive activations if they are more.',
    f'By simulation, {100 * FALSE_VERDICTS:g} % at most of the claims that lie exactly on their '
    'level get a verdict; more do at a level of 5 %, or in a difference, where one head is a sink '
    'in some seeds only, so that three have none, or all have it. Not simulated, or not within '
    'that, are claims about norm ratios, steps, how training ends, identities and rates of '
    f'{_CEILING} % or more.',
    ' '.join(f'{mark} presupposes that {words}.' for mark, words in PRESUPPOSED.values()))
_LIMITS = {
    'desk': "At the budget desk models are 900 times smaller than the paper's, on other text, and "
            'every sequence begins with a fixed token: what holds there is the mechanism, and not '
            "the paper's percentages.",
    'smoke': 'At the smoke budget models and data are other ones, so what holds there and what '
             'does not says little about the paper, the one as little as the other.',
    **{share: f"At the {share} budget the paper's models see a {share} of its steps and data, so "
              'what emerges later has not emerged.' for share in ('tenth', 'quarter')},
    'full': "At the full budget models and steps are the paper's, and its data a sample of the "
            'same corpus.',
    'synthetic': 'On the synthetic axis small models learn a task that makes sinks, so what holds '
                 'there is about the mechanism and not about language models.'}


@dataclasses.dataclass(frozen=True)
class GroupSummary:
  """A group of runs, and what it says to the claims.

  settings: the config keys of its protocol. statuses: how many runs have each. answer: sentences.
  verdicts: {verdict: {why nothing can be judged, or '': keys of claims}}. needed: {key: how many
  seeds would decide it}. errors: how many verdicts are false, at most. warnings: on runs that
  cannot be compared or have to be made again.
  """

  budget: str
  protocol: str
  name: str
  settings: Mapping[str, str]
  statuses: Mapping[str, int]
  answer: Sequence[str]
  verdicts: Mapping[str, Mapping[str, Sequence[str]]]
  needed: Mapping[str, int]
  errors: str
  warnings: Sequence[str]


def summarize(asked: Sequence[tuple[Claim, Verdict]], group: Group, look: SecondLook | None
              ) -> GroupSummary:
  """asked: all claims that the group was asked. look: the second look that may decide more."""
  # Rates at different budgets are never averaged: every group has sentences of its own.
  runs = [run for members in group.trials.values() for run in members]
  statuses = collections.Counter(run.status for run in runs)
  known = [run.setup.settings for run in runs if run.setup]
  settings = {key: ' or '.join(sorted({str(own[key]) for own in known}))
              for key in ('optimizer.schedule', 'model.init', 'probe.dtype') if known}
  verdicts: dict[str, dict[str, list[str]]] = {verdict: {} for verdict in PLURAL}
  for claim, verdict in asked:
    verdicts[verdict.verdict].setdefault(verdict.reason, []).append(claim.key)
  counts = [_counted(verdict, sum(map(len, of.values()))) for verdict, of in verdicts.items()]
  trials = len(group.trials)
  done = group.done('default')
  default = ', '.join(f'{summary.metric.name} {summary.signed}' for name in _DEFAULT
                      if (summary := metric_summary(name, done)))
  answer = [
      f'of {_several(len(asked), "claim")} of the paper, {", ".join(counts)}.',
      f'{_several(len(runs), "run")} of '
      + (f"{trials} of the paper's {len(numbers.TRIALS)} trials" if group.protocol
         else _several(trials, 'trial'))
      + f': {", ".join(f"{n} {status}" for status, n in statuses.items())}.',
      f'Default: {default or group.status("default")}.']
  if group.rules in _LIMITS:
    answer.append(_LIMITS[group.rules])
  if look:
    answer.append(f'Seeds {" and ".join(map(str, look.seeds))} of '
                  f'{_several(len(look.trials), "trial")} may decide what is undecided (sweep with '
                  '--undecided).')
  needed = {claim.key: verdict.needed for claim, verdict in asked if verdict.needed}
  return GroupSummary(
      group.budget, group.protocol, group.name, settings, statuses, answer, verdicts, needed,
      _errors(asked), list(inconsistencies(group)))


def open_lines(tables: Sequence[Table], figures: Sequence[Figure], analysed: Analysed
               ) -> list[str]:
  """How much of the paper's open models there is, and what of the files is shown nowhere."""
  if not (analysed.files or analysed.lines):
    return []
  rows = [row for table in tables if table.paper.needs == 'open models' for row in table.rows]
  measured = [entry.cells.values() for row in rows for entry in row.entries]
  compared = sum(any(cell.difference is not None for cell in cells) for cells in measured)
  waiting = [figure for figure in figures if figure.paper.needs == 'open models']
  drawn, known = sum(bool(figure.pictures) for figure in waiting), sum(map(bool, measured))
  are = lambda n: 'is' if n == 1 else 'are'
  return [f'{_several(len(analysed.files), "file")} of analyses; {known} of {len(rows)} rows '
          f"{are(known)} measured, {compared} of them in the paper's protocol; {drawn} of "
          f'{len(waiting)} figures {are(drawn)} drawn.', *analysed.lines]


def _several(n: int, what: str) -> str:
  """'1 run', '2 runs'."""
  return f'{n} {what}{"s" * (n != 1)}'


def _counted(verdict: str, n: int) -> str:
  """'1 holds', '2 hold', '1 is undecided'."""
  if n != 1:
    return f'{n} {PLURAL[verdict]}'
  return f'1 is {verdict}' if verdict == UNDECIDED else f'1 {verdict}'


def _errors(asked: Sequence[tuple[Claim, Verdict]]) -> str:
  """How many verdicts are false, at most, and of which claims that is not known."""
  judged = {claim.key: verdict.parts for claim, verdict in asked if verdict.verdict != UNKNOWN}
  if not judged:
    return ''
  others = [key for key, parts in judged.items() if not all(map(_simulated, parts))]
  known = len(judged) - len(others)
  words = (f'At most {known * FALSE_VERDICTS:.1f} false verdicts are to be expected among '
           f'{known} of these claims, as many as if each lay exactly on its level.')
  return words + (f' No such bound is known for {", ".join(others)}.' if others else '')


def _simulated(part: Part) -> bool:
  """Whether `tests/paper/calibration.py` keeps false verdicts of such parts within 5 %."""
  unit = METRICS[part.metric].unit
  if unit == 'percent' and len(part.trials) == 1:
    return part.level < _CEILING
  return unit in ('percent', 'points', 'nats')
