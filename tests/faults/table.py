"""The table of faults: what was tried, what came of it, and whether that is what is promised."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path

from sink_jax.io.files import write_atomically
from sink_jax.train.provenance import code
from tests.fuzz import tables as fuzz


class Tally:
  """One row while it is made: outcomes, lost steps, failures, and the time that is left."""

  def __init__(self, name: str, fault: str, bound: str, tell=None):
    self.name, self.fault, self.bound = name, fault, bound
    self.outcomes, self.lost, self.failures, self.notes = collections.Counter(), [], [], []
    self.skipped, self._began, self._tell = '', time.monotonic(), tell or _to_stderr

  def count(self, outcome: str, lost: int | None = None) -> None:
    self.outcomes[outcome] += 1
    if lost is not None:
      self.lost.append(lost)

  def fail(self, what: str, workdir=None) -> None:
    """A round that did not go as promised; its workdir is kept."""
    self.outcomes['FAILED'] += 1
    what = re.sub(r'/\S*sink_jax-faults-\w+', 'SCRATCH', what)
    self.failures.append(what)
    kept = ''
    if workdir is not None and Path(workdir).exists():
      aside = Path(workdir).with_name(f'{Path(workdir).name}-failed-{len(self.failures)}')
      shutil.copytree(workdir, aside)
      for log in Path(workdir).parent.glob(f'{Path(workdir).name}-?.log'):
        shutil.copy(log, f'{aside}{log.name.removeprefix(Path(workdir).name)}')
      kept = f'; kept: {aside}'
    self._tell(f'{self.name}: FAILED: {what}{kept}')

  def progress(self, done: int, total: int) -> None:
    rate = (time.monotonic() - self._began) / max(1, done)
    self._tell(f'{self.name}: {done}/{total}, {len(self.failures)} failures, '
               f'{rate * (total - done) / 60:.1f} min left of this row')

  def as_row(self) -> dict:
    tried = sum(self.outcomes.values())
    mean = sum(self.lost) / max(1, len(self.lost))
    lost = self.lost and {'mean': round(mean, 1), 'max': max(self.lost)}
    return {'name': self.name, 'fault': self.fault, 'tried': tried,
            'outcomes': dict(self.outcomes.most_common()), 'lost': lost or None,
            'bound': self.bound, 'passed': bool(tried) and not self.failures,
            'skipped': self.skipped, 'failures': self.failures, 'notes': self.notes,
            'seconds': round(time.monotonic() - self._began, 1)}


class Table:
  """faults.json and README.md of a folder; rows of the same settings are kept."""

  def __init__(self, out, settings: dict, names, command: str):
    self._out, self._settings, self._names = Path(out), settings, list(names)
    self._command = command
    self._out.mkdir(parents=True, exist_ok=True)
    try:
      self._rows = {row['name']: row
                    for row in json.loads((self._out / 'faults.json').read_text())['rows']}
    except (OSError, ValueError, KeyError, TypeError):
      self._rows = {}

  def has(self, name: str) -> bool:
    row = self._rows.get(name)
    return bool(row) and row['settings'] == self._settings and row['passed']

  def add(self, row: dict) -> None:
    """Writes the table with this row."""
    self._rows[row['name']] = row | {
        'settings': self._settings, 'command': f'{self._command} --only={row["name"]}',
        'date': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'), 'hardware':
        f'{os.cpu_count()} CPU cores ({platform.machine()})', 'python': platform.python_version(),
        'code': code(), 'jax': importlib.metadata.version('jax'),
        'orbax-checkpoint': importlib.metadata.version('orbax-checkpoint')}
    rows = [self._rows[name] for name in self._names if name in self._rows]
    write_atomically(self._out / 'faults.json', json.dumps({'rows': rows}, indent=1) + '\n')
    write_atomically(self._out / 'README.md', markdown(rows, _fuzz(self._out)))

  def failed(self) -> list[str]:
    return [name for name, row in self._rows.items() if not row['passed'] and not row['skipped']]


def markdown(rows: list[dict], fuzz_found: dict | None) -> str:
  """The table for people."""
  lines = ['# Faults', '',
           'Each row does one kind of harm to real training runs, many times, and checks what is '
           'promised about it. Lost steps: made by a start of the run, and made again by a later '
           'one. Rows that passed are kept where the rounds and the seed are those that are listed '
           'below with each; others are made again:', '',
           '```bash', 'bash launch/faults.sh results/faults --rounds=200 --seed=0', '```', '',
           '| fault | tried | outcomes | lost steps: mean, max | promised | passed |',
           '|---|---:|---|---|---|---|']
  for row in rows:
    outcomes = ', '.join(f'{name}: {count:,}' for name, count in row['outcomes'].items())
    lost = f'{row["lost"]["mean"]:g}, {row["lost"]["max"]:,}' if row['lost'] else ''
    passed = f'skipped: {row["skipped"]}' if row['skipped'] else 'yes' if row['passed'] else 'NO'
    lines.append(f'| {row["fault"]} | {row["tried"]:,} | {outcomes} | {lost} | {row["bound"]} | '
                 f'{passed} |')
  for row in rows:
    lines += [''] * bool(row['notes'] or row['failures'])
    lines += [f'- {row["fault"]}: {note}' for note in row['notes']]
    lines += [f'- {row["fault"]}, FAILED: {what}' for what in row['failures'][:5]]
  lines += ['', '## How the rows were made', '']
  lines += [f'- `{row["command"]}`: {row["date"]}, {row["hardware"]}, Python {row["python"]}, '
            f'jax {row["jax"]}, orbax-checkpoint {row["orbax-checkpoint"]}, {row["seconds"]:,.0f} s, '
            f'{row.get("code", "commit not recorded")}'
            for row in rows]
  if fuzz_found:
    lines += ['', '#' + fuzz.markdown(fuzz_found).rstrip()]
  return '\n'.join(lines) + '\n'


def _fuzz(out):
  try:
    return json.loads((out / 'fuzz.json').read_text())
  except (OSError, ValueError):
    return None


def _to_stderr(line):
  print(f'{time.strftime("%H:%M:%S")} {line}', file=sys.stderr, flush=True)
