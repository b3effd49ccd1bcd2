"""The folders of training runs read back as records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.attention.normalizer import AbsSum, RowSum, Unnormalized
from sink_jax.attention.spec import AttentionSpec
from sink_jax.component import Component
from sink_jax.data.synthetic import SyntheticTask
from sink_jax.io.paths import AnyPath, files_named, is_local, to_path
from sink_jax.models.record import GraftReport
from sink_jax.report.jsontext import finite
from sink_jax.report.probe_record import is_number, probe_record
from sink_jax.report.records import Course, Origin, RunRecord, Setup, TextAmount
from sink_jax.train.config import Experiment, Label, from_dict
from sink_jax.train.metrics import read_metrics
from sink_jax.train.workdir import read_config, read_data_summary, read_object, read_status

_FILES = ('config.json', 'status.json', 'metrics.jsonl')  # a folder with any of them is a run
_REMEDY = 'python -m sink_jax sweep --config=configs/quickstart.py --workdir='


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
    raise ValueError(f'{directory} is a file: name the folder of the runs.' if root.exists() else
                     f'There is no folder {directory}. Make runs with {_REMEDY}{directory}')
  # A trial that never began has status.json alone.
  folders = {path.parent for path in files_named(root, _FILES)}
  own_name = (root.resolve() if is_local(root) else root).name  # '.' has no name before that
  return [read_run(folder, folder.relative_to(root).as_posix() if folder != root else own_name)
          for folder in sorted(folders)]


def read_analyses(folder: AnyPath) -> dict[str, dict[str, Any]]:
  """The results of a finished run's analyses, by name; without those that cannot be read."""
  results = read_object(folder / 'analyses.json') or {}
  return {name: of for name, of in results.items() if isinstance(of, dict)}


def read_run(folder: str | AnyPath, name: str) -> RunRecord:
  """The record of one run, whatever its state is; what cannot be read is said in `error`."""
  folder = to_path(folder)
  # JSON of metrics has NaN and Infinity; a report must not, so that they are None from here on.
  status, rows = read_status(folder), finite(read_metrics(folder))
  of_kind = lambda kind: [row for row in rows if row['kind'] == kind]
  run = RunRecord(
      name=name, folder=folder, label=_label(status), status=status['status'],
      error=status.get('error'), reason=status.get('reason'), loss=status.get('loss'),
      origin=Origin(_hardware(status), status.get('command'), status.get('code')),
      step=max([row['step'] for row in rows] + [status.get('step') or 0]),
      train_course=_course(of_kind('train')), valid_course=_course(of_kind('valid')),
      analyses=finite(read_analyses(folder)))
  if not (folder / 'config.json').exists() and run.status in ('failed', 'not expressible'):
    return run  # it never began
  try:
    config = read_config(folder)
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
    if probed:
      blocks = [layer + 1 for layer in setup.experiment.model_before_data().attention_layers]
      run = dataclasses.replace(run, probe=probe_record(probed, blocks))
    return run
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    what = f'has no {error}' if isinstance(error, KeyError) else f'cannot be read: {error}'
    return dataclasses.replace(run, status='unreadable',
                               error=f'metrics.jsonl: a row of the probe or of a graft {what}')


# What components are called where all of their arguments have their defaults; '' changes nothing.
_SHORT = {'NoBias': '', 'KBias': 'K bias', 'KVBias': 'KV bias', 'VBias': 'V bias',
          'SinkLogit': 'sink logit', 'ZeroSink': 'off by one', 'PseudoMask': 'pseudo-attention',
          'PlainOutput': '', 'HeadGate': 'head gate', 'ElementGate': 'element gate',
          'HeadNorm': 'head norm', 'Exclusive': 'exclusive self attention'}


def describe_attention(experiment: Experiment) -> str:
  """The attention operation in words, e.g. 'sigmoid without normalisation, K bias'."""
  spec, normalizer, plain = experiment.attention, experiment.attention.normalizer, AttentionSpec()
  name = _named(spec.similarity, type(spec.similarity).__name__.lower())
  # exp(score) divided by the sum of its row is softmax, whatever the parts are called.
  if spec.similarity.kind == 'exponential' and isinstance(normalizer, RowSum):
    words = 'softmax' if normalizer.scale == 1 else f'softmax times {normalizer.scale:g}'
    if spec.similarity.cap:
      words += f' of scores capped at {spec.similarity.cap:g}'
  elif normalizer == AbsSum():  # of Softpick alone, whose name says it
    words = name
  elif isinstance(normalizer, Unnormalized):
    words = f'{name} without normalisation'
  elif spec.rows_sum_to_one:
    words = f'{name} with normalisation'
  else:
    words = f'{"softmax" if normalizer.clips else name}, {normalizer}'
  return ', '.join(filter(None, [
      words,
      f'feature map {spec.feature_map}' if spec.feature_map != plain.feature_map else '',
      repr(spec.temperature) if spec.temperature != plain.temperature else '',
      repr(spec.value) if spec.value != plain.value else '',
      _short(spec.kv_bias),
      'a learned sink token' if experiment.model.sink_tokens else '',
      _short(spec.head)]))


def _short(component: Component) -> str:
  name = type(component).__name__
  return _named(component, _SHORT.get(name, name))


def _named(component: Component, short: str) -> str:
  """The short name of a component where all of its arguments have their defaults."""
  return short if not short or component == type(component)() else str(component)


def _label(record: Mapping[str, Any]) -> Label:
  """The label of a config, or of the status of a trial that has no config."""
  label = record.get('label') or {}
  return Label(*(label.get(key) or '' for key in ('trial', 'budget', 'protocol')))


def _course(rows: Sequence[Mapping[str, Any]]) -> Course:
  """{key: a number or None for every row}, of the keys that hold numbers."""
  keys = dict.fromkeys(key for row in rows for key, value in row.items() if is_number(value))
  return {key: [value if is_number(value := row.get(key)) else None for row in rows]
          for key in keys}


def _hardware(status: Mapping[str, Any]) -> str | None:
  """'cpu, 2 cores; jax 0.10.2; 2026-11-21', or None before a run has started."""
  if 'hardware' not in status:
    return None
  return f'{status["hardware"]}; jax {status["jax"]}; {status["date"].split("T")[0]}'


def _setup(experiment: Experiment, config: Mapping[str, Any]) -> Setup:
  source, spec = experiment.data.source, experiment.attention
  synthetic = isinstance(source, SyntheticTask)
  return Setup(
      settings=_flat({key: value for key, value in config.items() if key != 'label'}),
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


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for key, value in config.items():
    flat |= _flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
  return flat
