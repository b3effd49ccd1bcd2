"""The paper's claims: what each asks of the runs, and whether they bear it out.

A claim holds where all of its checks hold, does not hold where one of them fails, and
cannot be judged otherwise. Where the claim is about changing or moving a sink, there has to
be one in the default run of the same budget and protocol. A claim about where a sink comes to
stand on ordinary text needs a default run whose first token is not fixed, as the smoke
budget's is.
"""

from __future__ import annotations

import dataclasses

from sink_jax.report.markup import upper
from sink_jax.report.paper.collect import Group
from sink_jax.report.paper.judging import MASSIVE, SINK, Check
from sink_jax.report.paper.measures import summary

HOLDS, FAILS, UNKNOWN = 'holds', 'does not hold', 'cannot be judged'
PLURAL = {HOLDS: 'hold', FAILS: 'do not hold', UNKNOWN: 'cannot be judged'}
_LEVELS = {'sink': ('sink_1', SINK, 'sink'),
           'massive': ('massive', MASSIVE, 'massive activations')}
_PRESUPPOSED = {
    'sink': f'Sink_1 of the default run is at least {SINK} %',
    'massive': f'the largest hidden norm ratio of the default run is at least {MASSIVE}',
    'ordinary text': 'the sequences of the default run are not edited'}


@dataclasses.dataclass(frozen=True)
class Claim:
  """statement: the paper's, in our words. presupposes: of the default; see _PRESUPPOSED."""

  key: str
  section: str
  statement: str
  checks: tuple[Check, ...]
  presupposes: tuple[str, ...] = ('sink',)

  @property
  def criterion(self) -> str:
    """What is asked, in words."""
    line = '; '.join(check.criterion for check in self.checks)
    before = [_PRESUPPOSED[kind] for kind in self.presupposes]
    return line + (f'. Presupposes that {" and that ".join(before)}' if before else '') + '.'


def judge(claim: Claim, group: Group) -> dict:
  """The verdict as a dict: key, budget, protocol, verdict, why, and the deciding numbers."""
  why, verdict, outcomes = _lacking(claim, group), UNKNOWN, []
  if not why:
    outcomes = [check.judge(group) for check in claim.checks]
    failed = [o for o in outcomes if o.held is False]
    open_ = [o for o in outcomes if o.held is None]
    verdict = FAILS if failed else UNKNOWN if open_ else HOLDS
    told = failed or open_ or outcomes
    why = '. '.join(dict.fromkeys(upper(o.words) for o in told if o.words))
  return {'key': claim.key, 'budget': group.budget, 'protocol': group.protocol,
          'verdict': verdict, 'why': upper(why),
          'numbers': [number for o in outcomes for number in o.numbers]}


def _lacking(claim, group):
  """Why nothing can be judged: what the default run lacks; '' if it lacks nothing."""
  for kind in claim.presupposes:
    if kind == 'ordinary text':
      edits = {run['config']['data']['interventions'] for run in group.done('default')} - {''}
      if edits:
        return (f'at this budget the sequences of the default run are edited ({", ".join(edits)}), '
                'which decides where a sink stands')
      continue
    measure, level, what = _LEVELS[kind]
    found = summary(measure, group.done('default'))
    if found is None:
      return (f'no baseline: default is {group.status("default")}' if not group.done('default')
              else f'the default run was not measured: {measure}')
    if found.mean < level:
      return f'no {what} in the baseline: {found.measure.heading} of default is {found.text()}'
  return ''

