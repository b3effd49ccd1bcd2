"""The paper's claims: what each asks of the runs, and whether they bear it out.

A claim holds where all of its checks hold, does not hold where one of them fails, and
cannot be judged otherwise. Where the claim is about changing or moving a sink, there has to
be one in the default run of the same budget and protocol. A claim about where a sink comes to
stand on ordinary text needs a default run whose first token is not fixed, as the smoke
budget's is. That there is no sink says something only where the same attention with
normalisation has one. Runs that cannot be compared with the default run decide nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sink_jax.paper.aggregate import aggregate
from sink_jax.paper.cells import TrialStatistics
from sink_jax.paper.collect import Group
from sink_jax.paper.content import Verdict
from sink_jax.paper.criteria import MASSIVE, SINK, Check
from sink_jax.paper.metrics import metric_summary
from sink_jax.report.markup import upper

HOLDS, FAILS, UNKNOWN = 'holds', 'does not hold', 'cannot be judged'
PLURAL = {HOLDS: 'hold', FAILS: 'do not hold', UNKNOWN: 'cannot be judged'}
_NATS = 0.1  # above the default's loss: the model learns less
_COUNTERPART = 'sigmoid-normalized'
_ABSENCE = 'counterpart'
# A presupposed kind of activity: {kind: (trial, metric, level, what there has to be)}.
_LEVELS = {'sink': ('default', 'sink_1', SINK, 'sink'),
           'massive': ('default', 'massive', MASSIVE, 'massive activations'),
           _ABSENCE: (_COUNTERPART, 'sink_1', SINK, 'sink')}
# {kind: (its mark at a claim, what is presupposed)}
PRESUPPOSED = {
    'sink': ('†', f'Sink_1 of the default run is at least {SINK} %'),
    'massive': ('‡', f'the largest hidden norm ratio of the default run is at least {MASSIVE}'),
    'ordinary text': ('§', 'the sequences of the default run are not edited, since an edit decides '
                      'where a sink stands'),
    _ABSENCE: ('¶', f'Sink_1 of {_COUNTERPART} is at least {SINK} %: that there is no sink '
                    'proves something only where its counterpart with normalisation has one')}


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim of the paper, in other words. presupposes: of other runs; see PRESUPPOSED."""

  key: str
  section: str
  statement: str
  checks: tuple[Check, ...]
  presupposes: tuple[str, ...] = ('sink',)

  @property
  def criterion(self) -> str:
    """What is asked, in words."""
    return '; '.join(check.criterion for check in self.checks) + '.'

  @property
  def marks(self) -> str:
    """Of what it presupposes."""
    return ''.join(mark for kind, (mark, _) in PRESUPPOSED.items() if kind in self.presupposes)

  @property
  def asked(self) -> tuple[str, ...]:
    """The trials of its checks."""
    return tuple(dict.fromkeys(trial for check in self.checks for trial in check.asked))

  @property
  def trials(self) -> tuple[str, ...]:
    """All that the verdict hangs on."""
    before = [_LEVELS[kind][0] if kind in _LEVELS else 'default' for kind in self.presupposes]
    return tuple(dict.fromkeys((*before, *self.asked)))


def judge(claim: Claim, group: Group) -> Verdict:
  """What the runs of a group say to a claim, with the numbers that decide."""
  reason, why = _lacking(claim, group, [kind for kind in claim.presupposes if kind != _ABSENCE])
  verdict, close, outcomes = UNKNOWN, False, []
  failed, undecided = [], []
  if not why:
    outcomes = [check.judge(group) for check in claim.checks]
    failed = [outcome for outcome in outcomes if outcome.held is False]
    undecided = [outcome for outcome in outcomes if outcome.held is None]
    if _ABSENCE in claim.presupposes and not failed:  # a sink that is there needs no counterpart
      reason, why = _lacking(claim, group, [_ABSENCE])
  if not why:
    # One check that fails refutes the claim, whatever the others would say when their runs are
    # there.
    verdict = FAILS if failed else UNKNOWN if undecided else HOLDS
    deciding = failed or undecided or outcomes
    # One failure far from its level is enough to be sure; one close number is enough for doubt.
    close = all(outcome.close for outcome in failed) if failed else not undecided and any(
        outcome.close for outcome in outcomes)
    reason = '' if verdict != UNKNOWN else undecided[0].reason
    why = '. '.join(dict.fromkeys(upper(outcome.words) for outcome in deciding if outcome.words))
  numbers = [number for outcome in outcomes for number in outcome.numbers]
  not_done = '; '.join(f'{trial} ({words})' for trial in claim.trials if trial not in claim.asked
                       and group.done(trial) and (words := group.not_done(trial)))
  remarks = [f'Presupposed of those that are done; not in the means: {not_done}'
             ] if not_done else []
  if _ABSENCE in claim.presupposes:
    words, losses = _learns_less(claim, group)
    remarks, numbers = [*remarks, words], [*numbers, *losses]
  why = '. '.join(filter(None, (why, *remarks)))
  return Verdict(group.name, group.budget, group.protocol, verdict, close, upper(why), reason,
                 numbers)


def _lacking(claim: Claim, group: Group, presupposes: Sequence[str]) -> tuple[str, str]:
  """Why nothing can be judged, in short and at length; ('', '') if all is there."""
  # First, since a run on other data or of another shape may differ from the default for that reason
  # alone.
  strange = [f'{trial}: {words}' for trial in claim.trials
             if (words := group.incomparable.get(trial))]
  if strange:
    return 'runs are not comparable with the default run', (
        f'not comparable with the default run: {"; ".join(strange)}')
  for kind in presupposes:
    if kind == 'ordinary text':
      # Decided by the config and not by the name of the budget, which a person may have changed.
      edits = {run.known_setup.settings['data.interventions']
               for run in group.done('default')} - {''}
      if edits:
        return 'the sequences of the default run are edited', (
            f'at this budget the sequences of the default run are edited ({", ".join(edits)}), '
            'which decides where a sink stands')
      continue
    trial, metric, level, what = _LEVELS[kind]
    name = 'the baseline' if trial == 'default' else 'the counterpart with normalisation'
    summary = metric_summary(metric, group.done(trial))
    if summary is None:
      why = (f'no {name.removeprefix("the ")}: {trial} is {group.status(trial)}'
             if not group.done(trial) else f'the {trial} run was not measured: {metric}')
      return f'{trial} is not there', why
    if summary.mean < level:
      heading = summary.metric.heading
      return (f'no {what} in {name} ({heading.replace(" %", "")} is '
              f'{summary.metric.worded(summary.mean)})',
              f'no {what} in {name}: {heading} of {trial} is {summary.text()}')
  return '', ''


def _learns_less(claim: Claim, group: Group) -> tuple[str, tuple[TrialStatistics, ...]]:
  """The trials whose loss is much above the default's, in words and as numbers."""
  # A model that learns less may lack a sink for that reason alone.
  losses = aggregate(group, 'valid_loss', ['default', *claim.asked])
  base = losses.summaries.get('default')
  if base is None:
    return '', ()
  worse = {trial: summary for trial, summary in losses.summaries.items()
           if summary.mean > base.mean + _NATS}
  if not worse:
    return '', ()
  words = ', '.join(f'{trial} {summary.metric.text(summary.mean)}'
                    for trial, summary in worse.items())
  end = 'it also learns less' if len(worse) == 1 else 'they also learn less'
  return (f'Valid loss: {words} against {base.metric.text(base.mean)} of default: {end}',
          dataclasses.replace(losses, summaries={'default': base, **worse}).numbers())
