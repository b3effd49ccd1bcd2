"""A metric of several trials of a group, aggregated over the seeds of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sink_jax.paper.cells import TrialStatistics
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, MetricSummary, impossible, metric_summary
from sink_jax.paper.parts import Part, unjudged
from sink_jax.report.markup import listed

_ENDED = {'diverged', 'not expressible'}  # states that no more training changes
MISSING, NOTHING = 'runs are missing', 'nothing was measured'


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

  @property
  def numbers(self) -> tuple[TrialStatistics, ...]:
    """The numbers as the report has them."""
    return tuple(TrialStatistics(trial, self.metric, summary.statistics())
                 for trial, summary in self.summaries.items())

  @property
  def words(self) -> str:
    """'Sink_1: default 18.18 %, batch-128 16.45 %', and what is missing."""
    metric = METRICS[self.metric]
    parts = [f'{trial} {summary.text(metric.sign)}' for trial, summary in self.summaries.items()]
    line = f'{metric.name}: {", ".join(parts)}' if parts else ''
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

  def part(self, trials: tuple[str, ...], level: float, above: bool, strict: bool = False,
           exact: bool = False, doubt: str = '') -> Part | None:
    """A part about a trial, or about one minus another seed by seed; None where they share no seed.

    level: on the scale of the metric.
    """
    summaries = {trial: self.summaries[trial] for trial in trials}
    first, *others = [summary.by_seed for summary in summaries.values()]
    values = {seed: value - sum(other[seed] for other in others) for seed, value in first.items()
              if all(seed in other for other in others)}
    # Seeds that diverged have no number; the mean of the others is of those that went well.
    diverged = [trial for trial in trials if trial in self.diverged]
    return unjudged(
        self.metric, trials, values, level, above, strict, exact,
        doubt=f'a seed of {listed(diverged)} diverged' if diverged else doubt,
        proxy=any(summary.proxy for summary in summaries.values()),
        never=tuple(f'{trial} with seed {seed}: never (at least '
                    f'{summary.metric.text(summary.by_seed[seed])})'
                    for trial, summary in summaries.items() for seed in summary.never)
    ) if values else None

  def incomplete(self, least: int) -> str:
    """Why not all that is asked is there, of `least` trials or more; '' if it is."""
    if self.pending or len(self.summaries) < least:
      return self.lacking
    gone = [trial for trial in self.diverged if trial not in self.summaries]
    return 'every run of a trial diverged' if gone else ''

  @property
  def lacking(self) -> str:
    """Why there is too little."""
    return MISSING if self.pending else NOTHING


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
