"""What the batches found, as JSON and as a Markdown table."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import os
import platform

from sink_jax.train.provenance import code

_PACKAGES = ('jax', 'numpy', 'orbax-checkpoint', 'tensorstore', 'safetensors', 'tokenizers',
             'zstandard', 'hypothesis')


def summary(records: list[dict], command: str, seed: int) -> dict:
  """All batches as one object, a row for each kind."""
  kinds = {}
  for kind in dict.fromkeys(record['kind'] for record in records):
    own = [record for record in records if record['kind'] == kind]
    outcomes = collections.Counter()
    for record in own:
      outcomes.update(record['outcomes'])
    bad = collections.Counter(f['outcome'] for r in own for f in r['failures'])
    kinds[kind] = {
        'inputs': sum(r['tried'] for r in own), 'accepted': outcomes.pop('accepted', 0),
        'refused': {k: v - bad[k] for k, v in sorted(outcomes.items()) if v > bad[k]},
        'failures': sum(bad.values()), 'seconds': round(sum(r['seconds'] for r in own), 1),
        'slowest_seconds': max(r['slowest'] for r in own),
        'largest_rss_mib': max(r['memory'] for r in own) >> 20,
        'address_space_limit_mib': max(r['setup'].get('limit', 0) for r in own) >> 20,
        'address_space_before_mib': max(
            r['setup'].get('address_space_before', 0) for r in own) >> 20,
        'longest_message': max(r['longest_message'] for r in own)}
  return {
      'command': command, 'seed': seed, 'inputs': sum(k['inputs'] for k in kinds.values()),
      'failures': sum(k['failures'] for k in kinds.values()), 'kinds': kinds,
      'found': _found(records),
      'date': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'),
      'hardware': f'{os.cpu_count()} CPU cores ({platform.machine()})',
      'python': platform.python_version(), 'code': code(),
      'versions': {name: importlib.metadata.version(name) for name in _PACKAGES}}


def markdown(found: dict) -> str:
  """The same for people."""
  lines = [f'# Hostile input: {found["inputs"]:,} inputs, {found["failures"]} failures', '',
           f'`{found["command"]}`, {found["date"]}, {found["hardware"]}, Python '
           f'{found["python"]}, ' + ', '.join(f'{k} {v}' for k, v in found['versions'].items()) +
           f', {found.get("code", "commit not recorded")}', '',
           '| kind | inputs | accepted | refused | failures | seconds | slowest (s) | '
           'largest memory (MiB) |', '|---|---|---|---|---|---|---|---|']
  for kind, row in found['kinds'].items():
    refused = ', '.join(f'{k} {v:,}' for k, v in row['refused'].items())
    lines.append(f'| {kind} | {row["inputs"]:,} | {row["accepted"]:,} | {refused} | '
                 f'{row["failures"]} | {row["seconds"]} | {row["slowest_seconds"]:.2f} | '
                 f'{row["largest_rss_mib"]} |')
  for entry in found['found']:
    lines += ['', f'- {entry["kind"]}, {entry["count"]} times: {entry["what"]} '
                  f'(`{entry["files"][0]}`)']
  return '\n'.join(lines) + '\n'


def _found(records):
  """Failures that look the same are one entry."""
  alike = {}
  for record in records:
    for failure in record['failures']:
      key = record['kind'], failure['what'][:60]
      alike.setdefault(key, []).append(failure)
  return [{'kind': kind, 'what': own[0]['what'], 'count': len(own),
           'files': [f['file'] for f in own[:3]]} for (kind, _), own in alike.items()]
