"""The numbers of training runs that reports read, small enough to be kept beside a report.

  python -m tests.paper.stored --runs=runs/desk --out=results/paper/metrics.json
  python -m tests.paper.stored --restore=results/paper/metrics.json --out=runs/stored
  python -m sink_jax.report --runs=runs/stored --out=results/paper

  python -m tests.paper.stored --ends --runs=runs/remedies --out=results/leaderboard/metrics.json

The first command stores runs, the second writes run folders of them again, and the third makes the
report of these. A report that is committed is made so, not of the runs themselves: stored numbers
have six significant digits, and a report of them can be made again digit by digit.

Stored are of each run its status, its config as differences from the first run's, what reports read
of data.json, analyses.json, all rows of validation, the training losses and the median throughput,
the first and the last row of the probe as they are, and between them the curves that reports draw;
of fine-tuning (configs/sft.py) gradient norms too, and of a graft the row that says what it did.
A map of attention, which is only looked at, has three digits.

With --ends, which suffices for the leaderboard, each run has the last row of each kind alone, and
of the first row of the probe its null: no courses, and no analyses. Configs are then differences
from that of the run before.
Times of training steps that lie beside the runs are stored with them.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sink_jax.paper.report import without_paths
from sink_jax.paper.tuning import is_fine_tuned
from sink_jax.remedies.step_times import FILE
from sink_jax.report.jsontext import finite, from_json, mapped, rounded
from sink_jax.report.probe_record import Curves
from sink_jax.report.read_runs import read_runs
from sink_jax.report.records import RunRecord
from sink_jax.train.metrics_log import read_metrics
from sink_jax.train.run_dir import read_config, read_data_summary, read_status

# What `read_runs` reads of the two files.
_STATUS = ('status', 'step', 'error', 'reason', 'loss', 'record_whole_from', 'label', 'date',
           'command', 'code', 'hardware', 'jax')
_DATA = ('content', 'unique_training_tokens', 'tokens_per_epoch')
# What it reads and the leaderboard does not show.
_OF_NO_PAGE = ('command',)
_NULL = 'null_p99'  # the key of what a row of the probe has where there is no sink to find
_MAP = 'map'  # the key of a map of attention in analyses.json


def stored(runs: Path, ends: bool = False) -> dict[str, Any]:
  """The runs in or below a folder as JSON values.

  Args:
    ends: only what the leaderboard reads, see the head of this file.

  Raises:
    ValueError: there is none, or one that cannot be read or whose metrics were changed.
  """
  records = read_runs(runs)
  for record in records:
    if problem := record.metrics_problem or (record.status == 'unreadable' and record.error):
      raise ValueError(f'The run {record.name} cannot be stored: {problem}. Take it out of {runs}, '
                       'or train it again.')
  # A folder that is itself a run has its name.
  folders = [path if (path := runs / record.name).is_dir() else runs for record in records]
  configs = [_flat(read_config(folder)) if record.setup else None
             for folder, record in zip(folders, records)]
  first = next((config for config in configs if config is not None), {})
  kept, base = [], first
  for folder, record, config in zip(folders, records, configs):
    run = _run(folder, record, config, base)
    kept.append(_ends(run) if ends else run)
    if ends and config is not None:
      base = config  # most often of the same trial: runs are in order of name
  content = {'config': first, 'runs': kept} | ({'in_turn': True} if ends else {})
  if (runs / FILE).exists():
    content['step_times'] = rounded(from_json((runs / FILE).read_text()))
  return without_paths(content)


def restore(path: Path, folder: Path) -> None:
  """Writes the runs that a file stores as run folders below a folder.

  What is not stored is missing in their files, and is None between the first and the last row of
  the probe. There a list per block has the one block that reports look at, and the largest
  activation is in units of the median.
  """
  content = from_json(path.read_text())
  folder.mkdir(parents=True, exist_ok=True)
  if times := content.get('step_times'):
    (folder / FILE).write_text(json.dumps(times))
  base = content['config']
  for run in content['runs']:
    workdir = folder / run['name']
    workdir.mkdir(parents=True)
    changes = run['config']
    files = {'status.json': run['status'], 'data.json': run['data'],
             'analyses.json': run['analyses']}
    if changes is not None:
      config = {key: value for key, value in base.items() if key not in run['without']} | changes
      files['config.json'] = _nested(config)
      if content.get('in_turn'):
        base = config
    for name, value in files.items():
      if value:
        (workdir / name).write_text(json.dumps(value))
    if rows := sorted(_rows(run), key=lambda row: row['step']):
      (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def _run(folder: Path, record: RunRecord, config: Mapping[str, Any] | None,
         first: Mapping[str, Any]) -> dict[str, Any]:
  status, data = read_status(folder), read_data_summary(folder)
  absent = object()
  return {
      'name': record.name,
      'status': finite({key: status[key] for key in _STATUS if key in status}),
      'config': None if config is None else {
          key: value for key, value in config.items() if first.get(key, absent) != value},
      'without': [] if config is None else [key for key in first if key not in config],
      'data': {key: data[key] for key in _DATA if key in data},
      'analyses': rounded(_with_short_maps(record.analyses)),
      **rounded(_metrics(finite(read_metrics(folder)), record)),
  }


def _metrics(rows: list[dict[str, Any]], record: RunRecord) -> dict[str, Any]:
  plain = lambda row: {key: value for key, value in row.items() if key != 'kind'}
  train = [row for row in rows if row['kind'] == 'train']
  rates = [rate for row in train if isinstance(rate := row.get('tokens_per_second'), float)]
  kept = {'valid': [plain(row) for row in rows if row['kind'] == 'valid'],
          'train': {'step': [row['step'] for row in train],
                    'loss': [row.get('loss') for row in train],
                    # Of an even number the upper one, as reports take it.
                    'tokens_per_second': statistics.median_high(rates) if rates else None},
          'probe': None}
  if grafts := [plain(row) for row in rows if row['kind'] == 'graft']:
    kept['graft'] = grafts[-1]
  if is_fine_tuned(record):
    kept['train']['grad_norm'] = [row.get('grad_norm') for row in train]
  if record.probe:
    curves = record.probe.curves
    whole = {row['step']: plain(row) for row in rows if row['kind'] == 'probe'}
    kept['probe'] = {'first': whole[curves.step[0]], 'last': whole[curves.step[-1]],
                     'curves': vars(curves)}
  return kept


def _ends(run: dict[str, Any]) -> dict[str, Any]:
  """What is stored of a run with --ends, from all that is stored otherwise."""
  status, probe = dict(run['status']), run['probe']
  for key in _OF_NO_PAGE:
    status.pop(key, None)
  if probe:
    curves = {key: [values[0], values[-1]][:len(values)] for key, values in
              probe['curves'].items()}
    probe = {'first_null': probe['first'].get(_NULL), 'last': probe['last'], 'curves': curves}
  train = {key: run['train'][key][-1:] for key in ('step', 'loss')} | {'tokens_per_second': None}
  return run | {'status': status, 'valid': run['valid'][-1:], 'analyses': {}, 'train': train,
                'probe': probe}


def _rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The rows of metrics.jsonl, those of a kind together."""
  train, probe = run['train'], run['probe']
  keys = ('step', 'loss', 'grad_norm') if 'grad_norm' in train else ('step', 'loss')
  rows = [{'kind': 'train', **dict(zip(keys, values))}
          for values in zip(*(train[key] for key in keys))]
  if rows and train['tokens_per_second']:
    rows[-1]['tokens_per_second'] = train['tokens_per_second']
  rows += [{'kind': 'valid', **row} for row in run['valid']]
  if 'graft' in run:
    rows.append({'kind': 'graft', **run['graft']})
  if probe:
    curves = Curves(**probe['curves'])
    # A run that has ended at its first probe has one row, which is the first and the last.
    ends = {row['step']: row for row in (probe.get('first'), probe['last']) if row}
    # A row that is not whole has all keys of one that is, without numbers.
    empty = dict.fromkeys(probe['last'])
    null = {0: {_NULL: probe.get('first_null')}}
    rows += [{'kind': 'probe', **ends.get(step, empty | _between(curves, i) | null.get(i, {}))}
             for i, step in enumerate(curves.step)]
  return rows


