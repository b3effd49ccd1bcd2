"""How the runs of a report were trained, and how the report of them is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sink_jax.report.markup import bold, code, joined, line, upper
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord
from sink_jax.train.provenance import provenance


def made_by(runs: Iterable[RunRecord]) -> dict[str, list[str]]:
  """Commands, hardware and code by what they did; what several runs share is named once."""
  origins, now = [run.origin for run in runs], provenance()
  known = lambda values: sorted({value for value in values if value}) or ['unknown']
  return {
      'trained by': known(origin.command for origin in origins),
      'trained on': known(origin.hardware for origin in origins),
      'trained with': known(origin.code for origin in origins),
      'reported by': [now['command']], 'date': [now['date']],
      'reported on': [f'{now["hardware"]}; jax {now["jax"]}; Python {now["python"]}'],
      'reported with': [now['code']]}


def add_made_by(parts: Parts, made: Mapping[str, Sequence[str]]) -> None:
  """The same as items of a page."""
  parts.items([line(bold(upper(key)), ': ', joined(map(code, values), '; '))
               for key, values in made.items()])
