"""The folders of training runs read back as records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sink_jax.attention.normalizer import AbsSum, RowSum, Unnormalized
from sink_jax.attention.spec import AttentionSpec
from sink_jax.data.synthetic import SyntheticTask
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.io.paths import AnyPath, files_named, is_local, to_path
from sink_jax.models.graft_report import GraftReport
from sink_jax.report.jsontext import finite
from sink_jax.report.probe_record import (
  EMERGENCE_LEVEL,
  BlockActivations,
  Curves,
  NormRatios,
  ProbeRecord,
)
from sink_jax.report.records import Course, Origin, RunRecord, Setup, TextAmount
from sink_jax.train.experiment import Experiment, Label, from_dict
from sink_jax.train.metrics_log import read_metrics
from sink_jax.train.record import metrics_problem
from sink_jax.train.run_dir import read_analyses, read_config, read_data_summary, read_status

_FILES = ('config.json', 'status.json', 'metrics.jsonl')  # a folder with any of them is a run
# Fields of a `ProbeRecord` that rows of the probe have under the same name.
_SAME = ('step', 'sink_1', 'sink', 'largest_importance', 'mean_importance', 'raw_mass_1',
         'largest_raw_mass_1', 'raw_row_mass')
_REMEDY = 'python -m sink_jax.sweep --config=configs/quickstart.py --workdir='


def read_runs(directory: str | AnyPath) -> list[RunRecord]:
  """Every run in or below a folder, in order of name.

  Raises:
    ValueError: there is no such folder, or no run in it.
  """
  runs = find_runs(directory)
  if not runs:
    raise ValueError(f'There is no run in {directory}. Make some with {_REMEDY}{directory}')
  return runs


def find_runs(directory: str | AnyPath) -> list[RunRecord]:
  """The same for a folder that may hold none yet.

  Raises:
    ValueError: there is no such folder.
  """
  root = to_path(directory)
  if not root.is_dir():
    raise ValueError(f'{directory} is not a folder. Make runs with {_REMEDY}{directory}')
  # A trial that never began has status.json alone.
  folders = {path.parent for path in files_named(root, _FILES)}
  own_name = (root.resolve() if is_local(root) else root).name  # '.' has no name before that
  return [read_run(folder, folder.relative_to(root).as_posix() if folder != root else own_name)
          for folder in sorted(folders)]


def read_run(folder: str | AnyPath, name: str) -> RunRecord:
  """The record of one run, whatever its state is; what cannot be read is said in `error`."""
  folder = to_path(folder)
  # JSON of metrics has NaN and Infinity; a report must not, so that they are None from here on.
  status, rows = read_status(folder), finite(read_metrics(folder))
  of_kind = lambda kind: [row for row in rows if row['kind'] == kind]
  run = RunRecord(
      name=name, label=_label(status), status=status['status'], error=status.get('error'),
      reason=status.get('reason'), loss=status.get('loss'),
      complete_from=status.get('record_whole_from'), metrics_problem=metrics_problem(folder),
      origin=Origin(_hardware(status), status.get('command'), status.get('code')),
      step=max([row['step'] for row in rows] + [status.get('step') or 0]),
      train_course=_course(of_kind('train')), valid_course=_course(of_kind('valid')),
      analyses=finite(read_analyses(folder)))
  if not (folder / 'config.json').exists() and run.status in ('failed', 'not expressible'):
    return run  # it never began
  try:
    config = read_config(folder)
    # Runs that are older than labels have none, or an incomplete one.
    config['label'] = (config.get('label') or {}) | dataclasses.asdict(_label(config))
    setup = _setup(from_dict(config), config)
    run = dataclasses.replace(run, label=_label(config), setup=setup)
    run = dataclasses.replace(run, text=_text_amount(read_data_summary(folder), setup.tokens))
  except (ValueError, KeyError, TypeError) as error:  # one bad folder does not end a report
    return dataclasses.replace(run, status='unreadable', error=' '.join(str(error).split()))
  # The last evaluation is the result; the others are in `valid_course`.
  if valid := of_kind('valid'):
    run = dataclasses.replace(run, losses={
        key: value for key, value in valid[-1].items() if key not in ('kind', 'step')})
  try:
    if grafts := of_kind('graft'):
      run = dataclasses.replace(run, graft=GraftReport.from_row(grafts[-1]))
    # A row with None for these was measured while activations were not finite.
    probed = [row for row in of_kind('probe')
              if None not in (row['largest_importance'], *row['value_ratio'])]
    return dataclasses.replace(run, probe=_probe(probed)) if probed else run
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    what = f'has no {error}' if isinstance(error, KeyError) else f'cannot be read: {error}'
    return dataclasses.replace(run, status='unreadable',
                               error=f'metrics.jsonl: a row of the probe or of a graft {what}')


def describe_attention(experiment: Experiment) -> str:
  """The attention operation in words, e.g. 'sigmoid without normalisation, K bias'."""
  spec, tokens = experiment.attention, experiment.model.sink_tokens
  # The short name suffices where all arguments have their defaults.
  name = (type(spec.similarity).__name__.lower()
          if spec.similarity == type(spec.similarity)() else str(spec.similarity))
  # exp(score) divided by the sum of its row is softmax, whatever the parts are called.
  if spec.similarity.kind == 'exponential' and isinstance(spec.normalizer, RowSum):
    words = 'softmax' if spec.normalizer.scale == 1 else f'softmax times {spec.normalizer.scale:g}'
    if spec.similarity.limit:
      words += f' of scores capped at {spec.similarity.limit:g}'
  elif spec.normalizer == AbsSum():  # of Softpick alone, whose name says it
    words = name
  elif spec.normalizer.clips:
    words = f'softmax, {spec.normalizer}'
  elif isinstance(spec.normalizer, Unnormalized):
    words = f'{name} without normalisation'
  elif spec.rows_sum_to_one:
    words = f'{name} with normalisation'
  else:
    words = f'{name}, {spec.normalizer}'
  parts = [words]
  if type(spec.feature_map).__name__ != 'Identity':
    parts.append(f'feature map {spec.feature_map}')
  plain = AttentionSpec()
  parts += [repr(own) for own, default in ((spec.temperature, plain.temperature),
                                           (spec.value, plain.value)) if own != default]
  if spec.kv_bias.label:
    # The short label suffices where all arguments have their defaults.
    bare = spec.kv_bias == type(spec.kv_bias)()
    parts.append(spec.kv_bias.label if bare else str(spec.kv_bias))
  if tokens:
    parts.append('a learned sink token')
  if spec.head.label:
    parts.append(spec.head.label if spec.head == type(spec.head)() else str(spec.head))
  return ', '.join(parts)


def _label(record: Mapping[str, Any]) -> Label:
  """The label of a config, or of the status of a trial that has no config."""
  label = record.get('label') or {}
  return Label(*(label.get(key) or '' for key in ('trial', 'budget', 'protocol')))


def _course(rows: Sequence[Mapping[str, Any]]) -> Course:
  """{key: a number or None for every row}, of the keys that hold numbers."""
  # To Python a truth is an int; a course holds quantities to draw.
  number = lambda x: x if isinstance(x, (int, float)) and not isinstance(x, bool) else None
  keys = dict.fromkeys(key for row in rows for key in row if number(row[key]) is not None)
  return {key: [number(row.get(key)) for row in rows] for key in keys}


def _hardware(status: Mapping[str, Any]) -> str | None:
  """'cpu, 2 cores; jax 0.10.2; 2026-11-21', or None before a run has started."""
  if 'hardware' not in status:
    return None
  return f'{status["hardware"]}; jax {status["jax"]}; {status["date"].split("T")[0]}'


def _setup(experiment: Experiment, config: Mapping[str, Any]) -> Setup:
  source, spec = experiment.data.source, experiment.attention
  synthetic = isinstance(source, SyntheticTask)
  return Setup(
      config=config,
      experiment=experiment,
      attention=describe_attention(experiment),
      proxy=not spec.rows_sum_to_one,
      has_extra_key=bool(spec.kv_bias.has_extra_key or experiment.model.sink_tokens),
      source=str(source) if synthetic else f'{source}, {experiment.data.tokenizer}',
      synthetic=synthetic,
      facts=source.facts() if synthetic else {},
      seed=experiment.seed,
      steps=experiment.steps,
      tokens=experiment.steps * experiment.batch_size * experiment.data.context,
      epsilon=experiment.probe.epsilon,
  )


def _text_amount(data: Mapping[str, Any], tokens: int) -> TextAmount:
  """From `Data.summary()`; the epochs are those of a whole run, also before it is done."""
  epoch = data.get('tokens_per_epoch')
  return TextAmount(data.get('unique_training_tokens'), tokens / epoch if epoch else None,
                    data.get('content'))


def _probe(rows: Sequence[Mapping[str, Any]]) -> ProbeRecord:
  """From probe rows in order of step, the last of which is the result."""
  last = rows[-1]
  steps, rates = [row['step'] for row in rows], [row['sink_1'] for row in rows]
  # The first of several equal ones: when the rate got there, and not how long it stayed.
  peak = int(np.argmax(rates))
  # Sentences name the block where the first token's values are shortest against the others'.
  block = int(np.argmin(last['value_ratio']))
  return ProbeRecord(
      **{key: last[key] for key in _SAME},
      sink_extra_key=last['sink_bias_slot'],
      sink_extra_key_official=last['sink_bias_slot_released'],
      mean_extra_key=last['mean_bias_slot'],
      value_ratio=last['value_ratio'][block],
      value_ratio_block=block + 1,
      ratios=NormRatios(**{field.name: last.get(f'{field.name}_ratio')
                           for field in dataclasses.fields(NormRatios)}),
      # Rates are percentages in metrics.jsonl, and shares in `evaluate`.
      emergence_step=emergence_step(steps, np.asarray(rates) / 100, EMERGENCE_LEVEL),
      peak_sink_1=rates[peak],
      peak_step=steps[peak],
      curves=Curves(steps, rates, [row['sink_bias_slot'] for row in rows],
                    [row['largest_importance'] for row in rows],
                    [_least(row['value_ratio']) for row in rows],
                    # Entry 0 is the embedding.
                    [_largest((row.get('hidden_ratio') or [])[1:]) for row in rows],
                    [_largest(block.max_over_median for block in _activations(row))
                     for row in rows]),
      # A record that has lost its beginning has no row of the untrained model.
      nulls=_nulls(rows[0]) if rows[0]['step'] == 0 else {},
      last_nulls=_nulls(last),
      activations=_activations(last),
      dormant_heads=last.get('dormant_heads'),
  )


def _least(values: Iterable[float | None]) -> float | None:
  return min((value for value in values if value is not None), default=None)


def _largest(values: Iterable[float | None]) -> float | None:
  return max((value for value in values if value is not None), default=None)


def _activations(row: Mapping[str, Any]) -> list[BlockActivations]:
  """Those of the blocks of a probe row; none in the rows of older runs."""
  if 'activation_max' not in row:
    return []
  keys = {'max': 'activation_max', 'median': 'activation_median',
          'beyond_100': 'activations_beyond_100', 'beyond_1000': 'activations_beyond_1000',
          'kurtosis_moment': 'kurtosis_moment', 'kurtosis_channels': 'kurtosis_channels',
          'position': 'activation_position', 'channel': 'activation_channel'}
  # Entry 0 is the embedding. A list that is shorter than others is of a damaged row.
  blocks = zip(*(row[key] for key in keys.values()), strict=True)
  return [BlockActivations(block, **dict(zip(keys, values)))
          for block, values in enumerate(blocks) if block]


def _nulls(row: Mapping[str, Any]) -> dict[str, float]:
  """The null percentiles of a probe row that are numbers."""
  return {key: float(value) for key, value in (row.get('null_p99') or {}).items()
          if isinstance(value, (int, float)) and not isinstance(value, bool)}
