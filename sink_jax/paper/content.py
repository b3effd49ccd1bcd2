"""The content of the report of the paper as typed values, which `page` and `markdown` show.

The `as_dict` of each is its form in report.json, whose keys are fixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.paper.cells import Statistics, Table, TrialStatistics
from sink_jax.paper.pictures import Figure, TrainedPicture
from sink_jax.report.markup import upper
from sink_jax.report.probe_record import NormRatios


@dataclasses.dataclass(frozen=True)
class JudgedPart:
  """A part of a claim: a mean over seeds against a level, in the unit of the metric.

  words: 'Sink_1 of default'. trials: two of a difference. asked: 'at least 10 %'. level: a
  difference between ratios is a factor. held: None where the seeds do not decide it. low, high: of
  the interval of the mean; None without a known spread, as of one seed where no trial has more.
  values: one per seed. fits: whether the mean itself is on the side that is asked for. needed: how
  many seeds of this spread would decide; None if decided or not known. doubt: why it cannot be
  decided whatever they are. paper: the paper's number; None where no table has it. proxy: whether
  values are of scores that do not sum to one. never: the seeds in which no sink emerged, in words.
  """

  words: str
  metric: str
  trials: Sequence[str]
  asked: str
  level: float
  held: bool | None
  mean: float
  low: float | None
  high: float | None
  n: int
  values: Sequence[float]
  seeds: Sequence[int]
  fits: bool
  needed: int | None
  doubt: str
  paper: float | None
  proxy: bool = False
  never: Sequence[str] = ()

  def as_dict(self) -> dict[str, Any]:
    fields = dataclasses.asdict(self)
    return {'measure' if key == 'metric' else key: value for key, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the runs of a group say to a claim.

  name: of the group. verdict: `claims.HOLDS`, FAILS, UNDECIDED or UNKNOWN. reason: why nothing can
  be judged, in short. numbers: of the trials that decide. parts: what was decided of them. needed:
  how many seeds would decide what is undecided, where that is known. few: whether what is undecided
  has fewer seeds than decide anything.
  """

  name: str
  budget: str
  protocol: str
  verdict: str
  why: str
  reason: str
  numbers: Sequence[TrialStatistics] = ()
  parts: Sequence[JudgedPart] = ()
  needed: int | None = None
  few: bool = False


@dataclasses.dataclass(frozen=True)
class JudgedClaim:
  """A claim of the paper with its verdicts. marks: of what it presupposes."""

  key: str
  section: str
  statement: str
  marks: str
  criterion: str
  verdicts: Sequence[Verdict]

  def as_dict(self) -> dict[str, Any]:
    verdicts = [{'key': self.key, 'budget': verdict.budget, 'protocol': verdict.protocol,
                 'verdict': verdict.verdict, 'why': verdict.why,
                 'reason': verdict.reason, 'needed': verdict.needed,
                 'parts': [part.as_dict() for part in verdict.parts],
                 'numbers': [number.as_dict() for number in verdict.numbers],
                 'name': verdict.name} for verdict in self.verdicts]
    return {'key': self.key, 'section': self.section, 'statement': self.statement,
            'marks': self.marks, 'criterion': self.criterion, 'verdicts': verdicts}


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

  def as_dict(self) -> dict[str, Any]:
    return {'groups': [dataclasses.asdict(part) for part in self.parts], 'notes': self.notes}


@dataclasses.dataclass(frozen=True)
class GroupSummary:
  """A group of runs. settings: the config keys of its protocol. statuses: how many runs have each.

  trials, runs: how many there are.
  """

  budget: str
  protocol: str
  name: str
  settings: Mapping[str, str]
  trials: int
  runs: int
  statuses: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class SecondLook:
  """The runs that a second look at the undecided claims of a group takes; see `second_looks`.

  budget, protocol, trials: as labels of runs have them. seeds: of the new runs of each trial.
  """

  budget: str
  protocol: str
  trials: Sequence[str]
  seeds: Sequence[int]


