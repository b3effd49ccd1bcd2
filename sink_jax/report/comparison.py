"""A comparison of runs: groups of runs on the same data, with sentences, notes and settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.probe_record import EMERGENCE_LEVEL
from sink_jax.report.records import RunRecord, baseline_of, differing_settings, split_notes
from sink_jax.report.sentences import overview, sentences
from sink_jax.report.tables import as_text as table_text

_TITLES = {'BigramBackcopy': 'Bigram-Backcopy', 'TriggerAveraging': 'Trigger-conditional averaging'}


@dataclasses.dataclass(frozen=True)
class Picture:
  """A figure of a group: the name of its PNG, its caption, and the PNG."""

  file: str
  caption: str
  png: bytes = dataclasses.field(metadata=UNWRITTEN)


@dataclasses.dataclass(frozen=True)
class RunGroup:
  """The runs on one data set, softmax first.

  key: of file names. sentences, different_settings: by name of the run; the settings are dotted
  config keys with their values, and those that all runs have are in shared_settings.
  """

  key: str
  title: str
  runs: Sequence[RunRecord] = dataclasses.field(metadata=UNWRITTEN)  # `Comparison` has them
  overview: str
  sentences: Mapping[str, str]
  notes: Sequence[str]
  shared_settings: Mapping[str, Any]
  different_settings: Mapping[str, Mapping[str, Any]]
  pictures: Sequence[Picture] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The content of a report about runs.

  runs: by name. provenance: how the runs and the report were made.
  """

  runs: Mapping[str, RunRecord]
  groups: Sequence[RunGroup]
  provenance: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  title: str = 'Attention sinks side by side'
  emergence_level: float = EMERGENCE_LEVEL


def build(runs: Sequence[RunRecord]) -> Comparison:
  """The runs in groups, texts before synthetic tasks; every sentence follows from the records."""
  groups: list[RunGroup] = []
  # Losses and rates are compared on equal data alone, so every source makes a group.
  # dict.fromkeys keeps the order of the sorted runs, which a set would lose.
  for source in dict.fromkeys(_source(run) for run in sorted(runs, key=_text_first)):
    members = sorted((run for run in runs if _source(run) == source), key=_plain_first)
    # A damaged run is listed, but what its config says may not be what was trained.
    readable = [run for run in members if run.readable]
    shared, different = differing_settings(readable) if readable else ({}, {})
    groups.append(RunGroup(
        key=_unused_key(source, groups),
        title=_title(members[0]),
        runs=members,
        overview=overview(members),
        sentences={run.name: sentences(run, baseline_of(run, members)) for run in members},
        notes=_notes(members),
        shared_settings=shared,
        different_settings=different,
    ))
  return Comparison({run.name: run for run in runs}, groups)


def as_text(report: Comparison) -> str:
  """Tables and sentences for a terminal, within 100 columns."""
  blocks = []
  for group in report.groups:
    lines = [group.title, '=' * len(group.title), '', table_text(group.runs), '',
             fill(group.overview, 100)]
    lines += [fill(f'{name}: {text}', 100, initial_indent='- ', subsequent_indent='  ')
              for name, text in group.sentences.items()]
    lines += [fill(note, 100) for note in group.notes]
    blocks.append('\n'.join(lines))
  return '\n\n'.join(blocks)


def _source(run: RunRecord) -> str | None:
  return run.setup.source if run.setup else None


def _text_first(run: RunRecord) -> tuple[bool, bool, str]:
  """Texts, then synthetic tasks, then runs without a readable config."""
  return (run.setup is None, run.setup is not None and run.setup.synthetic, _source(run) or '')


def _plain_first(run: RunRecord) -> tuple[bool, str]:
  """Softmax before its variations, then by name."""
  return (run.setup is None or run.setup.attention != 'softmax', run.name)


def _title(run: RunRecord) -> str:
  if run.setup is None:
    return 'Runs that could not be read'
  # One run stands for its group: the members have the same source, which the key is made of.
  settings = run.setup.settings
  source = settings['data.source'].removesuffix('()')
  if run.setup.synthetic:
    return re.sub(r'^\w+', lambda name: _TITLES.get(name[0], name[0]), source)
  return f'Language-model text ({source}, {settings["data.tokenizer"].removesuffix("()")})'


def _unused_key(source: str | None, groups: Sequence[RunGroup]) -> str:
  """'stdlib', or 'stdlib.2' where another group has that."""
  # A dot cannot be in a key, so that the part before it tells which keys are alike.
  # Two sources of one class with other arguments give the same key, and the files of the second
  # would replace those of the first.
  key = re.sub(r'[^a-z0-9]+', '-', (source or 'unread').split('(')[0].lower())
  taken = sum(group.key.split('.')[0] == key for group in groups)
  return f'{key}.{taken + 1}' if taken else key


def _notes(runs: Sequence[RunRecord]) -> list[str]:
  notes = split_notes(runs)
  if any(run.proxy for run in runs):
    notes.append('* of proxy scores: the rows of this attention do not sum to one, so its weights '
                 'are divided by the sums of their magnitudes before the metric, as in the paper.')
  setups = [run.setup for run in runs if run.setup is not None]
  # Members share their data, and so the optimum.
  optimum = next((setup.facts['bigram_entropy'] for setup in setups
                  if 'bigram_entropy' in setup.facts), None)
  if optimum is not None:
    notes.append(f'The least possible loss is {optimum:.3f} nats on bigram targets and 0 on '
                 'back-copies.')
  seeds = {setup.seed for setup in setups}
  if len(seeds) == 1:
    notes.append(f'One seed ({seeds.pop()}): small differences between variants mean little.')
  return notes
