"""Digests of what a run has recorded: with each checkpoint, of its metrics and probe inputs.

`checksums/STEP.record.json` holds, of the moment when STEP was saved,
{'metrics.jsonl': {'bytes', 'sha256', 'whole_from'}, 'probe_tokens.npy': {'sha256'},
'data': {'content'}}. Runs of older versions have none.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from sink_jax.io.files import SMALL, read_text_limited, write_atomically
from sink_jax.io.paths import free_name, to_path
from sink_jax.train.checksums import record_path, saved_steps

_LONGEST = 1 << 20  # bytes of a line of metrics; what is longer is none of ours
_BLOCK = 1 << 20


class SettledMetrics(NamedTuple):
  """The content of `metrics.jsonl` with which a run goes on.

  whole_from: the step from which on no row is missing; 0 unless rows were left out.
  remark: what a person has to know of it, or ''.
  """

  content: bytes
  whole_from: int
  remark: str


def write_record(workdir, step: int, record: dict[str, Any]) -> None:
  """Stores the digests that go with a committed step."""
  path = record_path(workdir, step)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, json.dumps(record, indent=1))


def read_record(workdir, step: int) -> dict[str, dict[str, Any]]:
  """The digests that were stored with a step; {} where there are none that can be read."""
  try:
    record = json.loads(read_text_limited(record_path(workdir, step), SMALL))
  except (OSError, ValueError, RecursionError):
    return {}
  if not isinstance(record, dict):
    return {}
  return {name: entry for name, entry in record.items() if isinstance(entry, dict)}


def stored_digests(workdir, name: str, key: str) -> list:
  """What the records of all saved steps have as `key` of the file `name`, newest first."""
  entries = (read_record(workdir, step).get(name, {}) for step in saved_steps(workdir))
  return [entry[key] for entry in entries if key in entry]


def settle_metrics(workdir, step: int) -> SettledMetrics:
  """Cuts `metrics.jsonl` back to a saved step from which a run goes on.

  Where the rows up to the step are not those that were written, the file is copied to
  `damaged/`, and only what an older checkpoint vouches for is kept.
  """
  path = to_path(workdir) / 'metrics.jsonl'
  marks = {s: _mark(workdir, s) for s in saved_steps(workdir) if s <= step}
  marks = {s: mark for s, mark in marks.items() if mark}
  sound, newest = _sound(path, marks), max(marks, default=None)
  size, whole_from = (0, 0) if sound is None else (
      marks[sound]['bytes'], marks[sound]['whole_from'])
  if not step:
    kept = SettledMetrics(b'', 0, '')
  elif sound == newest == step:
    kept = SettledMetrics(_head(path, size), whole_from, '')
  elif sound == newest:
    kept = SettledMetrics(_rows_up_to(path, step, size), whole_from,
                f'metrics.jsonl has no digest of step {step} (saved by an older version, or killed '
                'right after that): its rows are taken as they are')
  else:
    kept = SettledMetrics(_head(path, size), step, _set_aside(workdir, step, sound))
  write_atomically(path, kept.content)
  if kept.whole_from == step > 0 and kept.remark:  # a second start finds nothing wrong
    write_record(workdir, step, read_record(workdir, step) | {
        'metrics.jsonl': size_and_sha256(kept.content) | {'whole_from': step}})
  return kept


def size_and_sha256(content: bytes) -> dict[str, Any]:
  """{'bytes', 'sha256'} of a file's content."""
  return {'bytes': len(content), 'sha256': hashlib.sha256(content).hexdigest()}


def read_rows(path, first: int = 0) -> Iterator[tuple[bytes, dict[str, Any]]]:
  """The lines of a metrics file from a byte on, and their rows.

  Lines that a kill or a fault made unreadable are left out.
  """
  if not path.is_file():  # a device has no end
    return
  # A file of an object store reads lines of any length only, without a buffer around it.
  with io.BufferedReader(path.open('rb')) as file:
    file.seek(first)
    for line in iter(lambda: file.readline(_LONGEST), b''):
      try:
        row = json.loads(line)
        if isinstance(row['kind'], str) and row['step'] >= 0:
          yield line, row
      except (ValueError, RecursionError, TypeError, KeyError):
        continue


def metrics_problem(workdir) -> str:
  """How the metrics of a run differ from what its newest checkpoint knows of them, or ''."""
  path = to_path(workdir) / 'metrics.jsonl'
  step, mark = next(((step, mark) for step in saved_steps(workdir)
                     if (mark := _mark(workdir, step))), (0, None))
  if mark is None or _sound(path, {step: mark}) == step and all(
      row['step'] > step for _, row in read_rows(path, mark['bytes'])):
    return ''
  return f'metrics.jsonl does not fit its digest of step {step}'


def _mark(workdir, step):
  """The entry of metrics.jsonl in the record of a step; None where there is none to use."""
  entry = read_record(workdir, step).get('metrics.jsonl', {})
  size, whole_from = entry.get('bytes'), entry.setdefault('whole_from', 0)
  numbers = all(type(n) is int and n >= 0 for n in (size, whole_from))
  return entry if numbers and isinstance(entry.get('sha256'), str) else None


def _sound(path, marks):
  """The newest step whose digest the beginning of the file has; None if no step's is right."""
  sound, at, contents = None, 0, hashlib.sha256()
  if not path.is_file():  # a device has no end
    return next((s for s, mark in marks.items() if not mark['bytes']), None)
  with path.open('rb') as file:
    for step, mark in sorted(marks.items(), key=lambda item: item[1]['bytes']):
      while at < mark['bytes'] and (block := file.read(min(_BLOCK, mark['bytes'] - at))):
        contents.update(block)
        at += len(block)
      if at == mark['bytes'] and contents.hexdigest() == mark['sha256']:
        sound = step if sound is None else max(step, sound)
  return sound


def _head(path, size):
  if not size:
    return b''
  with path.open('rb') as file:
    return file.read(size)


def _rows_up_to(path, step, first):
  """The first bytes of the file, and after them the lines of steps up to this one."""
  kept = [_head(path, first)]
  for line, row in read_rows(path, first):
    if row['step'] <= step:
      kept.append(line if line.endswith(b'\n') else line + b'\n')
  return b''.join(kept)


def _set_aside(workdir, step, sound):
  source = to_path(workdir) / 'metrics.jsonl'
  which = 'all rows' if sound is None else f'the rows after step {sound}'
  where = ''
  if source.is_file():
    aside = free_name(to_path(workdir) / 'damaged' / 'metrics.jsonl')
    write_atomically(aside, source.read_bytes())
    where = f', and the file as it was is damaged/{aside.name}'
  remedy = '' if sound is None else (
      f'. To have them again, remove checkpoints/{step}: the same command then resumes from {sound}')
  return (f'metrics.jsonl does not fit its digest of step {step}: {which} up to there are left '
          f'out{where}; the record is whole from step {step} on{remedy}')
