"""The numbers of training runs that reports read, small enough to be kept beside a report.

  python -m tests.paper.stored --runs=runs/desk --out=results/paper/metrics.json
  python -m tests.paper.stored --restore=results/paper/metrics.json --out=runs/stored
  python -m sink_jax report --runs=runs/stored --out=results/paper

  python -m tests.paper.stored --ends --runs=runs/remedies --out=results/leaderboard/metrics.json

The first command stores runs, the second writes run folders of them again, and the third makes the
report of these. A report that is committed is made so, not of the runs themselves: stored numbers
have six significant digits, and a report of them can be made again digit by digit.

Stored are of each run its config, its status and what reports read of data.json, as differences
from the run before, which most often is of the same trial; analyses.json, all rows of validation,
the training losses and the median throughput, the last row of the probe as it is, and the curves
and the null of the untrained model that reports read of those before it; of fine-tuning
(configs/sft.py) gradient norms too, and of a graft the row that says what it did. Trials of the
paper whose course is not drawn have the last fifth of the training losses, of which there is a
mean, and of the probe the first row and those where a sink is largest and where it emerges. A map
of attention, which is only looked at, has three digits.

With --ends, which suffices for the leaderboard, each run has the last row of each kind alone, the
first of the probe, and no analyses.
Times of training steps that lie beside the runs are stored with them.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sink_jax.paper import events
from sink_jax.paper.collect import is_of_the_paper
from sink_jax.paper.numbers import FIGURES
from sink_jax.paper.report import without_paths
from sink_jax.paper.tuning import is_fine_tuned
from sink_jax.remedies.step_times import FILE
from sink_jax.report.jsontext import finite, from_json, mapped, rounded
from sink_jax.report.read_runs import read_runs
from sink_jax.report.records import RunRecord
from sink_jax.train.metrics import read_metrics
from sink_jax.train.workdir import read_config, read_data_summary, read_status

# What `read_runs` reads of the two files.
_STATUS = ('status', 'step', 'error', 'reason', 'loss', 'label', 'date',
           'command', 'code', 'hardware', 'jax')
_DATA = ('content', 'unique_training_tokens', 'tokens_per_epoch')
# What it reads and the leaderboard does not show.
_OF_NO_PAGE = ('command',)
_NULL = 'null_p99'  # the key of what a row of the probe has where there is no sink to find
_FIGURES = ('dynamics', 'learning rates')  # the kinds that draw the course of training
# Trials of the paper whose course is stored.
DRAWN = {trial for figure in FIGURES if figure.kind in _FIGURES for trial in figure.trials}.union(
    events.TRIALS)
_MAP = 'map'  # the key of a map of attention in analyses.json


def stored(runs: Path, ends: bool = False) -> dict[str, Any]:
  """The runs in or below a folder as JSON values.

  Args:
    ends: only what the leaderboard reads, see the head of this file.

  Raises:
    ValueError: there is none, or one that cannot be read.
  """
  records = read_runs(runs)
  for record in records:
    if problem := record.status == 'unreadable' and record.error:
      raise ValueError(f'The run {record.name} cannot be stored: {problem}. Take it out of {runs}, '
                       'or train it again.')
  kept, base = [], {}
  for record in records:
    # A folder that is itself a run has its name.
    folder = path if (path := runs / record.name).is_dir() else runs
    facts = _facts(folder, record, ends)
    run = {'name': record.name, 'without': [key for key in base if key not in facts],
           'facts': {key: value for key, value in facts.items()
                     if key not in base or base[key] != value},
           'analyses': {} if ends else rounded(_with_short_maps(record.analyses)),
           **rounded(_metrics(finite(read_metrics(folder)), record, ends))}
    base = facts
    kept.append({key: value for key, value in run.items() if value})
  content = {'runs': kept}
  if (runs / FILE).exists():
    content['step_times'] = rounded(from_json((runs / FILE).read_text()))
  return without_paths(content)


def restore(path: Path, folder: Path) -> None:
  """Writes the runs that a file stores as run folders below a folder.

  What is not stored is missing in their files, and is None before the last row of the probe. There
  a list per block has the one block that reports look at, and the largest activation is in units of
  the median.
  """
  content = from_json(path.read_text())
  folder.mkdir(parents=True, exist_ok=True)
  if times := content.get('step_times'):
    (folder / FILE).write_text(json.dumps(times))
  facts: dict[str, Any] = {}
  for run in content['runs']:
    workdir = folder / run['name']
    workdir.mkdir(parents=True)
    facts = {key: value for key, value in facts.items() if key not in run.get('without', ())
             } | run.get('facts', {})
    files = _nested(facts) | {'analyses': run.get('analyses')}
    for name, value in files.items():
      if value:
        (workdir / f'{name}.json').write_text(json.dumps(value))
    if rows := sorted(_rows(run), key=lambda row: row['step']):
      (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def _facts(folder: Path, record: RunRecord, ends: bool) -> dict[str, Any]:
  """{'config.model.size': 'tiny', 'status.step': 4000, ...}: of three files, by their names."""
  of = lambda values, keys: {key: values[key] for key in keys if key in values}
  status = [key for key in _STATUS if not (ends and key in _OF_NO_PAGE)]
  return _flat({'config': read_config(folder) if record.setup else {},
                'status': finite(of(read_status(folder), status)),
                'data': of(read_data_summary(folder), _DATA)})


def _metrics(rows: list[dict[str, Any]], record: RunRecord, ends: bool) -> dict[str, Any]:
  of_kind = lambda kind: [{key: value for key, value in row.items() if key != 'kind'}
                          for row in rows if row['kind'] == kind]
  last = lambda values: values[-1:] if ends else values
  train, grafts, kept = of_kind('train'), of_kind('graft'), {}
  rates = [rate for row in train if isinstance(rate := row.get('tokens_per_second'), float)]
  if valid := last(of_kind('valid')):
    kept['valid'] = _short({key: [row.get(key) for row in valid] for key in valid[-1]})
  drawn = not is_of_the_paper(record) or record.label.trial in DRAWN
  if train and not drawn:
    train = [row for row in train if row['step'] > 0.8 * train[-1]['step']]
  if train:
    keys = ['loss', *(['grad_norm'] if is_fine_tuned(record) else [])]
    columns = {'step': [row['step'] for row in train],
               **{key: [row.get(key) for row in train] for key in keys}}
    kept['train'] = _short({key: last(values) for key, values in columns.items()})
  if rates and not ends:
    # Of an even number the upper one, as reports take it.
    kept['tokens_per_second'] = statistics.median_high(rates)
  if grafts:
    kept['graft'] = grafts[-1]
  if record.probe:
    at, curves = {row['step']: row for row in of_kind('probe')}, vars(record.probe.curves)
    steps, emerged = curves['step'], record.probe.emergence_step
    kept_steps = {steps[0], steps[-1]}
    if drawn and not ends:
      kept_steps.update(steps)
    elif not ends:
      # The last one below the level of emergence shows where it was passed.
      kept_steps |= {record.probe.peak_step, emerged, max([step for step in steps if step < (
          emerged or 0)], default=None)}
    kept['probe'] = {
        'curves': _short({key: [value for step, value in zip(steps, values) if step in kept_steps]
                          for key, values in curves.items()}),
        'first_null': at[steps[0]].get(_NULL), 'last': at[steps[-1]]}
  return kept


def _short(columns: Mapping[str, list[Any]]) -> dict[str, Any]:
  """The same with {'range': [first, end, distance]} for even steps, and null for nothing but it."""
  short: dict[str, Any] = {key: values if any(value is not None for value in values) else None
                           for key, values in columns.items()}
  steps = columns['step']
  if len(steps) > 2:
    even = range(steps[0], steps[-1] + 1, max(1, steps[1] - steps[0]))
    if steps == list(even):
      short['step'] = {'range': [even.start, even.stop, even.step]}
  return short


def _long(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
  """What `_short` has shortened."""
  steps = columns['step']
  steps = list(range(*steps['range'])) if isinstance(steps, dict) else steps
  return {key: steps if key == 'step' else values or [None] * len(steps)
          for key, values in columns.items()}


def _rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The rows of metrics.jsonl, those of a kind together."""
  rows = []
  for kind in ('valid', 'train'):
    columns = _long(run[kind]) if kind in run else {}
    rows += [{'kind': kind, **dict(zip(columns, values))} for values in zip(*columns.values())]
  if rate := run.get('tokens_per_second'):
    rows[-1]['tokens_per_second'] = rate  # of training, which comes last
  if graft := run.get('graft'):
    rows.append({'kind': 'graft', **graft})
  if probe := run.get('probe'):
    curves, last = _long(probe['curves']), probe['last']
    # A row that is not whole has all keys of one that is, without numbers.
    rows += [{'kind': 'probe', **dict.fromkeys(last), **_before_last(curves, i)}
             for i in range(len(curves['step']) - 1)] + [{'kind': 'probe', **last}]
    # A run that has ended at its first probe has one row, which is the first and the last.
    rows[-len(curves['step'])][_NULL] = probe['first_null']
  return rows


