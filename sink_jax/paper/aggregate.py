"""What the runs of a group say about a measure of some trials."""

from __future__ import annotations

import dataclasses

from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, Summary, impossible, summary

_UNITS = {'percent': ' %', 'points': ' points'}
_ENDED = {'diverged', 'not expressible'}  # states that no more training changes


@dataclasses.dataclass(frozen=True)
class Evidence:
  """Means by trial; pending: why others may still come; left_out: why others never will.

  beside: seeds of the trials in `found` that are not done, and so not in the means.
  """

  found: dict[str, Summary]
  pending: list[str]
  left_out: list[str]
  beside: list[str]

  def numbers(self) -> tuple[dict, ...]:
    return tuple({'trial': trial, 'measure': _name(found.measure), **found.as_dict()}
                 for trial, found in self.found.items())

  def words(self) -> str:
    """'Sink_1: default 18.18 %, batch-128 16.45 %', and what is missing."""
    measures = [found.measure for found in self.found.values()]
    parts = [f'{trial} {found.text(_UNITS.get(found.measure.unit, ""))}'
             for trial, found in self.found.items()]
    line = f'{plain(measures[0])}: {", ".join(parts)}' if parts else ''
    told = lambda words, trials: f'{words}: {", ".join(trials)}' if trials else ''
    return '; '.join(filter(None, [
        line, told('not in the means', self.beside), told('missing', self.pending),
        told('left out', self.left_out)]))

  def without(self, trials: dict[str, str]) -> Evidence:
    """The same with some of the found trials left out; trials: {trial: why}."""
    return dataclasses.replace(
        self, found={t: found for t, found in self.found.items() if t not in trials},
        left_out=self.left_out + [f'{trial} ({why})' for trial, why in trials.items()])


def gather(group: Group, measure: str, trials) -> Evidence:
  """Of the runs that are done: nothing is judged before the last step."""
  found, pending, left_out, beside = {}, [], [], []
  for trial in trials:
    done = group.done(trial)
    value = summary(measure, done)
    if value is not None:
      found[trial] = value
      beside += [f'{trial} ({words})'] if (words := group.not_done(trial)) else []
      continue
    ended = {run.status for run in group.runs(trial)}
    never = next(filter(None, (impossible(measure, run) for run in done)), '')
    words = f'{trial} ({group.status(trial) if not done else never or "not measured"})'
    (left_out if never or ended and ended <= _ENDED else pending).append(words)
  return Evidence(found, pending, left_out, beside)


def heading(measure: str) -> str:
  return plain(METRICS[measure])


def plain(measure) -> str:
  """The heading of a column without its unit."""
  return measure.heading.replace(' %', '').replace(' in points', '')


def level(measure: str, value: float, apart: bool = False) -> str:
  """A level with its unit; apart: a distance between two values."""
  points = f' point{"s" if value != 1 else ""}'
  unit = {'percent': points if apart else ' %', 'points': points, 'nats': ' nats'}.get(
      METRICS[measure].unit, '')
  return f'{value:g}{unit}'


def listed(trials) -> str:
  return trials[0] if len(trials) == 1 else f'{", ".join(trials[:-1])} and {trials[-1]}'


def _name(measure):
  return next(name for name, other in METRICS.items() if other is measure)
