"""One run, read from its workdir: its row, and its measurements as points."""

from __future__ import annotations

import collections
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from sink_jax.attention.mask import Causal
from sink_jax.attention.normalizer import Clipped, Normalizer, RowSum
from sink_jax.component import UnknownComponent, from_string, short_text
from sink_jax.data.sources import DocumentSource
from sink_jax.io.paths import AnyPath, inside
from sink_jax.report import validity
from sink_jax.train.config import Experiment, known_part, leaves
from sink_jax.train.metrics import read_metrics
from sink_jax.train.workdir import read_config, read_object, read_status

FIRST = 10  # tokens among which a sink is looked for; few queries see late ones
_POINTS = 100  # of a training curve
# The metrics of a probe by their keys in metrics.jsonl: of every probe, of the last one, of its
# blocks.
EVERY = {
  'sink_1': 'sink_1',
  'sink_star': 'sink_bias_slot',
  'largest_importance': 'largest_importance',
}
FINAL = {
  'sink_star_released': 'sink_bias_slot_released',
  'mean_extra_key': 'mean_bias_slot',
  **{
    name: name
    for name in (
      'mean_importance',
      'raw_mass_1',
      'largest_raw_mass_1',
      'raw_row_mass',
      'dormant_heads',
    )
  },
}
_BLOCKS = (
  'value_ratio key_ratio hidden_ratio hidden_before_norm_ratio sink_token_ratio activation_max '
  'activation_median activations_beyond_100 activations_beyond_1000 kurtosis_moment '
  'kurtosis_channels'
).split()
# Words for components with default arguments; '' adds nothing.
_WORDS = {
  'Exp()': 'exp',
  'Sigmoid()': 'sigmoid',
  'Relu()': 'relu',
  'SquaredRelu()': 'squared relu',
  'Linear()': 'linear',
  'EluPlusOne()': 'elu plus one',
  'Softpick()': 'softpick',
  'NoBias()': '',
  'KBias()': 'K bias',
  'KVBias()': 'KV bias',
  'VBias()': 'V bias',
  'SinkLogit()': 'sink logit',
  'ZeroSink()': 'off by one',
  'Fixed()': '',
  'PlainValue()': '',
  'PlainOutput()': '',
  'HeadGate()': 'head gate',
  'ElementGate()': 'element gate',
  'HeadNorm()': 'head norm',
  'Exclusive()': 'exclusive self attention',
  'Identity()': '',
  'Unnormalized()': ' without normalisation',
  'AbsSum()': '',  # of softpick, whose name says it
}
Point = tuple[str, int, int | None, float]  # metric, step, block, value


def describe_attention(experiment: Experiment) -> str:
  """The attention operation in words, e.g. 'sigmoid without normalisation, K bias'."""
  spec = experiment.attention
  f, z = spec.similarity, spec.normalizer
  named = lambda component: _WORDS.get(short_text(component), str(component))
  # exp(score) divided by the sum of its row is softmax, however its parts are named.
  if f.kind == 'exponential' and isinstance(z, RowSum):
    words = 'softmax' if z.scale == 1 else f'softmax times {z.scale:g}'
    words += f' of scores capped at {f.cap:g}' if f.cap else ''
  elif spec.rows_sum_to_one:
    words = f'{named(f)} with normalisation'
  else:
    words = ('softmax' if isinstance(z, Clipped) else named(f)) + _WORDS.get(
      short_text(z), f', {z}'
    )
  features = f'feature map {spec.feature_map}' if named(spec.feature_map) else ''
  sink_token = 'a learned sink token' if experiment.model.sink_tokens else ''
  parts = [
    words,
    features,
    named(spec.temperature),
    named(spec.value),
    named(spec.kv_bias),
    sink_token,
    named(spec.head),
  ]
  return ', '.join(filter(None, parts))