def _between(curves: Curves, i: int) -> dict[str, Any]:
  """A row of the probe from which the same point of the curves is read."""
  row = {'step': curves.step[i], 'sink_1': curves.sink_1[i],
         'sink_bias_slot': curves.sink_extra_key[i],
         'largest_importance': curves.largest_importance[i],
         'value_ratio': [curves.value_ratio[i]],
         # Entry 0 is the embedding, which reports leave out.
         'hidden_ratio': [None, curves.hidden_ratio[i]]}
  blocks = {key: [None, None] for key in (
      'activation_max', 'activation_median', 'activations_beyond_100', 'activations_beyond_1000',
      'kurtosis_moment', 'kurtosis_channels', 'activation_position', 'activation_channel')}
  return row | blocks | {'activation_max': [None, curves.max_over_median[i]],
                         'activation_median': [None, curves.max_over_median[i] and 1.0]}


def _with_short_maps(analyses: Mapping[str, Any]) -> dict[str, Any]:
  short = lambda leaf: float(f'{leaf:.3g}') if isinstance(leaf, float) else leaf
  return {name: {key: mapped(value, short) if key == _MAP else value
                 for key, value in results.items()} if isinstance(results, dict) else results
          for name, results in analyses.items()}


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """{'model.size': 'tiny', ...}; a section without keys is a value."""
  flat = {}
  for key, value in config.items():
    flat |= _flat(value, f'{prefix}{key}.') if isinstance(value, dict) and value else {
        prefix + key: value}
  return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  config: dict[str, Any] = {}
  for name, value in flat.items():
    *path, key = name.split('.')
    section = config
    for part in path:
      section = section.setdefault(part, {})
    section[key] = value
  return config


def as_text(content: Mapping[str, Any]) -> str:
  """JSON with a line for each run: as short as it can be where a change of one is still seen."""
  short = lambda value: json.dumps(value, separators=(',', ':'), allow_nan=False)
  runs = ',\n'.join(map(short, content['runs']))
  rest = short({key: value for key, value in content.items() if key != 'runs'})
  return f'{rest[:-1]},"runs":[\n{runs}\n]}}\n'


def main() -> None:
  parser = argparse.ArgumentParser(
      description='What reports read of training runs, in one file, and run folders of it.')
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--runs', type=Path, help='folder of runs to store in the file --out')
  source.add_argument('--restore', type=Path, help='such a file, to be run folders below --out')
  parser.add_argument('--ends', action='store_true',
                      help='with --runs: only what the leaderboard reads')
  parser.add_argument('--out', type=Path, required=True, help='file or folder to write')
  options = parser.parse_args()
  if options.restore:
    restore(options.restore, options.out)
    return
  text = as_text(stored(options.runs, options.ends))
  options.out.write_text(text)
  count = text.count('"curves"')
  print(f'{options.out}: {len(text):,} bytes, {count} probed runs')


if __name__ == '__main__':
  main()
