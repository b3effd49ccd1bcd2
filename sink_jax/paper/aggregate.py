"""A metric of several trials of a group, aggregated over the seeds of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sink_jax.paper.cells import TrialStatistics
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, Metric, MetricSummary, impossible, metric_summary

_UNITS = {'percent': ' %', 'points': ' points'}
_ENDED = {'diverged', 'not expressible'}  # states that no more training changes


@dataclasses.dataclass(frozen=True)
class Aggregate:
  """Summaries of a metric by trial, and the trials that have none.

  pending: trials whose numbers may still come, with the reason. left_out: trials that will never
  have one. not_done: seeds of the trials in `summaries` that are not done, and so not in the means.
  diverged: trials of which a seed diverged, whether others are done or not.
  """

  metric: str
  summaries: Mapping[str, MetricSummary]
  pending: Sequence[str] = ()
  left_out: Sequence[str] = ()
  not_done: Sequence[str] = ()
  diverged: Sequence[str] = ()

  def numbers(self) -> tuple[TrialStatistics, ...]:
    """The numbers as the report has them."""
    return tuple(TrialStatistics(trial, self.metric, summary.statistics())
                 for trial, summary in self.summaries.items())

  def words(self) -> str:
    """'Sink_1: default 18.18 %, batch-128 16.45 %', and what is missing."""
    parts = [f'{trial} {summary.text(_UNITS.get(summary.metric.unit, ""))}'
             for trial, summary in self.summaries.items()]
    line = f'{heading(self.metric)}: {", ".join(parts)}' if parts else ''
    listing = lambda words, trials: f'{words}: {", ".join(trials)}' if trials else ''
    return '; '.join(filter(None, [
        line, listing('not in the means', self.not_done), listing('missing', self.pending),
        listing('left out', self.left_out)]))

  def without(self, reasons: Mapping[str, str]) -> Aggregate:
    """The same with some trials left out. reasons: why, by trial."""
    return dataclasses.replace(
        self, summaries={trial: summary for trial, summary in self.summaries.items()
                         if trial not in reasons},
        left_out=[*self.left_out, *(f'{trial} ({why})' for trial, why in reasons.items())])


def aggregate(group: Group, metric: str, trials: Sequence[str]) -> Aggregate:
  """Over the runs that are done: nothing is judged before the last step."""
  summaries, pending, left_out, not_done = {}, [], [], []
  diverged = [trial for trial in trials
              if any(run.status == 'diverged' for run in group.runs(trial))]
  for trial in trials:
    done = group.done(trial)
    summary = metric_summary(metric, done)
    if summary is not None:
      summaries[trial] = summary
      # The mean of the seeds that are done counts, and the words name the others.
      not_done += [f'{trial} ({words})'] if (words := group.not_done(trial)) else []
      continue
    ended = {run.status for run in group.runs(trial)}
    # A trial that can never have the number holds no verdict up.
    never = next(filter(None, (impossible(metric, run) for run in done)), '')
    words = f'{trial} ({group.status(trial) if not done else never or "not measured"})'
    (left_out if never or ended and ended <= _ENDED else pending).append(words)
  return Aggregate(metric, summaries, pending, left_out, not_done, diverged)


def heading(metric: str) -> str:
  """The heading of a metric without its unit."""
  return plain(METRICS[metric])


def plain(metric: Metric) -> str:
  """The same of any metric."""
  return metric.heading.replace(' %', '').replace(' in points', '')


def level(metric: str, value: float, apart: bool = False) -> str:
  """A level with its unit; apart: a distance between two values, on the scale of the metric."""
  if apart and METRICS[metric].unit == 'ratio':
    return f'a factor of {METRICS[metric].unscaled(value):.3g}'
  points = f' point{"s" if value != 1 else ""}'
  # 10 % and 12 % are 2 points apart, and not 2 %.
  unit = {'percent': points if apart else ' %', 'points': points, 'nats': ' nats'}.get(
      METRICS[metric].unit, '')
  return f'{value:g}{unit}'


def listed(trials: Sequence[str]) -> str:
  """'a', 'a and b', 'a, b and c'."""
  return trials[0] if len(trials) == 1 else f'{", ".join(trials[:-1])} and {trials[-1]}'
