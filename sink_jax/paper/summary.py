"""What the claims say in a few sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sink_jax.paper.analysed import Analysed
from sink_jax.paper.claims import PLURAL, PRESUPPOSED, UNKNOWN, Claim, Verdict
from sink_jax.paper.collect import Group, inconsistencies
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.parts import Part
from sink_jax.paper.pictures import Figure
from sink_jax.paper.spread import CONFIDENCE, FALSE_VERDICTS, MIN_SEEDS
from sink_jax.paper.tables import Table
from sink_jax.report.records import split_notes

OPEN = 'open models'
_DEFAULT = ('sink_1', 'valid_loss', 'massive')  # what most claims are measured against
_JUDGED = (
    f'Judged on runs that are done. Each part of a criterion is decided where the '
    f'{100 * CONFIDENCE:g} % interval of its mean over seeds, by their own spread joined with the '
    f"median of the budget's other trials, lies on one side of its level; {MIN_SEEDS} seeds are "
    'the least. '
    'A claim holds where all parts are decided so, and does not hold where one is decided against '
    'it, whose chance is divided by their number; of training, all seeds have to end alike. Each '
    'criterion was chosen here, not by the paper, and stands below its claim. Where probes say '
    'what Sink_1 and the hidden norm ratio of random positions of the untrained model are, their '
    '99th percentiles are the levels of a sink and of massive activations if they are more.')
_CEILING = 90  # percent, from where one seed in ten that collapses cannot be seen in five seeds
LIMITS = {
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
class SummaryPart:
  """Lines on the runs of a group, or on open models."""

  name: str
  lines: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Summary:
  """What the claims say in a few sentences. notes: on all claims."""

  parts: Sequence[SummaryPart]
  notes: Sequence[str]


def summarize_claims(claims: Sequence[Claim], groups: Sequence[Group],
                     of_open_models: Sequence[str] = ()) -> Summary:
  """What the claims say about each group of runs; `of_open_models`: lines of `open_lines`."""
  # Rates at different budgets are never averaged: every group has lines of its own.
  parts = [SummaryPart(group.name, _lines(claims, group)) for group in groups]
  marks = [f'{mark} presupposes that {words}.' for mark, words in PRESUPPOSED.values()
           if any(mark in claim.marks for claim in claims)]
  parts += [SummaryPart(OPEN, of_open_models)] if of_open_models else []
  return Summary(parts or [SummaryPart('no runs', ['Nothing has been run.'])],
                 [_JUDGED, ' '.join(marks)])


def open_lines(tables: Sequence[Table], figures: Sequence[Figure], analysed: Analysed
               ) -> list[str]:
  """How much of the paper's open models there is, and what of the files is shown nowhere."""
  if not (analysed.files or analysed.lines):
    return []
  rows = [row for table in tables if table.paper.needs == 'open models' for row in table.rows]
  measured = [entry.cells.values() for row in rows for entry in row.entries]
  compared = sum(any(cell.difference is not None for cell in cells) for cells in measured)
  waiting = [figure for figure in figures if figure.paper.needs == 'open models']
  drawn = sum(bool(figure.pictures) for figure in waiting)
  return [f'{sum(map(bool, measured))} of {len(rows)} rows are measured, {compared} of them in the '
          f"paper's protocol; {drawn} of {len(waiting)} figures are drawn.", *analysed.lines]


def _lines(claims: Sequence[Claim], group: Group) -> list[str]:
  judged: dict[str, list[tuple[str, Verdict]]] = {verdict: [] for verdict in PLURAL}
  for claim in claims:
    for verdict in claim.verdicts:
      if verdict.name == group.name:
        judged[verdict.verdict].append((claim.key, verdict))
  done, total = group.done('default'), sum(map(len, judged.values()))
  numbers = ', '.join(f'{summary.metric.name} {summary.signed}' for name in _DEFAULT
                      if (summary := metric_summary(name, done)))
  # Claims that cannot be judged are many on an unfinished sweep, and share few reasons.
  reasons: dict[str, list[str]] = {}
  for key, verdict in judged.pop(UNKNOWN):
    reasons.setdefault(verdict.reason, []).append(key)
  asked = [member for members in judged.values() for member in members]
  counts = {f'{len(members)} of {total} claims {PLURAL[verdict]}': ', '.join(
      f'{key} (about {of.needed} seeds)' if of.needed else key for key, of in members)
            for verdict, members in judged.items()}
  counts[f'{total - len(asked)} {PLURAL[UNKNOWN]}'] = '; '.join(
      f'{words} ({", ".join(keys)})' for words, keys in reasons.items())
  return [f'default: {numbers or group.status("default")}.',
          *(f'{words}: {which}.' if which else f'{words}.' for words, which in counts.items()),
          *([_errors(asked)] if asked else []),
          *([LIMITS[group.rules]] if group.rules in LIMITS else []),
          *split_notes([run for runs in group.trials.values() for run in runs]),
          *inconsistencies(group)]


def _errors(asked: Sequence[tuple[str, Verdict]]) -> str:
  """How many verdicts are false, at most, and of which claims that is not known."""
  others = [key for key, verdict in asked if not all(map(_simulated, verdict.parts))]
  known = len(asked) - len(others)
  words = (f'At most {known * FALSE_VERDICTS:.1f} false verdicts are to be expected among '
           f'{known} of these claims: as many as if each lay exactly on its level, where by '
           f'simulation {100 * FALSE_VERDICTS:g} % at most get a verdict; more do at a level of '
           '5 %, or in a difference, where one head is a sink in some seeds only, so that three '
           'have none, or all have it.')
  if not others:
    return words
  return (f'{words} Not simulated, or not within that, are claims about norm ratios, steps, how '
          f'training ends, identities and rates of {_CEILING} % or more: {", ".join(others)}.')


def _simulated(part: Part) -> bool:
  """Whether `tests/paper/calibration.py` keeps false verdicts of such parts within 5 %."""
  unit = METRICS[part.metric].unit
  if unit == 'percent' and len(part.trials) == 1:
    return part.level < _CEILING
  return unit in ('percent', 'points', 'nats')
