"""Digests of what a run has recorded: with each checkpoint, of its metrics and probe inputs.

A checkpoint vouches for more than its own files: metrics.jsonl only ever grows, so the digest of
its first bytes at one step stays right at all later ones. A run that resumes can thus cut the file
back to its checkpoint, and notice rows that were changed since.

`checksums/STEP.record.json` holds, of the moment when STEP was saved,
{'metrics.jsonl': {'bytes', 'sha256', 'whole_from'}, 'probe_tokens.npy': {'sha256'},
'data': {'content'}}. Runs of older versions have none.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sink_jax.io.files import SMALL, read_text_limited, write_atomically
from sink_jax.io.paths import AnyPath, free_name, to_path
from sink_jax.train.checksums import record_path, saved_steps

_LONGEST = 1 << 20  # bytes of a line of metrics; nothing that a run writes is longer
_BLOCK = 1 << 20  # bytes that are read at a time


class SettledMetrics(NamedTuple):
  """The content of `metrics.jsonl` to which a resumed run appends.

  whole_from: the step from which on no row is missing; 0 unless rows were left out.
  remark: what a person has to know of it, or ''.
  """

  content: bytes
  whole_from: int
  remark: str


def write_record(workdir: str | AnyPath, step: int, record: dict[str, Any]) -> None:
  """Stores the digests that go with a committed step."""
  path = record_path(workdir, step)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, json.dumps(record, indent=1))


def read_record(workdir: str | AnyPath, step: int) -> dict[str, dict[str, Any]]:
  """The digests that were stored with a step; {} where there are none that can be read."""
  try:
    record = json.loads(read_text_limited(record_path(workdir, step), SMALL))
  except (OSError, ValueError, RecursionError):
    return {}
  if not isinstance(record, dict):
    return {}
  return {name: entry for name, entry in record.items() if isinstance(entry, dict)}


def stored_digests(workdir: str | AnyPath, name: str, key: str) -> list[Any]:
  """The values of `key` for the file `name` in the records of all saved steps, newest first."""
  entries = (read_record(workdir, step).get(name, {}) for step in saved_steps(workdir))
  return [entry[key] for entry in entries if key in entry]


def settle_metrics(workdir: str | AnyPath, step: int) -> SettledMetrics:
  """Cuts `metrics.jsonl` back to a saved step from which a run resumes.

  Where the rows up to the step are not those that were written, the file is copied to
  `damaged/`, and only what an older checkpoint vouches for is kept.

  Returns what is kept, from which step on it is whole, and a remark for a person.
  """
  path = to_path(workdir) / 'metrics.jsonl'
  marks = {s: _digest_of_metrics(workdir, s) for s in saved_steps(workdir) if s <= step}
  marks = {s: mark for s, mark in marks.items() if mark}
  intact, newest = _newest_intact(path, marks), max(marks, default=None)
  size, whole_from = (0, 0) if intact is None else (
      marks[intact]['bytes'], marks[intact]['whole_from'])
  if not step:  # the run begins again: no checkpoint vouches for any row
    kept = SettledMetrics(b'', 0, '')
  elif intact == newest == step:
    kept = SettledMetrics(_first_bytes(path, size), whole_from, '')
  elif intact == newest:
    kept = SettledMetrics(_rows_up_to(path, step, size), whole_from,
                f'metrics.jsonl has no digest of step {step} (saved by an older version, or killed '
                'right after that): its rows are taken as they are')
  else:
    kept = SettledMetrics(_first_bytes(path, size), step, _set_aside(workdir, step, intact))
  write_atomically(path, kept.content)
  # The record of the step now describes what is left, so that a second start finds nothing wrong.
  if kept.whole_from == step > 0 and kept.remark:
    write_record(workdir, step, read_record(workdir, step) | {
        'metrics.jsonl': size_and_sha256(kept.content) | {'whole_from': step}})
  return kept


def size_and_sha256(content: bytes) -> dict[str, Any]:
  """{'bytes', 'sha256'} of a file's content."""
  return {'bytes': len(content), 'sha256': hashlib.sha256(content).hexdigest()}


