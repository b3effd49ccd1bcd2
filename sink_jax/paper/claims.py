"""The paper's claims: what each asks of the runs, and whether they bear it out.

A claim holds where all parts of its checks are decided so by the spread of the seeds, does not hold
where one is decided against it, is undecided where seeds are too few or too unlike for either, and
cannot be judged where runs are missing, or what it presupposes is not there. Where the claim is
about changing or moving a sink, there has to be one in the default run of the same budget and
protocol. A claim about where a sink comes to stand on ordinary text needs a default run whose first
token is not fixed, as the smoke budget's is. That there is no sink says something only where the
same attention with normalisation has one. Runs that cannot be compared with the default run decide
nothing. One seed is no verdict, but where what is asked is an identity of the architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from sink_jax.paper.aggregate import aggregate
from sink_jax.paper.cells import TrialStatistics
from sink_jax.paper.collect import Group
from sink_jax.paper.criteria import MASSIVE, NATS, SINK, Check, Evidence, known_level
from sink_jax.paper.metrics import metric_summary
from sink_jax.paper.parts import Part, unjudged
from sink_jax.paper.spread import MIN_SEEDS, Spread
from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.markup import upper

HOLDS, FAILS, UNDECIDED, UNKNOWN = 'holds', 'does not hold', 'undecided', 'cannot be judged'
PLURAL = {HOLDS: 'hold', FAILS: 'do not hold', UNDECIDED: 'are undecided',
          UNKNOWN: 'cannot be judged'}
_COUNTERPART = 'sigmoid-normalized'
_ABSENCE = 'counterpart'
# A presupposed kind of activity: {kind: (trial, metric, level, what there has to be)}.
LEVELS = {'sink': ('default', 'sink_1', SINK, 'a sink'),
           'massive': ('default', 'massive', MASSIVE, 'massive activations'),
           _ABSENCE: (_COUNTERPART, 'sink_1', SINK, 'a sink')}
# {kind: (its mark at a claim, what is presupposed)}
PRESUPPOSED = {
    'sink': ('†', f'Sink_1 of the default run is at least {SINK} %'),
    'massive': ('‡', f'the largest hidden norm ratio of the default run is at least {MASSIVE}'),
    'ordinary text': ('§', 'the sequences of the default run are not edited, since an edit decides '
                      'where a sink stands'),
    _ABSENCE: ('¶', f'Sink_1 of {_COUNTERPART} is at least {SINK} %: that there is no sink '
                    'proves something only where its counterpart with normalisation has one')}


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the runs of a group say to a claim.

  verdict: HOLDS, FAILS, UNDECIDED or UNKNOWN. reason: why nothing can be judged, in short.
  needed: how many seeds would decide what is undecided, where that is known. few: whether what is
  undecided has fewer seeds than decide anything. numbers: of the trials that decide. parts: what
  was decided of them. name: of the group.
  """

  verdict: str
  why: str
  reason: str = ''
  needed: int | None = None
  few: bool = False
  numbers: Sequence[TrialStatistics] = ()
  parts: Sequence[Part] = ()
  name: str = ''
  budget: str = ''
  protocol: str = ''


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim of the paper, in other words.

  criterion: what its checks decide together, for a reader of the paper. presupposes: of other runs;
  see PRESUPPOSED. verdicts: of the groups of runs that were judged.
  """

  key: str
  section: str
  statement: str
  criterion: str
  checks: tuple[Check, ...] = dataclasses.field(metadata=UNWRITTEN)
  presupposes: tuple[str, ...] = ('sink',)
  verdicts: Sequence[Verdict] = ()

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
    before = [LEVELS[kind][0] if kind in LEVELS else 'default' for kind in self.presupposes]
    return tuple(dict.fromkeys((*before, *self.asked)))


def judge(claim: Claim, group: Group, spread: Spread | None) -> Verdict:
  """What the runs of a group say to a claim, with the numbers that decide.

  spread: of `spread_of`; None takes every mean for the truth, as of the paper's own numbers, which
  were published without their spread.
  """
  found = _presupposed(claim, group, spread, [kind for kind in claim.presupposes
                                              if kind != _ABSENCE])
  answers: list[Evidence] = []
  if found is None or found.verdict != UNKNOWN:
    answers = _answers(claim, group, spread)
    fails = any(part.held is False for answer in answers for part in answer.parts)
    # A sink that is there needs no counterpart.
    if _ABSENCE in claim.presupposes and not fails and found is None:
      found = _presupposed(claim, group, spread, [_ABSENCE])
  verdict = _verdict(answers)
  # What is undecided of the presupposed matters where there is something to judge at all.
  if found and (found.verdict == UNKNOWN or verdict.verdict != UNKNOWN):
    verdict = found
  numbers = [number for answer in answers for number in answer.numbers]
  not_done = '; '.join(f'{trial} ({words})' for trial in claim.trials if trial not in claim.asked
                       and group.done(trial) and (words := group.not_done(trial)))
  remarks = [f'Presupposed of those that are done; not in the means: {not_done}'
             ] if not_done else []
  if _ABSENCE in claim.presupposes:
    words, losses = _learns_less(claim, group)
    remarks, numbers = [*remarks, words], [*numbers, *losses]
  return dataclasses.replace(
      verdict, name=group.name, budget=group.budget, protocol=group.protocol, numbers=numbers,
      why=upper('. '.join(filter(None, (verdict.why, *remarks)))),
      parts=[part for answer in answers for part in answer.parts])


def _answers(claim: Claim, group: Group, spread: Spread | None) -> list[Evidence]:
  """What answers each check, its parts decided as parts of the whole claim."""
  answers = [check.evidence(group, spread) for check in claim.checks]
  count = sum(len(answer.parts) for answer in answers)
  return [dataclasses.replace(answer, parts=[part.judge(spread, count) for part in answer.parts])
          for answer in answers]


def _verdict(answers: Sequence[Evidence]) -> Verdict:
  """One part decided against the claim is enough; a reason, or an open part, keeps it open."""
  with_part = lambda held: [answer for answer in answers
                            if any(part.held is held for part in answer.parts)]
  said = lambda deciding: '. '.join(dict.fromkeys(
      upper(answer.words) for answer in deciding if answer.words))
  # Whatever the others would say when their runs are there.
  if failed := with_part(False):
    return Verdict(FAILS, said(failed))
  if unknown := [answer for answer in answers if answer.reason]:
    return Verdict(UNKNOWN, said(unknown), unknown[0].reason)
  if undecided := with_part(None):
    open_parts = [part for answer in undecided for part in answer.parts if part.held is None]
    return _open(said(undecided), _needed(open_parts), min(part.n for part in open_parts),
                 [part.doubt for part in open_parts])
  return Verdict(HOLDS, said(answers))


def _open(words: str, needed: int | None, seeds: int, doubts: Iterable[str]) -> Verdict:
  """Undecided, with what would decide it. seeds: how many there are."""
  few = seeds < MIN_SEEDS
  would = f'{MIN_SEEDS} seeds are the least that decide anything' if few else ''
  if needed:
    would += f', and about {needed} of this spread would decide' if few else (
        f'About {needed} seeds would decide')
  return Verdict(UNDECIDED, '. '.join(filter(None, (
      words, would, *map(upper, dict.fromkeys(doubts))))), needed=needed, few=few)


def _needed(parts: Sequence[Part]) -> int | None:
  """How many seeds would decide a claim by its open parts, if means and spreads stay so."""
  # The first part on the wrong side decides against the claim; all on the right one decide for it.
  wrong = [part.needed for part in parts if not part.fits]
  if wrong:
    return min((needed for needed in wrong if needed is not None), default=None)
  right = [part.needed for part in parts]
  return None if None in right else max((needed for needed in right if needed is not None))


def _presupposed(claim: Claim, group: Group, spread: Spread | None, kinds: Sequence[str]
                 ) -> Verdict | None:
  """Why nothing can be judged, or what is presupposed is undecided itself; None if neither."""
  # First, since a run on other data or of another shape may differ from the default for that reason
  # alone.
  strange = [f'{trial}: {words}' for trial in claim.trials
             if (words := group.incomparable.get(trial))]
  if strange:
    return Verdict(UNKNOWN, f'not comparable with the default run: {"; ".join(strange)}',
                   'runs are not comparable with the default run')
  undecided = None
  for kind in kinds:
    if kind == 'ordinary text':
      # Decided by the config and not by the name of the budget, which a person may have changed.
      edits = {run.known_setup.settings['data.interventions']
               for run in group.done('default')} - {''}
      if edits:
        return Verdict(UNKNOWN, (
            f'at this budget the sequences of the default run are edited ({", ".join(edits)}), '
            'which decides where a sink stands'), 'the sequences of the default run are edited')
      continue
    found = _absent(group, spread, *LEVELS[kind])
    if found and found.verdict == UNKNOWN:
      return found
    undecided = undecided or found
  return undecided


def _absent(group: Group, spread: Spread | None, trial: str, metric: str, least: float,
            what: str) -> Verdict | None:
  """Why a trial may not have what is presupposed of it; None if it has."""
  name = 'the baseline' if trial == 'default' else 'the counterpart with normalisation'
  runs = group.done(trial)
  summary = metric_summary(metric, runs)
  if summary is None:
    return Verdict(UNKNOWN, (
        f'no {name.removeprefix("the ")}: {trial} is {group.status(trial)}' if not runs
        else f'the {trial} run was not measured: {metric}'), f'{trial} is not there')
  of = summary.metric
  level = of.scaled(known_level(metric, least, runs))
  part = unjudged(metric, (trial,), summary.by_seed, level, True).judge(spread, 1)
  nothing = f'no {what.removeprefix("a ")} in {name}'
  words = f'{of.heading} of {trial} is {summary.text()}'
  if part.held is None:
    return _open(f'it is undecided whether {name} has {what}: {words}', part.needed, part.n,
                 [part.doubt])
  return None if part.held else Verdict(
      UNKNOWN, f'{nothing}: {words}',
      f'{nothing} ({of.name} is {of.text(summary.mean)}{of.sign})')


def _learns_less(claim: Claim, group: Group) -> tuple[str, tuple[TrialStatistics, ...]]:
  """The trials whose loss is much above the default's, in words and as numbers."""
  # A model that learns less may lack a sink for that reason alone.
  losses = aggregate(group, 'valid_loss', ['default', *claim.asked])
  base = losses.summaries.get('default')
  if base is None:
    return '', ()
  worse = {trial: summary for trial, summary in losses.summaries.items()
           if summary.mean > base.mean + NATS}
  if not worse:
    return '', ()
  words = ', '.join(f'{trial} {summary.metric.text(summary.mean)}'
                    for trial, summary in worse.items())
  end = 'it also learns less' if len(worse) == 1 else 'they also learn less'
  return (f'Valid loss: {words} against {base.metric.text(base.mean)} of default: {end}',
          dataclasses.replace(losses, summaries={'default': base, **worse}).numbers)