def read_run(workdir: AnyPath) -> tuple[dict[str, Any], list[Point]]:
  """The row of a run, and its measurements."""
  row: dict[str, Any] = {}
  try:
    status = read_status(workdir)
    row['status'] = status['status']
    row['reason'] = status.get('error') or status.get('reason')
    row |= {key: status.get(key) for key in ('step', 'command', 'code')}
    row |= status.get('label') or {}
    if 'hardware' in status:
      row['hardware'] = f'{status["hardware"]}; jax {status["jax"]}'
      row['date'] = status['date'].split('T')[0]
    if not (workdir / 'config.json').exists() and row['status'] in ('failed', 'not expressible'):
      return row, []  # it never began
    experiment, unknown = known_part(read_config(workdir))
    row |= _facts(experiment, read_object(inside(workdir, 'data.json')))
    if unknown:
      row |= _facts_of_unknown(unknown, row['settings'])
    blocks = [
      layer + 1
      for layer in experiment.model_config().attention_layers
      if 'model.pattern' not in unknown
    ]
    points = [*_measured(read_metrics(workdir), blocks, row['task'] == 'sft')]
    last = max((step for _, step, *_ in points), default=0)
    if row['status'] == 'done' and last < row['steps']:
      raise ValueError(f'metrics.jsonl ends at step {last}')  # its last numbers are not the run's
    if row['status'] == 'not run' and points:
      raise ValueError('status.json is missing or damaged')
    points += _analysed(read_object(inside(workdir, 'analyses.json')), row['steps'])
    return row | {'step': max(last, row['step'] or 0)}, points
  except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
    what = f'there is no {error}' if isinstance(error, KeyError) else ' '.join(str(error).split())
    return row | {'status': 'unreadable', 'reason': what}, []


def source_of(experiment: Experiment) -> str:
  """The source of the text in words, with the tokenizer where there is one."""
  source = experiment.data.source
  tokenizer = f', {experiment.data.tokenizer}' if isinstance(source, DocumentSource) else ''
  return f'{source}{tokenizer}'


def _facts(experiment: Experiment, data: Mapping[str, Any]) -> dict[str, Any]:
  """Columns of a run from its config and `Dataset.summary()`; epochs are of all its steps."""
  model = experiment.model_config()
  tokens, epoch = experiment.steps * experiment.tokens_per_step, data.get('tokens_per_epoch')
  specs = model.attention_specs
  uniform = [
    validity.uniform_importance(spec, experiment.probe.length, model.sink_tokens) for spec in specs
  ]
  masks = {spec.mask for spec in specs}
  mask = masks.pop() if len(masks) == 1 else Causal()  # blocks that differ have no window in common
  return vars(experiment.label) | {
    'seed': experiment.seed,
    'steps': experiment.steps,
    'heads': len(uniform) * model.heads,
    'attention': describe_attention(experiment),
    'proxy': not experiment.attention.rows_sum_to_one,
    'source': source_of(experiment),
    'content': data.get('content'),
    'tokens': tokens,
    'unique_tokens': data.get('unique_training_tokens'),
    'epochs': tokens / epoch if epoch else None,
    'length': experiment.probe.length,
    'window': mask.window,
    'prefix': mask.prefix,
    'unigram_loss': data.get('unigram_loss', data.get('loss_of_zero')),
    'uniform_importance': np.mean(uniform) if uniform else None,
    'settings': _settings_of(experiment),
  }


def _settings_of(experiment: Experiment) -> str:
  """The settings that differ from the defaults, as JSON."""
  settings = {}
  for (key, value, about), (_, default, _) in zip(leaves(experiment), leaves(Experiment())):
    if value != default and not about.get('where'):
      settings[key] = value
  return json.dumps(settings, default=short_text)  # of components


def _facts_of_unknown(unknown: Mapping[str, str], settings: str) -> dict[str, Any]:
  """Columns that components which are not known decide.

  unknown: their texts by their keys. settings: the column, without them.
  """
  facts: dict[str, Any] = {'settings': json.dumps(json.loads(settings) | unknown)}
  of_attention = {
    key: text
    for key, text in unknown.items()
    if key.startswith('attention.') or key == 'model.pattern'
  }
  if of_attention:
    facts |= {
      'attention': ', '.join(of_attention.values()),
      **dict.fromkeys(('window', 'prefix', 'uniform_importance')),
    }
  if any(key.startswith('attention.') for key in unknown):
    normalizer = unknown.get('attention.normalizer', short_text(RowSum()))
    facts['proxy'] = not _sums_to_one(normalizer)
  if 'model.pattern' in unknown:
    facts['heads'] = None
  if 'data.source' in unknown:
    facts['source'] = unknown['data.source']
  return facts


def _sums_to_one(normalizer: str) -> bool:
  try:
    return from_string(Normalizer, normalizer).sums_to_one
  except UnknownComponent:
    return False


