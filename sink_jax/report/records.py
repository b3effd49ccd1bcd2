"""Training runs read back as plain numbers, for tables, sentences and figures."""

from __future__ import annotations

import json

import numpy as np

from sink_jax.attention.normalizer import RowSum, Unnormalized
from sink_jax.data.stdlib import splits_by_name
from sink_jax.data.synthetic import SyntheticTask
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.io.paths import files_named, is_local, to_path
from sink_jax.report.jsontext import finite
from sink_jax.train.experiment import Experiment, from_dict
from sink_jax.train.metrics_log import read_metrics
from sink_jax.train.record import metrics_problem
from sink_jax.train.run_dir import read_analyses, read_config, read_data_summary, read_status

EMERGENCE_LEVEL = 0.1  # Sink_1 has emerged once it stays at or above this share of heads
_MEASURED = ('sink_1', 'sink_bias_slot', 'sink_bias_slot_released', 'largest_importance',
             'mean_importance', 'mean_bias_slot', 'raw_mass_1', 'largest_raw_mass_1',
             'raw_row_mass')
_CURVES = ('step', 'sink_1', 'sink_bias_slot', 'largest_importance')
_RECORDS = ('config.json', 'status.json', 'metrics.jsonl')  # a folder with any of them is a run
_RATIOS = ('value', 'key', 'hidden', 'hidden_before_norm', 'sink_token')
_REMEDY = 'python -m sink_jax.sweep --config=configs/quickstart.py --workdir='


def read_runs(directory) -> list[dict]:
  """Every run in or below a folder, as `read_run` describes it, in order of name.

  Raises:
    ValueError: there is no such folder, or no run in it.
  """
  runs = find_runs(directory)
  if not runs:
    raise ValueError(f'There is no run in {directory}. Make some with {_REMEDY}{directory}')
  return runs


def find_runs(directory) -> list[dict]:
  """The same for a folder that may hold none yet.

  Raises:
    ValueError: there is no such folder.
  """
  given, directory = directory, to_path(directory)
  if not directory.is_dir():
    raise ValueError(f'{given} is not a folder. Make runs with {_REMEDY}{given}')
  folders = {path.parent for path in files_named(directory, _RECORDS)}
  whole = directory.resolve() if is_local(directory) else directory  # for its name
  return [read_run(folder, folder.relative_to(directory).as_posix() if folder != directory
                   else whole.name) for folder in sorted(folders)]


def read_run(folder, name: str) -> dict:
  """One run as a JSON-able dict.

  Always: name, label {trial, budget, protocol} ('' where unknown), status ('done',
  'running', 'interrupted', 'diverged', 'failed', 'not expressible', 'not run' or
  'unreadable'), error, reason and loss where the status has them, record_whole_from (the step
  from which on no row of metrics is missing; None: all are there), record_problem (how the
  metrics differ from what was written, or ''), trained_on (hardware, jax, day), trained_by (the
  command) and trained_with (the commit) once it was started, step (the last one on record),
  courses {kind: {key: numbers}} of the metrics that are numbers, and analyses.
  With a readable config: config, attention (in words), proxy (whether importance is of proxy
  scores), has_slot, source, facts (of its optimum), seed, steps, tokens, epsilon,
  unique_tokens and epochs of its text (None for a synthetic task), content (a hash of its
  data, None where unknown).
  With validation rows: losses {set: nats per token}. With probe rows: the last row's
  quantities, probe_step, value_ratio and value_ratio_block (the smallest over blocks, from
  1), sink (Sink_k, k = 1, ...), ratios {kind: one number per block, or None},
  emergence_step (None: it did not emerge), peak_sink_1 and peak_step, curves.
  """
  folder = to_path(folder)
  status, rows = read_status(folder), finite(read_metrics(folder))
  run = {'name': name, 'label': _label(status), 'status': status['status'],
         'error': status.get('error'), 'reason': status.get('reason'),
         'loss': status.get('loss'), 'record_whole_from': status.get('record_whole_from'),
         'record_problem': metrics_problem(folder), 'trained_on': _trained_on(status),
         'trained_by': status.get('command'), 'trained_with': status.get('code'),
         'step': max([row['step'] for row in rows] + [status.get('step') or 0]),
         'courses': {kind: _course([row for row in rows if row['kind'] == kind])
                     for kind in ('train', 'valid')},
         'analyses': finite(read_analyses(folder))}
  if not (folder / 'config.json').exists() and run['status'] in ('failed', 'not expressible'):
    return run  # it never began
  try:
    config = read_config(folder)
    config['label'] = (config.get('label') or {}) | _label(config)  # runs older than labels
    run |= {'config': config, 'label': _label(config), **_settings(from_dict(config), config)}
    run |= _amount(read_data_summary(folder), run['tokens'])
  except (ValueError, KeyError, TypeError) as error:
    return run | {'status': 'unreadable', 'error': ' '.join(str(error).split())}
  valid = [row for row in rows if row['kind'] == 'valid']
  if valid:
    run['losses'] = {k: v for k, v in valid[-1].items() if k not in ('kind', 'step')}
  probed = [row for row in rows if row['kind'] == 'probe'
            and None not in (row['largest_importance'], *row['value_ratio'])]  # nan activations
  return run | _measured(probed, run) if probed else run


