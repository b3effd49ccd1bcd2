"""The content of the report of the paper as typed values, which `page` and report.json show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.paper.cells import Statistics, Table
from sink_jax.paper.claims import Claim, Verdict
from sink_jax.paper.events import EventOrder
from sink_jax.paper.pictures import Figure
from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.records import RunRecord


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
class SyntheticRow:
  """A variant on the synthetic task: the trial without its prefix. cells: by heading.

  rates: {kind of sink: its rate in each seed}.
  """

  variant: str
  trial: str
  budget: str
  protocol: str
  status: str
  cells: Mapping[str, Statistics]
  runs: Sequence[str]
  rates: Mapping[str, Sequence[float]] = dataclasses.field(metadata=UNWRITTEN)


@dataclasses.dataclass(frozen=True)
class SyntheticAxis:
  """The variants on the synthetic task, softmax first.

  columns: {heading: meaning}. optimum: the least possible losses on bigram targets, in nats, one
  per task.
  """

  columns: Mapping[str, str]
  rows: Sequence[SyntheticRow]
  optimum: Sequence[float]


@dataclasses.dataclass(frozen=True)
class PaperReport:
  """The whole report.

  undecided: what a second look takes. claims: with their verdicts. statuses: how many runs have each. comparison: when numbers
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
  claims: Sequence[Claim]
  tables: Sequence[Table]
  figures: Sequence[Figure]
  events: Sequence[EventOrder]
  synthetic: SyntheticAxis | None
  comparison: str
  budgets: Mapping[str, Sequence[str]]
  notes: Sequence[str]
  runs: Mapping[str, RunRecord]
  analyses: Mapping[str, Mapping[str, Any]]
  other_runs: Sequence[str]
  provenance: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

  @property
  def verdicts(self) -> dict[str, list[tuple[Claim, Verdict]]]:
    """{name of a group of runs: the claims that it was asked, with its verdict on each}."""
    by_group: dict[str, list[tuple[Claim, Verdict]]] = {}
    for claim in self.claims:
      for verdict in claim.verdicts:
        by_group.setdefault(verdict.name, []).append((claim, verdict))
    return by_group
