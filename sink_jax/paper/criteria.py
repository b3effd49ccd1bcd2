"""Checks of claims: each asks something of runs, and finds the numbers that decide it.

A check is made of parts, each a mean over seeds on one side of a level (`parts`); `claims`
decides them together, since the chance of a false verdict is divided among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, metric_summary, window_size
from sink_jax.paper.parts import Aggregate, Evidence, Part, aggregate, unjudged
from sink_jax.paper.spread import Spread
from sink_jax.report.markup import upper
from sink_jax.report.records import RunRecord

SINK, NO_SINK = 10, 5  # percent of heads: from where there is a sink, below which there is none
MASSIVE = 2  # hidden norm ratio from which activations are massive
POINTS = 2  # points of Sink_k that are a difference
NATS = 0.1  # of loss that are a difference
NOISE = 1.0  # points that an ordered row may go the other way
# Rates that are all near 100 % have reached a ceiling: what orders them is noise.
_FULL = 95  # percent
OPEN_SINK = 'it is undecided'  # how the doubt begins that further seeds may remove


class Check:
  """What is asked of runs of `trials`; `evidence` has what answers it."""

  trials: tuple[str, ...]

  @property
  def asked(self) -> tuple[str, ...]:
    """Every trial that the answer hangs on."""
    return self.trials

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    """What the runs of a group say. spread: None takes means for the truth."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Every(Check):
  """A metric of each trial is at least, or below, a level.

  some: one measured trial is enough, though others are still to come. sinks: only trials that have
  a sink on the first token count. exact: what is asked is an identity of the architecture, which no
  seed changes, so that one run shows it.
  """

  metric: str
  trials: tuple[str, ...]
  at_least: float | None = None
  below: float | None = None
  some: bool = False
  sinks: bool = False
  exact: bool = False

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    measured, above, parts = aggregate(group, self.metric, self.trials), self.below is None, []
    level = self.at_least if self.below is None else self.below
    assert level is not None, 'a check needs at_least or below'
    for trial in list(measured.summaries):
      sink = presence(group, trial, 'sink_1', SINK, spread) if self.sinks else None
      if self.sinks and (sink is None or sink.held is False):
        del measured.summaries[trial]
        measured.left_out.append(f'{trial} (no sink)')
        continue
      least = METRICS[self.metric].scaled(known_level(self.metric, level, group.done(trial)))
      if part := measured.part((trial,), least, above, not above):
        doubt = f'{OPEN_SINK} whether {trial} has a sink' if sink and sink.held is None else ''
        parts.append(dataclasses.replace(part, exact=self.exact, doubt=part.doubt or doubt))
    # A counterexample decides at once; that all hold is known when none is missing.
    return measured.evidence(parts, 0 if self.some and parts else 1)


@dataclasses.dataclass(frozen=True)
class Ordered(Check):
  """A metric falls, or rises, along trials, by a margin in all.

  margin: on the scale of the metric, so that of a ratio it is the logarithm of a factor. ends: only
  the first and the last that are measured count.
  """

  metric: str
  trials: tuple[str, ...]
  margin: float
  falls: bool = True
  ends: bool = False

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    measured = aggregate(group, self.metric, self.trials)
    # An order is a matter of all its trials: one that is missing may stand anywhere in it.
    if measured.pending or len(measured.summaries) < 2:
      return measured.evidence((), 2)
    known, rate = list(measured.summaries), METRICS[self.metric].unit == 'percent'
    if rate and all(summary.mean >= _FULL for summary in measured.summaries.values()):
      return measured.evidence((), 0, f'all rates are {_FULL} % or more, which leaves no room for '
                               'an order', ': no room for an order')
    noise = NOISE if rate else 0.05 * self.margin
    steps = [] if self.ends or len(known) == 2 else [
        (a, b, -noise, False) for a, b in pairwise(known)]
    # Also with a margin of 0 the ends must differ: equal values are no order.
    steps.append((known[0], known[-1], self.margin, not self.margin))
    return measured.evidence([measured.part((a, b) if self.falls else (b, a), least, True, strict)
                              for a, b, least, strict in steps], 2)