def describe_attention(experiment: Experiment) -> str:
  """The attention operation in words, e.g. 'sigmoid without normalisation, K bias'."""
  spec, tokens = experiment.attention, experiment.model.sink_tokens
  name = type(spec.similarity).__name__.lower()
  if spec.similarity.exponential and isinstance(spec.normalizer, RowSum):
    words = 'softmax' if spec.normalizer.scale == 1 else f'softmax times {spec.normalizer.scale:g}'
  elif isinstance(spec.normalizer, Unnormalized):
    words = f'{name} without normalisation'
  elif isinstance(spec.normalizer, RowSum) and spec.normalizer.scale == 1:
    words = f'{name} with normalisation'
  else:
    words = f'{name}, {spec.normalizer}'
  parts = [words]
  if type(spec.feature_map).__name__ != 'Identity':
    parts.append(f'feature map {spec.feature_map}')
  if spec.kv_bias.label:
    bare = spec.kv_bias == type(spec.kv_bias)()
    parts.append(spec.kv_bias.label if bare else str(spec.kv_bias))
  if tokens:
    parts.append('a learned sink token')
  return ', '.join(parts)


def settings_of(run: dict) -> dict:
  """Dotted config keys and their values, but for the label, which changes nothing."""
  return _flat({key: value for key, value in run['config'].items() if key != 'label'})


def differing_settings(runs: list[dict]) -> tuple[dict, dict[str, dict]]:
  """Dotted config keys: what all runs share, and {run name: what it has differently}."""
  flat = {run['name']: settings_of(run) for run in runs}
  keys = dict.fromkeys(key for config in flat.values() for key in config)
  shared = {key: next(iter(flat.values())).get(key) for key in keys
            if len({json.dumps(config.get(key)) for config in flat.values()}) == 1}
  return shared, {name: {key: value for key, value in config.items() if key not in shared}
                  for name, config in flat.items()}


def split_notes(runs: list[dict]) -> list[str]:
  """A line where validation text of the runs was held out by the names of its modules."""
  named = [run['name'] for run in runs if 'config' in run
           and splits_by_name(str(run['config']['data']['source']))
           and not run['config']['data'].get('valid_source')]
  if not named:
    return []
  which = 'all runs' if len(named) == len(runs) else ', '.join(named)
  return [f'Validation losses ({which}): a part of the validation text is training text, too, for '
          'Stdlib() holds modules out by their names. To be made again with '
          "Stdlib(split='content')."]


def shown_losses(run: dict) -> list[str]:
  """The validation sets worth showing: a synthetic task's own, else all targets."""
  named = [key for key in run.get('losses', ()) if key != 'valid']
  return named if named and run['synthetic'] else ['valid'] if 'losses' in run else []


