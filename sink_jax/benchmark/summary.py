"""The Markdown page of a check: targets first, then every table."""

from __future__ import annotations

from typing import Any

from sink_jax.benchmark.table import markdown
from sink_jax.benchmark.verdict import failures, verdict

_MACHINE = ('hardware', 'driver', 'platform_version', 'jax', 'jaxlib', 'python', 'code', 'seed')


def summary(report: dict[str, Any]) -> str:
  """The whole page."""
  return head(report) + tables(report)


def head(report: dict[str, Any]) -> str:
  """Hardware, date, command, targets beside what was measured, and what was not correct."""
  machine = report['machine'] or {}
  lines = ['# Check of kernels and speed', '']
  if report['smoke']:
    lines += ['**Smoke run: tiny shapes. Its numbers say nothing about speed.**', '']
  if not report['complete']:
    lines += ['**Not complete: the run was cut short.**', '']
  facts = {'date': report['date'], 'command': f"`{report['command']}`"} | {
      name: machine[name] for name in _MACHINE if machine.get(name) is not None}
  lines += [f'- {name}: {value}' for name, value in facts.items()]
  lines += ['', '## Targets', '', '| target | where | wanted | measured | met |',
            '| --- | --- | ---: | ---: | --- |']
  for row in report['targets']:
    measured = '-' if row['measured'] is None else f"{row['measured']:.2f}"
    met = {True: 'yes', False: '**no**', None: 'not measured'}[row['met']]
    lines.append(f"| {row['text']} | {row['where']} | {row['wanted']} | {measured} | {met} |")
  lines += ['', '## Correctness', '', *_correctness(report['parts'].get('correctness'))]
  return '\n'.join(lines) + '\n'


def tables(report: dict[str, Any]) -> str:
  """What every part found, with the command that repeats it."""
  lines = []
  for name, part in report['parts'].items():
    lines += ['', f'## {name}', '', f"`{part['command']}`", '',
              f"{part['status']}, {part['seconds']:.0f} s" + (
                  f", {part['processes']} processes" if part['processes'] > 1 else '') + '.']
    if part['result']:
      lines += ['', markdown(part['result']), '', *(f'- {n}' for n in part['result']['notes'])]
  return '\n'.join(lines) + '\n'


def _correctness(part):
  """Sentences: how many checks passed, the largest errors, every failure."""
  rows = part['result']['rows'] if part and part['result'] else []
  if not rows:
    return ['**No check was made.**']
  lines = [verdict(rows, part['result']['not_run']), '']
  for name in dict.fromkeys(row['implementation'] for row in rows):
    own = [row for row in rows if row['implementation'] == name]
    out = max((row['out'] for row in own if 'out' in row), default=None)
    gradient = max((row['gradient'] for row in own if 'gradient' in row), default=None)
    lines.append(f'- {name}: {len(own)} checks, largest error of values '
                 f'{"-" if out is None else f"{out:.1e}"}, of gradients '
                 f'{"-" if gradient is None else f"{gradient:.1e}"}')
  for row in failures(rows):
    lines.append(f"- **FAILED**: {row['implementation']}, {row['variant']}, Dh {row['head_dim']}, "
                 f"T {row['length']}: {row.get('failed') or row.get('errors')}")
  return lines