@dataclasses.dataclass(frozen=True)
class Near(Check):
  """A metric of each trial lies within a margin of the default run's.

  either_side: False where it may lie below that by any amount.
  """

  metric: str
  trials: tuple[str, ...]
  margin: float
  either_side: bool = True

  @property
  def asked(self) -> tuple[str, ...]:
    return ('default', *self.trials)

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    measured = aggregate(group, self.metric, self.asked)
    if 'default' not in measured.summaries:
      return measured.evidence((), len(self.asked))
    sides = [(self.margin, False)]
    if self.either_side:
      sides.append((-self.margin, True))
    return measured.evidence([measured.part((trial, 'default'), end, above)
                              for trial in measured.summaries if trial != 'default'
                              for end, above in sides], 2)


@dataclasses.dataclass(frozen=True)
class Trains(Check):
  """Every seed of each trial reaches its last step, or (diverges) none does.

  within: by how many nats the valid loss may lie above that of the default run at most.
  """

  trials: tuple[str, ...]
  diverges: bool = False
  within: float | None = None

  @property
  def asked(self) -> tuple[str, ...]:
    return self.trials if self.within is None else ('default', *self.trials)

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    found = Aggregate('converges', (), {
        trial: summary for trial in self.trials
        if (summary := metric_summary('converges', group.runs(trial)))})
    for trial in self.trials:
      # A seed under way may still end either way; a trial that the budget leaves out never does.
      states = {run.status for run in group.runs(trial)}
      if not states or not states <= {'done', 'diverged'} and states != {'not expressible'}:
        found.pending.append(trial)
    parts = [found.part((trial,), 0.5, not self.diverges) for trial in found.summaries]
    words = ', '.join(f'{trial} ({group.status(trial)})' for trial in self.trials)
    ends = dataclasses.replace(found.evidence(parts, 1), words=f'runs: {words}')
    # The loss of a run that diverged is no number: how it ended says all.
    if self.within is None or not all(part.fits for part in ends.parts):
      return ends
    losses = Near('valid_loss', self.trials, self.within, either_side=False).evidence(group, spread)
    return Evidence('. '.join(filter(None, (ends.words, upper(losses.words)))),
                    [*ends.parts, *losses.parts], [*ends.numbers, *losses.numbers],
                    ends.reason or losses.reason)


@dataclasses.dataclass(frozen=True)
class Onset(Check):
  """A sink in the largest window and none in the smallest, of those that could show one."""

  trials: tuple[str, ...]

  def evidence(self, group: Group, spread: Spread | None) -> Evidence:
    measured = aggregate(group, 'sink_1', self.trials)
    if measured.pending:
      return measured.evidence((), 1)
    sizes: dict[str, int] = {}
    for trial in measured.summaries:
      run = group.done(trial)[0]
      size, probe = window_size(run), run.known_setup.experiment.probe
      # The mean weight of a key over the probe is at most the share of queries that see it.
      if size is not None and size > probe.epsilon * probe.length:
        sizes[trial] = size
    # A single window has no smaller one to compare it with.
    if len(set(sizes.values())) < 2:
      return measured.evidence((), 0, 'windows are too small to show a sink',
                               f': {len(sizes)} of the windows can show a sink at all')
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    sink = known_level('sink_1', SINK, group.done(large))
    return measured.evidence([measured.part((small,), NO_SINK, False, True),
                              measured.part((large,), sink, True)],
                             words=f': smallest {sizes[small]}, largest {sizes[large]} tokens')


def known_level(metric: str, level: float, runs: Sequence[RunRecord]) -> float:
  """The level, or what the metric is in these models before training, where that is more.

  The latter is the 99th percentile of rows of probes that have one. It raises the levels of a sink
  and of massive activations, not those below which there is none.
  """
  key = METRICS[metric].null
  if level not in (SINK, MASSIVE) or not key:
    return level
  return max([level, *(run.probe.nulls[key] for run in runs if run.probe and key in
                       run.probe.nulls)])


def presence(group: Group, trial: str, metric: str, least: float, spread: Spread | None
             ) -> Part | None:
  """Whether a metric of a trial is at least a known level; None where it was not measured."""
  runs = group.done(trial)
  summary = metric_summary(metric, runs)
  if summary is None:
    return None
  level = METRICS[metric].scaled(known_level(metric, least, runs))
  return unjudged(metric, (trial,), summary.by_seed, level, True).judge(spread, 1)