def record_note(run: dict) -> str:
  """What is missing from the metrics of a run, or was changed in them; '' if nothing is."""
  if run.get('record_problem'):
    return (f'Its {run["record_problem"]}: rows were changed after they were written, so its '
            'numbers may be untrue. The command that trained it sets such rows aside.')
  if run.get('record_whole_from'):
    return (f'Its record is whole from step {run["record_whole_from"]} on: rows before that are '
            'missing.')
  return ''


def baseline_of(run: dict, runs: list[dict]) -> dict | None:
  """The softmax run that differs from this one only in attention, and there the least."""
  if 'config' not in run or run.get('attention') in (None, 'softmax'):
    return None
  differences = {}
  for i, other in enumerate(runs):
    if other.get('attention') == 'softmax':
      mine, its = settings_of(run), settings_of(other)
      keys = [key for key in mine | its if mine.get(key) != its.get(key)]
      if all(key.startswith('attention.') or key == 'model.sink_tokens' for key in keys):
        differences[i] = len(keys)
  return runs[min(differences, key=differences.get)] if differences else None


def _label(record):
  """Of a config, or of the status of a trial that has none."""
  label = record.get('label') or {}
  return {key: label.get(key) or '' for key in ('trial', 'budget', 'protocol')}


def _course(rows):
  """{key: a number or None for every row}, of the keys that hold numbers."""
  number = lambda x: x if isinstance(x, (int, float)) and not isinstance(x, bool) else None
  keys = dict.fromkeys(key for row in rows for key in row if number(row[key]) is not None)
  return {key: [number(row.get(key)) for row in rows] for key in keys}


def _trained_on(status):
  """'cpu, 2 cores; jax 0.10.2; 2026-11-21', or None before a run has started."""
  if 'hardware' not in status:
    return None
  return f'{status["hardware"]}; jax {status["jax"]}; {status["date"].split("T")[0]}'


def _settings(experiment, config):
  source, spec = experiment.data.source, experiment.attention
  synthetic = isinstance(source, SyntheticTask)
  return {
      'attention': describe_attention(experiment),
      'proxy': not spec.rows_sum_to_one,
      'has_slot': bool(spec.kv_bias.has_extra_key or experiment.model.sink_tokens),
      'source': str(source) if synthetic else f'{source}, {experiment.data.tokenizer}',
      'synthetic': synthetic,
      'facts': source.facts() if synthetic else {},
      'seed': experiment.seed,
      'steps': experiment.steps,
      'tokens': experiment.steps * experiment.batch_size * experiment.data.context,
      'epsilon': experiment.probe.epsilon,
  }


def _amount(data, tokens):
  """How much text there was, and how often all of it was seen, or will have been."""
  epoch = data.get('tokens_per_epoch')
  return {'unique_tokens': data.get('unique_training_tokens'),
          'epochs': tokens / epoch if epoch else None, 'content': data.get('content')}


def _measured(probed, run):
  """What the probe rows say: the last one, and the course of Sink_1."""
  last = probed[-1]
  steps, rates = [row['step'] for row in probed], [row['sink_1'] for row in probed]
  peak = int(np.argmax(rates))
  block = int(np.argmin(last['value_ratio']))
  return {
      **{key: last[key] for key in _MEASURED},
      'probe_step': last['step'],
      'value_ratio': last['value_ratio'][block],
      'value_ratio_block': block + 1,
      'sink': last['sink'],
      'ratios': {kind: last.get(f'{kind}_ratio') for kind in _RATIOS},
      'emergence_step': emergence_step(steps, np.asarray(rates) / 100, EMERGENCE_LEVEL),
      'peak_sink_1': rates[peak],
      'peak_step': steps[peak],
      'curves': {key: [row[key] for row in probed] for key in _CURVES},
  }


def _flat(config, prefix=''):
  flat = {}
  for key, value in config.items():
    flat |= _flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
  return flat