@dataclasses.dataclass(frozen=True)
class RunSummary:
  """What a reader of a number needs to know of its run; see `records.RunRecord`.

  sink: Sink_k of the first positions alone. train_loss: at the end. None where it is not known.
  """

  trial: str
  budget: str
  protocol: str
  status: str
  error: str | None
  reason: str | None
  step: int
  seed: int | None
  steps: int | None
  tokens: int | None
  unique_tokens: int | None
  attention: str | None
  proxy: bool | None
  probe_step: int | None
  sink: Sequence[float] | None
  sink_extra_key: float | None
  sink_extra_key_official: float | None
  ratios: NormRatios | None
  losses: Mapping[str, float | None] | None
  train_loss: float | None
  emergence_step: int | None
  trained_on: str | None

  def as_dict(self) -> dict[str, Any]:
    # The keys of committed reports, which are those of metrics.jsonl.
    keys = {'sink_extra_key': 'sink_bias_slot',
            'sink_extra_key_official': 'sink_bias_slot_released'}
    return {keys.get(key, key): value for key, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Event:
  """When a quantity came to its level to stay.

  steps: {run: the step of the first probe of those that stay; None where it never stays}, of the
  runs in which it was measured.
  """

  name: str
  level: float
  steps: Mapping[str, int | None]


@dataclasses.dataclass(frozen=True)
class TrialEvents:
  """The events of a trial. sink: the metric that its sink is read from. runs: one per seed.

  words: the steps of the events. order: theirs where the seeds have one, or that they disagree.
  """

  trial: str
  sink: str
  runs: Sequence[str]
  events: Sequence[Event]
  words: str
  order: str

  @property
  def sentences(self) -> str:
    return ' '.join(filter(None, [f'{upper(self.words)}.', self.order]))


@dataclasses.dataclass(frozen=True)
class EventOrder:
  """The order of events in the runs of a group."""

  budget: str
  protocol: str
  name: str
  trials: Sequence[TrialEvents]
  picture: TrainedPicture

  def as_dict(self) -> dict[str, Any]:
    return {'budget': self.budget, 'protocol': self.protocol, 'name': self.name,
            'trials': [dataclasses.asdict(trial) for trial in self.trials],
            'picture': self.picture.as_dict()}


@dataclasses.dataclass(frozen=True)
class SyntheticRow:
  """A variant on the synthetic task: the trial without its prefix. cells: by heading."""

  variant: str
  trial: str
  budget: str
  protocol: str
  status: str
  cells: Mapping[str, Statistics]
  runs: Sequence[str]


@dataclasses.dataclass(frozen=True)
class SyntheticAxis:
  """The variants on the synthetic task, softmax first.

  columns: {heading: meaning}. optimum: the least possible losses on bigram targets, in nats, one
  per task. file: of the picture, or ''.
  """

  columns: Mapping[str, str]
  rows: Sequence[SyntheticRow]
  optimum: Sequence[float]
  file: str = ''


@dataclasses.dataclass(frozen=True)
class PaperReport:
  """The whole report.

  undecided: what a second look takes. statuses: how many runs have each. comparison: when numbers
  are compared with the paper's.
  budgets: their rules in words. notes: on runs that cannot be compared. runs: by name. analyses:
  how each file was made. other_runs: names of runs that are not of the paper. provenance: how runs,
  analyses and the report were made.
  """

  title: str
  paper: str
  groups: Sequence[GroupSummary]
  undecided: Sequence[SecondLook]
  statuses: Mapping[str, int]
  summary: Summary
  claims: Sequence[JudgedClaim]
  tables: Sequence[Table]
  figures: Sequence[Figure]
  events: Sequence[EventOrder]
  synthetic: SyntheticAxis | None
  comparison: str
  budgets: Mapping[str, Sequence[str]]
  notes: Sequence[str]
  runs: Mapping[str, RunSummary]
  analyses: Mapping[str, Mapping[str, Any]]
  other_runs: Sequence[str]
  provenance: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

  def as_dict(self) -> dict[str, Any]:
    """What report.json holds."""
    return {
        'title': self.title,
        'paper': self.paper,
        'groups': [dataclasses.asdict(group) for group in self.groups],
        'undecided': [dataclasses.asdict(look) for look in self.undecided],
        'statuses': self.statuses,
        'in_short': self.summary.as_dict(),
        'claims': [claim.as_dict() for claim in self.claims],
        'tables': [table.as_dict() for table in self.tables],
        'figures': [figure.as_dict() for figure in self.figures],
        'events': [order.as_dict() for order in self.events],
        'synthetic': self.synthetic and dataclasses.asdict(self.synthetic),
        'comparison': self.comparison,
        'budgets': self.budgets,
        'notes': self.notes,
        'runs': {name: run.as_dict() for name, run in self.runs.items()},
        'analyses': self.analyses,
        'other_runs': self.other_runs,
        'provenance': self.provenance,
    }
