"""The paper's claims: what each asks of the runs, and whether they bear it out.

A claim holds where all parts of its checks are decided so by the spread of the seeds, does not hold
where one is decided against it, is undecided where seeds are too few or too unlike for either, and
cannot be judged where runs are missing, or what it presupposes (`PRESUPPOSED`) is not there. Runs
that cannot be compared with the default run decide nothing. One seed is no verdict, but where what
is asked is an identity of the architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from sink_jax.paper.collect import SYNTHETIC, Group
from sink_jax.paper.criteria import MASSIVE, NATS, OPEN_SINK, SINK, Check, presence
from sink_jax.paper.metrics import metric_summary
from sink_jax.paper.parts import Evidence, Part, TrialStatistics
from sink_jax.paper.spread import MIN_SEEDS, Spread
from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.markup import upper

HOLDS, FAILS, UNDECIDED, UNKNOWN = 'holds', 'does not hold', 'undecided', 'cannot be judged'
PLURAL = {HOLDS: 'hold', FAILS: 'do not hold', UNDECIDED: 'are undecided',
          UNKNOWN: 'cannot be judged'}
_COUNTERPART = 'sigmoid-normalized'
_ABSENCE, _ON_TEXT = 'counterpart', 'ordinary text'
MORE = 2  # seeds of a second look, which the simulation of false verdicts includes
MOST = 3  # seeds that a trial may have before it; with five it has been looked at twice
# A presupposed kind of activity: {kind: (trial, metric, level, what there has to be)}.
LEVELS = {'sink': ('default', 'sink_1', SINK, 'a sink'),
           'massive': ('default', 'massive', MASSIVE, 'massive activations'),
           _ABSENCE: (_COUNTERPART, 'sink_1', SINK, 'a sink')}
# {kind: (its mark at a claim, what is presupposed)}
PRESUPPOSED = {
    'sink': ('†', f'Sink_1 of the default run is at least {SINK} %'),
    'massive': ('‡', f'the largest hidden norm ratio of the default run is at least {MASSIVE}'),
    _ON_TEXT: ('§', 'the sequences of the default run are not edited, since an edit decides where '
                    'a sink stands'),
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


@dataclasses.dataclass(frozen=True)
class SecondLook:
  """The runs that a second look at the undecided claims of a group takes; see `second_look`.

  budget, protocol, trials: as labels of runs have them. seeds: of the new runs of each trial.
  """

  budget: str
  protocol: str
  trials: Sequence[str]
  seeds: Sequence[int]


def judge(claim: Claim, group: Group, spread: Spread | None) -> Verdict:
  """What the runs of a group say to a claim, with the numbers that decide.

  spread: of `spread_of`; None takes every mean for the truth, as of the paper's own numbers, which
  were published without their spread.
  """
  found = _presupposed(claim, group, spread)
  answers: list[Evidence] = []
  if found is None or found.verdict != UNKNOWN:
    answers = [check.evidence(group, spread) for check in claim.checks]
    count = sum(len(answer.parts) for answer in answers)
    answers = [dataclasses.replace(answer, parts=[part.judge(spread, count) for part in
                                                  answer.parts]) for answer in answers]
  verdict, parts = _verdict(answers), [part for answer in answers for part in answer.parts]
  # A sink that is there needs no counterpart.
  if _ABSENCE in claim.presupposes and found is None and verdict.verdict != FAILS:
    found = _absent(group, spread, _ABSENCE)
  # What is undecided of the presupposed matters where there is something to judge at all.
  if found and (found.verdict == UNKNOWN or verdict.verdict != UNKNOWN):
    verdict = found
  numbers = [number for answer in answers for number in answer.numbers]
  not_done = '; '.join(f'{trial} ({words})' for trial in claim.trials if trial not in claim.asked
                       and group.done(trial) and (words := group.not_done(trial)))
  remarks = [verdict.why, f'Presupposed of those that are done; not in the means: {not_done}'
             if not_done else '']
  if _ABSENCE in claim.presupposes:
    words, losses = _learns_less(claim, group)
    remarks, numbers = [*remarks, words], [*numbers, *losses]
  return dataclasses.replace(verdict, name=group.name, numbers=numbers, parts=parts,
                             why=upper('. '.join(filter(None, remarks))))


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
    return _open(said(undecided), [part for answer in undecided for part in answer.parts
                                   if part.held is None])
  return Verdict(HOLDS, said(answers))


def _open(words: str, parts: Sequence[Part]) -> Verdict:
  """Undecided by the open parts of a claim, with what would decide it."""
  # If means and spreads stay so, the first part on the wrong side decides against the claim; all on
  # the right one decide for it.
  wrong = [part for part in parts if not part.fits]
  known = [part.needed for part in wrong or parts if part.needed is not None]
  if wrong:
    needed = min(known, default=None)
  else:
    needed = max(known) if len(known) == len(parts) else None
  few, would = min(part.n for part in parts) < MIN_SEEDS, ''
  if few:
    would = f'{MIN_SEEDS} seeds are the least that decide anything' + (
        f', and about {needed} of this spread would decide' if needed else '')
  elif needed:
    would = f'About {needed} seeds would decide'
  doubts = map(upper, dict.fromkeys(part.doubt for part in parts))
  return Verdict(UNDECIDED, '. '.join(filter(None, (words, would, *doubts))), needed=needed,
                 few=few)


def _presupposed(claim: Claim, group: Group, spread: Spread | None) -> Verdict | None:
  """Why nothing can be judged, or what is presupposed is undecided itself; None if neither."""
  # First, since a run on other data or of another shape may differ from the default for that reason
  # alone.
  strange = [f'{trial}: {words}' for trial in claim.trials
             if (words := group.incomparable.get(trial))]
  if strange:
    return Verdict(UNKNOWN, f'not comparable with the default run: {"; ".join(strange)}',
                   'runs are not comparable with the default run')
  found = [_edited(group) if kind == _ON_TEXT else _absent(group, spread, kind)
           for kind in claim.presupposes if kind != _ABSENCE]
  # What is not there counts before what is undecided.
  return min(filter(None, found), key=lambda verdict: verdict.verdict != UNKNOWN, default=None)


def _edited(group: Group) -> Verdict | None:
  """Why the default run has no ordinary text; None if it has."""
  # Decided by the config and not by the name of the budget, which a person may have changed.
  edits = {run.known_setup.settings['data.interventions'] for run in group.done('default')} - {''}
  if not edits:
    return None
  return Verdict(UNKNOWN, 'at this budget the sequences of the default run are edited '
                 f'({", ".join(edits)}), which decides where a sink stands',
                 'the sequences of the default run are edited')


def _absent(group: Group, spread: Spread | None, kind: str) -> Verdict | None:
  """Why a trial may not have what is presupposed of it; None if it has."""
  trial, metric, least, what = LEVELS[kind]
  name = 'the baseline' if trial == 'default' else 'the counterpart with normalisation'
  runs = group.done(trial)
  summary, part = metric_summary(metric, runs), presence(group, trial, metric, least, spread)
  if summary is None or part is None:
    return Verdict(UNKNOWN, (
        f'no {name.removeprefix("the ")}: {trial} is {group.status(trial)}' if not runs
        else f'the {trial} run was not measured: {metric}'), f'{trial} is not there')
  of, nothing = summary.metric, f'no {what.removeprefix("a ")} in {name}'
  words = f'{of.heading} of {trial} is {summary.text}'
  if part.held is None:
    return _open(f'it is undecided whether {name} has {what}: {words}', [part])
  return None if part.held else Verdict(
      UNKNOWN, f'{nothing}: {words}',
      f'{nothing} ({of.name} is {of.text(summary.mean)}{of.sign})')


def _learns_less(claim: Claim, group: Group) -> tuple[str, list[TrialStatistics]]:
  """The trials whose loss is much above the default's, in words and as numbers."""
  # A model that learns less may lack a sink for that reason alone.
  losses = {trial: summary for trial in ('default', *claim.asked)
            if (summary := metric_summary('valid_loss', group.done(trial)))}
  base = losses.pop('default', None)
  worse = {trial: summary for trial, summary in losses.items()
           if base and summary.mean > base.mean + NATS}
  if base is None or not worse:
    return '', []
  text = base.metric.text
  words = ', '.join(f'{trial} {text(summary.mean)}' for trial, summary in worse.items())
  end = 'it also learns less' if len(worse) == 1 else 'they also learn less'
  return (f'Valid loss: {words} against {text(base.mean)} of default: {end}',
          [TrialStatistics(trial, 'valid_loss', summary)
           for trial, summary in {'default': base, **worse}.items()])