def _measured(
  rows: Sequence[Mapping[str, Any]], blocks: Sequence[int], gradients: bool
) -> Iterator[Point]:
  """The rows of metrics.jsonl as points. blocks: the numbers, from 1, of those with attention."""
  # A row with None or NaN for these was measured while activations were not finite.
  probes = [
    row
    for row in rows
    if row['kind'] == 'probe'
    and all(map(_is_finite, (row['largest_importance'], *row['value_ratio'])))
  ]
  for row in probes:
    yield from _probed(row, blocks, row is probes[-1])
  for row in rows:
    if row['kind'] == 'valid':
      yield from _validated(row)
  yield from _course(rows, 'train_loss', 'loss')
  if gradients:
    yield from _course(rows, 'grad_norm', 'grad_norm')
  timed = [row for row in rows if _is_finite(row.get('tokens_per_second'))]
  if timed:
    median = statistics.median_high(row['tokens_per_second'] for row in timed)
    yield 'tokens_per_second', timed[-1]['step'], None, median


def _validated(row: Mapping[str, Any]) -> Iterator[Point]:
  """The losses of a validation, of all texts and of each of its sources."""
  for name, value in row.items():
    if name not in ('kind', 'step'):
      metric = 'valid_loss' if name == 'valid' else f'valid_loss:{name}'
      yield metric, row['step'], None, value if _is_finite(value) else math.nan


def _course(rows: Sequence[Mapping[str, Any]], metric: str, key: str) -> Iterator[Point]:
  """The course of a number of the training steps.

  A long one is shortened: means of several rows, counted from its end, at the step of their last.
  """
  course = [
    (row['step'], row[key]) for row in rows if row['kind'] == 'train' and _is_finite(row.get(key))
  ]
  size = math.ceil(len(course) / _POINTS) or 1
  for end in range(len(course), 0, -size):
    steps, values = zip(*course[max(0, end - size) : end])
    yield metric, steps[-1], None, statistics.fmean(values)


def _probed(row: Mapping[str, Any], blocks: Sequence[int], is_last: bool) -> Iterator[Point]:
  """The points of a row of the probe; entry 0 of quantities between blocks is the embedding."""
  medians = list(zip(row['activation_max'], row['activation_median'], strict=True))[1:]
  peaks = [largest / median for largest, median in medians if _is_finite(largest) and median]
  nulls = row.get('null_p99') or {}
  of_model = {name: row[key] for name, key in EVERY.items()}
  of_model['value_ratio'] = min(row['value_ratio'], default=None)
  of_model['hidden_ratio'] = max(filter(_is_finite, row['hidden_ratio'][1:]), default=None)
  of_model['max_over_median'] = max(peaks, default=None)
  if is_last or row['step'] == 0:
    of_model['null_hidden_ratio'] = nulls.get('hidden_ratio')
  if is_last:
    of_model |= {f'sink_{k}': rate for k, rate in enumerate(row['sink'][1:FIRST], 2)}
    of_model |= {name: row.get(key) for name, key in FINAL.items()}
    of_model['null_sink_1'] = nulls.get('sink_1')
    entropies = itertools.chain.from_iterable(row.get('entropy_ratio') or ())
    of_model['least_entropy'] = min(filter(_is_finite, entropies), default=None)
  for name, value in of_model.items():
    if _is_finite(value):
      yield name, row['step'], None, value
  for key in _BLOCKS if is_last else ['hidden_ratio'] * (row['step'] == 0):
    numbers = range(key == 'hidden_before_norm_ratio', len(medians) + 1)
    if key in ('value_ratio', 'key_ratio'):
      numbers = blocks
    for block, value in zip(numbers, row.get(key) or ()):
      if _is_finite(value):
        yield key.removeprefix('activations_'), row['step'], block, value


def _analysed(results: Mapping[str, Any], step: int) -> Iterator[Point]:
  """The points of analyses.json, of the trained model."""
  of = collections.defaultdict(
    lambda: math.nan,
    {
      (analysis, key): value
      for analysis, found in results.items()
      if isinstance(found, dict)
      for key, value in found.items()
      if _is_finite(value)
    },
  )
  for name, value in {
    'removed_sink_1': of['removed', 'sink_1'],
    'removed_loss': of['removed', 'valid_loss'] - of['removed', 'valid_loss_before'],
    # Few keys share the weight of a small window, so that only the ratio compares windows.
    'window_absolute': of['window', 'absolute_first']
    / (of['window', 'absolute_uniform'] or math.nan),
    'window_relative': of['window', 'relative_first'] / (of['window', 'uniform'] or math.nan),
    'prefix_share': 100 * of['prefix', 'strongest_in_prefix'],
    'chain_difference': of['first_token_chain', 'largest_relative_difference'],
  }.items():
    if math.isfinite(value):
      yield name, step, None, value


def _is_finite(value: Any) -> TypeGuard[float]:
  """True if a value is a finite number; a bool, which Python counts as an int, is not."""
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