def _before_last(curves: Mapping[str, list[Any]], i: int) -> dict[str, Any]:
  """A row of the probe from which the same point of the curves is read."""
  at = {key: values[i] for key, values in curves.items()}
  row = {'step': at['step'], 'sink_1': at['sink_1'], 'sink_bias_slot': at['sink_extra_key'],
         'largest_importance': at['largest_importance'], 'value_ratio': [at['value_ratio']],
         # Entry 0 is the embedding, which reports leave out.
         'hidden_ratio': [None, at['hidden_ratio']]}
  blocks = {key: [None, None] for key in (
      'activation_max', 'activation_median', 'activations_beyond_100', 'activations_beyond_1000',
      'kurtosis_moment', 'kurtosis_channels', 'activation_position', 'activation_channel')}
  return row | blocks | {'activation_max': [None, at['max_over_median']],
                         'activation_median': [None, at['max_over_median'] and 1.0]}


def _with_short_maps(analyses: Mapping[str, Any]) -> dict[str, Any]:
  short = lambda leaf: float(f'{leaf:.3g}') if isinstance(leaf, float) else leaf
  return {name: {key: mapped(value, short) if key == _MAP else value
                 for key, value in results.items()} for name, results in analyses.items()}


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
  others = ''.join(f',{short(key)}:{short(value)}' for key, value in content.items()
                   if key != 'runs')
  return f'{{"runs":[\n{runs}\n]{others}}}\n'


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