def second_look(asked: Iterable[tuple[Claim, Verdict]], group: Group) -> SecondLook | None:
  """The trials of undecided claims with new seeds for them; None if there are none.

  All trials get the same seeds, since differences are paired by seed. Trials that have more seeds
  than three are left as they are: looking until something is decided would decide falsely in the
  end. So a second look that was interrupted is finished with the report that it began with, and not
  with a new one.
  """
  # Of all runs, whatever became of them.
  seeds = {trial: {run.setup.seed for run in group.runs(trial) if run.setup}
           for claim, verdict in asked
           if verdict.verdict == UNDECIDED and not _hopeless(verdict) for trial in claim.trials}
  seeds = {trial: of for trial, of in seeds.items() if 0 < len(of) <= MOST}
  if not seeds:
    return None
  first = 1 + max(max(of) for of in seeds.values())
  # Labels have the names of the synthetic trials with their prefix, and no budget.
  prefix, budget = ('', group.budget) if group.protocol else (SYNTHETIC, '')
  return SecondLook(budget, group.protocol, [prefix + trial for trial in seeds],
                    list(range(first, first + MORE)))


def _hopeless(verdict: Verdict) -> bool:
  """Whether no further seed would decide it.

  Not where seeds ended unlike each other or diverged, nor where no finite number of seeds of this
  mean and spread would, as where the mean lies on its level.
  """
  if verdict.needed is not None:
    return False
  open_parts = [part for part in verdict.parts if part.held is None]
  unlike = lambda part: part.metric == 'converges' and len(set(part.values)) > 1
  undecided_sink = lambda part: part.doubt.startswith(OPEN_SINK)
  if any(unlike(part) or part.doubt and not undecided_sink(part) for part in open_parts):
    return True
  # Of fewer than three seeds too little is known to say how many would do.
  return not (verdict.few or any(map(undecided_sink, open_parts)))
