"""The report of a check: its record, and the Markdown page of targets and tables."""

from __future__ import annotations

import dataclasses
from typing import Any

from sink_jax.benchmark.checks import count_passed, failures
from sink_jax.benchmark.records import CorrectnessRow, Document
from sink_jax.benchmark.table import markdown
from sink_jax.benchmark.targets import Target, targets
from sink_jax.io.tables import Markdown, markdown_table

# What the page shows of the machine, in this order; report.json has all of it.
_MACHINE = ('hardware', 'driver', 'platform_version', 'jax', 'jaxlib', 'python', 'code', 'seed')


@dataclasses.dataclass(frozen=True)
class PartResult:
  """How a part ended, or stands now, and what its processes have measured.

  command: that repeats it. result: None where no process wrote a document.
  """

  command: str
  processes: int
  status: str
  seconds: float
  exit_codes: list[int | None]
  result: Document | None

  def to_json(self) -> dict[str, Any]:
    """The part as a JSON object."""
    return vars(self) | {'result': self.result and self.result.to_json()}


@dataclasses.dataclass
class Report:
  """A check: filled in part by part, and written after each.

  seconds: that it may take. smoke: whether the shapes are tiny.
  """

  date: str
  command: str
  seconds: float
  smoke: bool
  complete: bool = False
  parts: dict[str, PartResult] = dataclasses.field(default_factory=dict)

  @property
  def results(self) -> dict[str, Document | None]:
    """The document of every part by the part's name."""
    return {name: part.result for name, part in self.parts.items()}

  @property
  def machine(self) -> dict[str, Any] | None:
    """Facts about the machine, from the first part that has measured anything."""
    # The parts run on the same machine, so the first record stands for all.
    return next((result.machine for result in self.results.values() if result), None)

  @property
  def targets(self) -> list[Target]:
    """Every target beside what has been measured."""
    return targets(self.results)

  def to_json(self) -> dict[str, Any]:
    """The report as a JSON object, report.json."""
    return vars(self) | {
        'parts': {name: part.to_json() for name, part in self.parts.items()},
        'machine': self.machine, 'targets': [target._asdict() for target in self.targets]}


def page(report: Report) -> str:
  """The whole Markdown page, report.md."""
  return head(report) + tables(report)


def head(report: Report) -> str:
  """Hardware, date, command, targets beside what was measured, and what was not correct."""
  machine = report.machine or {}
  lines = ['# Check of kernels and speed', '']
  if report.smoke:
    lines += ['**Smoke run: tiny shapes. Its numbers say nothing about speed.**', '']
  if not report.complete:
    lines += ['**Not complete: the run was cut short.**', '']
  facts = {'date': report.date, 'command': f'`{report.command}`'} | {
      name: machine[name] for name in _MACHINE if machine.get(name) is not None}
  lines += [f'- {name}: {value}' for name, value in facts.items()]
  rows = []
  for target in report.targets:
    measured = '-' if target.measured is None else f'{target.measured:.2f}'
    # None is neither: a target that was not measured is not missed.
    met = {True: 'yes', False: Markdown('**no**'), None: 'not measured'}[target.met]
    rows.append([target.text, target.where, target.wanted, measured, met])
  lines += ['', '## Targets', '', *markdown_table(
      ['target', 'where', 'wanted', 'measured', 'met'], rows, (0, 1, 4))]
  lines += ['', '## Correctness', '', *_correctness(report.results.get('correctness'))]
  return '\n'.join(lines) + '\n'


def tables(report: Report) -> str:
  """The table of every part, with the command that repeats it."""
  lines = []
  for name, part in report.parts.items():
    lines += ['', f'## {name}', '', f'`{part.command}`', '',
              f'{part.status}, {part.seconds:.0f} s' + (
                  f', {part.processes} processes' if part.processes > 1 else '') + '.']
    if part.result:
      lines += ['', markdown(part.result), '', *(f'- {note}' for note in part.result.notes)]
  return '\n'.join(lines) + '\n'


def _correctness(result: Document | None) -> list[str]:
  """Sentences: how many checks passed, the largest errors, every failure."""
  rows = result.rows_of(CorrectnessRow) if result else []
  if result is None or not rows:
    return ['**No check was made.**']
  lines = [count_passed(rows, checks_not_run(result)), '']
  for name in dict.fromkeys(row.implementation for row in rows):
    checks = [row for row in rows if row.implementation == name]
    out = max((row.out for row in checks if row.out is not None), default=None)
    gradient = max((row.gradient for row in checks if row.gradient is not None), default=None)
    lines.append(f'- {name}: {len(checks)} checks, largest error of values '
                 f'{"-" if out is None else f"{out:.1e}"}, of gradients '
                 f'{"-" if gradient is None else f"{gradient:.1e}"}')
  for row in failures(rows):
    lines.append(f'- **FAILED**: {row.implementation}, {row.variant}, Dh {row.head_dim}, '
                 f'T {row.length}: {row.failed or row.errors}')
  return lines


def checks_not_run(result: Document) -> int:
  """How many combinations a run of `correctness` had no time for."""
  assert isinstance(result.not_run, int), 'correctness counts them'
  return result.not_run
