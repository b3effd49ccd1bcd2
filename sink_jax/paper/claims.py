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

from sink_jax.paper.aggregate import gather
from sink_jax.paper.collect import Group
from sink_jax.paper.criteria import MASSIVE, SINK, Check
from sink_jax.paper.metrics import summary
from sink_jax.report.markup import upper

HOLDS, FAILS, UNKNOWN = 'holds', 'does not hold', 'cannot be judged'
PLURAL = {HOLDS: 'hold', FAILS: 'do not hold', UNKNOWN: 'cannot be judged'}
_NATS = 0.1  # above the default's loss: the model learns less
_COUNTERPART = 'sigmoid-normalized'
_ABSENCE = 'counterpart'
# kind: trial, measure, level, what there has to be.
_LEVELS = {'sink': ('default', 'sink_1', SINK, 'sink'),
           'massive': ('default', 'massive', MASSIVE, 'massive activations'),
           _ABSENCE: (_COUNTERPART, 'sink_1', SINK, 'sink')}
# kind: its mark beside a claim, and what is presupposed.
PRESUPPOSED = {
    'sink': ('†', f'Sink_1 of the default run is at least {SINK} %'),
    'massive': ('‡', f'the largest hidden norm ratio of the default run is at least {MASSIVE}'),
    'ordinary text': ('§', 'the sequences of the default run are not edited, since an edit decides '
                      'where a sink stands'),
    _ABSENCE: ('¶', f'Sink_1 of {_COUNTERPART} is at least {SINK} %: that there is no sink '
                    'proves something only where its counterpart with normalisation has one')}


@dataclasses.dataclass(frozen=True)
class Claim:
  """statement: the paper's, in our words. presupposes: of other runs; see PRESUPPOSED."""

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


def judge(claim: Claim, group: Group) -> dict:
  """The verdict as a dict.

  key, budget, protocol, verdict, close (does it hang on a number close to its level?), why,
  reason (short; why it cannot be judged, else ''), and the deciding numbers.
  """
  reason, why = _lacking(claim, group, [kind for kind in claim.presupposes if kind != _ABSENCE])
  verdict, close, outcomes = UNKNOWN, False, []
  if not why:
    outcomes = [check.judge(group) for check in claim.checks]
    failed = [o for o in outcomes if o.held is False]
    if _ABSENCE in claim.presupposes and not failed:  # a sink that is there needs no counterpart
      reason, why = _lacking(claim, group, [_ABSENCE])
  if not why:
    open_ = [o for o in outcomes if o.held is None]
    verdict = FAILS if failed else UNKNOWN if open_ else HOLDS
    told = failed or open_ or outcomes
    close = all(o.close for o in failed) if failed else not open_ and any(
        o.close for o in outcomes)
    reason = '' if verdict != UNKNOWN else open_[0].reason
    why = '. '.join(dict.fromkeys(upper(o.words) for o in told if o.words))
  numbers = [number for o in outcomes for number in o.numbers]
  beside = '; '.join(f'{trial} ({words})' for trial in claim.trials if trial not in claim.asked
                     and group.done(trial) and (words := group.not_done(trial)))
  remarks = [f'Presupposed of those that are done; not in the means: {beside}'] if beside else []
  if _ABSENCE in claim.presupposes:
    words, losses = _learns_less(claim, group)
    remarks, numbers = [*remarks, words], numbers + losses
  why = '. '.join(filter(None, (why, *remarks)))
  return {'key': claim.key, 'budget': group.budget, 'protocol': group.protocol,
          'verdict': verdict, 'close': close, 'why': upper(why), 'reason': reason,
          'numbers': numbers}


def _lacking(claim, group, presupposes):
  """Why nothing can be judged, in short and at length; ('', '') if all is there."""
  strange = [f'{trial}: {words}' for trial in claim.trials
             if (words := group.incomparable.get(trial))]
  if strange:
    return 'runs are not comparable with the default run', (
        f'not comparable with the default run: {"; ".join(strange)}')
  for kind in presupposes:
    if kind == 'ordinary text':
      edits = {run.known_setup.settings['data.interventions'] for run in group.done('default')} - {''}
      if edits:
        return 'the sequences of the default run are edited', (
            f'at this budget the sequences of the default run are edited ({", ".join(edits)}), '
            'which decides where a sink stands')
      continue
    trial, measure, level, what = _LEVELS[kind]
    name = 'the baseline' if trial == 'default' else 'the counterpart with normalisation'
    found = summary(measure, group.done(trial))
    if found is None:
      why = (f'no {name.removeprefix("the ")}: {trial} is {group.status(trial)}'
             if not group.done(trial) else f'the {trial} run was not measured: {measure}')
      return f'{trial} is not there', why
    if found.mean < level:
      heading = found.measure.heading
      return (f'no {what} in {name} ({heading.replace(" %", "")} is '
              f'{found.measure.worded(found.mean)})',
              f'no {what} in {name}: {heading} of {trial} is {found.text()}')
  return '', ''


def _learns_less(claim, group):
  """The trials whose loss is much above the default's, in words and as numbers."""
  seen = gather(group, 'valid_loss', ['default', *claim.asked])
  base = seen.found.get('default')
  worse = {trial: found for trial, found in seen.found.items()
           if base is not None and found.mean > base.mean + _NATS}
  if not worse:
    return '', []
  told = lambda found: found.measure.text(found.mean)
  words = ', '.join(f'{trial} {told(found)}' for trial, found in worse.items())
  end = 'it also learns less' if len(worse) == 1 else 'they also learn less'
  return (f'Valid loss: {words} against {told(base)} of default: {end}',
          list(dataclasses.replace(seen, found={'default': base, **worse}).numbers()))