def read_rows(path: AnyPath, first: int = 0) -> Iterator[tuple[bytes, dict[str, Any]]]:
  """The lines of a metrics file from a byte on, and their rows.

  Lines that a kill or a fault made unreadable are left out.
  """
  if not path.is_file():  # it may be missing, or a device, which has no end
    return
  # Without a buffer around it, a file of an object store reads lines of any length, and no others.
  raw: Any = path.open('rb')
  with io.BufferedReader(raw) as file:
    file.seek(first)
    for line in iter(lambda: file.readline(_LONGEST), b''):
      if row := read_row(line):
        yield line, row


def read_row(line: bytes) -> dict[str, Any] | None:
  """The row of a line of a metrics file; None where a kill or a fault made it unreadable."""
  try:
    row = json.loads(line)
    return row if isinstance(row['kind'], str) and row['step'] >= 0 else None
  except (ValueError, RecursionError, TypeError, KeyError):
    return None


def metrics_problem(workdir: str | AnyPath) -> str:
  """How the metrics of a run differ from what its newest checkpoint knows of them, or ''."""
  path = to_path(workdir) / 'metrics.jsonl'
  step, mark = next(((step, mark) for step in saved_steps(workdir)
                     if (mark := _digest_of_metrics(workdir, step))), (0, None))
  if mark is None or _newest_intact(path, {step: mark}) == step and all(
      row['step'] > step for _, row in read_rows(path, mark['bytes'])):
    return ''
  return f'metrics.jsonl does not fit its digest of step {step}'


def _digest_of_metrics(workdir: str | AnyPath, step: int) -> dict[str, Any] | None:
  """The entry of metrics.jsonl in the record of a step; None where there is none to use."""
  entry = read_record(workdir, step).get('metrics.jsonl', {})
  # A record without 'whole_from' is read as one from which no row is missing.
  size, whole_from = entry.get('bytes'), entry.setdefault('whole_from', 0)
  # The file may have been changed by hand: a size that is no number must not be read up to.
  numbers = all(type(n) is int and n >= 0 for n in (size, whole_from))
  return entry if numbers and isinstance(entry.get('sha256'), str) else None


def _newest_intact(path: AnyPath, marks: Mapping[int, dict[str, Any]]) -> int | None:
  """The newest step whose digest the beginning of the file has; None if no step's is right."""
  intact, at, contents = None, 0, hashlib.sha256()
  if not path.is_file():  # as in `read_rows`
    return next((s for s, mark in marks.items() if not mark['bytes']), None)
  # One reading checks all steps: the bytes of an older one are the first of a newer one's.
  with path.open('rb') as file:
    for step, mark in sorted(marks.items(), key=lambda item: item[1]['bytes']):
      while at < mark['bytes'] and (block := file.read(min(_BLOCK, mark['bytes'] - at))):
        contents.update(block)
        at += len(block)
      if at == mark['bytes'] and contents.hexdigest() == mark['sha256']:
        intact = step if intact is None else max(step, intact)
  return intact


def _first_bytes(path: AnyPath, size: int) -> bytes:
  if not size:
    return b''
  with path.open('rb') as file:
    return file.read(size)


def _rows_up_to(path: AnyPath, step: int, first: int) -> bytes:
  """The first bytes of the file, and after them the lines of steps up to this one."""
  kept = [_first_bytes(path, first)]
  for line, row in read_rows(path, first):
    if row['step'] <= step:
      kept.append(line if line.endswith(b'\n') else line + b'\n')
  return b''.join(kept)


def _set_aside(workdir: str | AnyPath, step: int, intact: int | None) -> str:
  source = to_path(workdir) / 'metrics.jsonl'
  which = 'all rows' if intact is None else f'the rows after step {intact}'
  where = ''
  if source.is_file():
    aside = free_name(to_path(workdir) / 'damaged' / 'metrics.jsonl')
    write_atomically(aside, source.read_bytes())
    where = f', and the file as it was is damaged/{aside.name}'
  remedy = '' if intact is None else (
      f'. To have them again, remove checkpoints/{step}: the same command then resumes from '
      f'{intact}')
  return (f'metrics.jsonl does not fit its digest of step {step}: {which} up to there are left '
          f'out{where}; the record is whole from step {step} on{remedy}')
