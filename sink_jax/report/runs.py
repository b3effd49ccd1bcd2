"""Training runs as two tables of pandas, read from their workdirs or from the CSV files that keep them."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pandas as pd

from sink_jax.attention.normalizer import AbsSum, RowSum, Unnormalized
from sink_jax.attention.spec import AttentionSpec
from sink_jax.component import Component, short_text
from sink_jax.data.synthetic import SyntheticTask
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.io.paths import AnyPath, files_named, to_path
from sink_jax.report import validity
from sink_jax.train.config import Experiment, from_dict
from sink_jax.train.metrics import read_metrics
from sink_jax.train.workdir import read_config, read_data_summary, read_object, read_status

EMERGED = 10  # percent: a sink has emerged once Sink_1 stays at or above it (our definition)
FIRST = 10  # tokens among which a sink is looked for; few queries see late ones
MEDIANS = 100  # beyond which an activation is massive (Sun et al., arXiv 2402.17762)
_LAST = 0.1  # share of the steps whose mean is the training loss at the end
_POINTS = 200  # of a training curve
_LABELS = ['trial', 'task', 'budget', 'protocol']
_KEYS = ['run', *_LABELS, 'seed']
_NUMBERS = ['seed', *('step steps heads tokens unique_tokens epochs length window prefix uniform_importance '
                      'unigram_loss').split()]
_COLUMNS = {
    'metrics': [*_KEYS, 'metric', 'step', 'block', 'value'],
    'runs': [*_KEYS, 'status', 'reason', *_NUMBERS[1:], *(
        'attention proxy source content hardware command code date settings').split()]}
# The metrics of a probe by their keys in metrics.jsonl: of every probe, of the last one, of its blocks.
_EVERY = {'sink_1': 'sink_1', 'sink_star': 'sink_bias_slot', 'largest_importance': 'largest_importance'}
_FINAL = {'sink_star_released': 'sink_bias_slot_released', 'mean_extra_key': 'mean_bias_slot'} | {
    name: name for name in ('mean_importance', 'raw_mass_1', 'largest_raw_mass_1', 'raw_row_mass',
                            'dormant_heads')}
_BLOCKS = {'beyond_100': 'activations_beyond_100', 'beyond_1000': 'activations_beyond_1000'} | {
    name: name for name in ('hidden_ratio', 'sink_token_ratio', 'activation_max', 'activation_median',
                            'kurtosis_moment', 'kurtosis_channels')}
_Point = tuple[str, int, int | None, float]  # metric, step, block, value


class Runs(NamedTuple):
  """Training runs: a row per number in `metrics`, a row per run in `runs`; what is unknown is NaN.

  metrics: columns run, trial, task, budget, protocol, seed, metric, step, block, value. block is NaN for a
  quantity of the whole model, else 0 for the embedding and 1.. for blocks. Rates are percentages of heads.
  runs: the same keys, with what was trained, how far, where and by which command; see docs/results.md.
  """

  metrics: pd.DataFrame
  runs: pd.DataFrame


def read_runs(folder: str | AnyPath) -> Runs:
  """Reads the runs in or below a folder: its workdirs, and metrics.csv.gz with runs.csv.gz in it.

  A run that cannot be read has the status 'unreadable', with the reason.

  Raises:
    ValueError: there is no such folder.
  """
  root = to_path(folder)
  if not root.is_dir():
    raise ValueError(f'There is no folder {folder}: name the folder of the runs, such as runs/quickstart.')
  # A trial that never began has only status.json.
  workdirs = sorted({path.parent for path in files_named(
      root, ('config.json', 'status.json', 'metrics.jsonl'))})
  rows, points = [], []
  for workdir in workdirs:
    run = workdir.relative_to(root).as_posix() if workdir != root else root.name
    row, measured = _read_run(workdir)
    rows.append({'run': run, **row})
    points += [(run, *point) for point in measured]
  runs = pd.DataFrame(rows, columns=_COLUMNS['runs'])
  metrics = pd.DataFrame(points, columns=['run', *_COLUMNS['metrics'][-4:]]).merge(runs[_KEYS], on='run')
  found = [(metrics[_COLUMNS['metrics']], runs)]
  if (root / 'runs.csv.gz').is_file():
    found.append(tuple(pd.read_csv(io.BytesIO((root / f'{name}.csv.gz').read_bytes()), compression='gzip',
                                   low_memory=False) for name in Runs._fields))
  # What is missing everywhere has no type before.
  metrics, runs = (pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True).fillna(
      {**dict.fromkeys(_LABELS, ''), 'proxy': False}) for frames in zip(*found))
  return Runs(metrics.astype(dict.fromkeys(('seed', 'block', 'value'), float) | {'step': int}),
              runs.astype(dict.fromkeys(_NUMBERS, float) | {'proxy': bool}))


def write_runs(runs: Runs, folder: str | AnyPath) -> None:
  """Writes metrics.csv.gz and runs.csv.gz, the same bytes for the same runs; six digits of a measurement."""
  root = to_path(folder)
  root.mkdir(parents=True, exist_ok=True)
  for name, keys, digits in (('metrics', ['run', 'metric', 'block', 'step'], 6), ('runs', ['run'], 12)):
    text = getattr(runs, name).sort_values(keys).to_csv(index=False, float_format=f'%.{digits}g')
    (root / f'{name}.csv.gz').write_bytes(gzip.compress(text.encode(), mtime=0))


def table(runs: Runs) -> pd.DataFrame:
  """One row a run: the columns of `runs.runs`, what was measured last, and `valid` and `known`.

  massive: above 1 exactly where activations are massive by Sun et al. (arXiv 2402.17762): the largest
  exceeds 100 medians, and the first token's norm ratio exceeds the untrained model's. lead_k: Sink_k minus the
  largest of the other first 10 tokens' rates. emergence_step: infinite where no sink emerges. converges: 1 or
  0. Others are the metrics of the same names; of a ratio by block the largest, of values the least.
  """
  metrics = runs.metrics.sort_values('step', kind='stable')
  of_blocks, whole = metrics[metrics.block.notna()], metrics[metrics.block.isna()]
  last = whole.drop_duplicates(['run', 'metric'], keep='last').pivot(
      index='run', columns='metric', values='value')
  sinks = [f'sink_{k}' for k in range(1, FIRST + 1)]
  last = last.reindex(columns=[*dict.fromkeys([
      *last, *sinks, *_EVERY, *_FINAL, 'value_ratio', 'hidden_ratio', 'max_over_median', 'valid_loss',
      'least_entropy', 'prefix_share', 'window_absolute', 'window_relative', 'removed_sink_1', 'removed_loss',
      'chain_difference'])])
  t = runs.runs.set_index('run').join(last)
  curve = lambda metric: whole[whole.metric == metric].groupby('run')
  untrained = lambda metric: whole[(whole.metric == metric) & (whole.step == 0)].set_index('run').value
  largest = lambda metric, block: of_blocks[
      (of_blocks.metric == metric) & (of_blocks.block >= block)].groupby('run').value.max()
  for k in (1, 2, 3):
    t[f'lead_{k}'] = t[f'sink_{k}'] - t[[sink for sink in sinks if sink != f'sink_{k}']].max(axis=1)
  t['largest_sink'] = t[sinks].max(axis=1)
  t['untrained_sink_1'], t['peak_sink_1'] = untrained('sink_1'), curve('sink_1').value.max()
  t['emergence_step'] = pd.Series({run: _emergence(rows) for run, rows in curve('sink_1')}, dtype=float)
  t['train_loss'] = pd.Series({
      run: rows.value[rows.step > (1 - _LAST) * rows.step.iloc[-1]].mean()
      for run, rows in curve('train_loss')}, dtype=float)
  t['overfitting'] = t.valid_loss - t.train_loss
  for name in t:
    if ''.join(filter(str.isalpha, name.partition(':')[2].lower())) == 'pilecc':  # as the paper's loss is
      t['valid_loss'] = t[name].fillna(t.valid_loss)
  t['converges'] = t.status.map({'done': 1.0, 'diverged': 0.0})
  t['massive_norm'] = t.hidden_ratio
  t['massive'] = np.minimum(t.max_over_median / MEDIANS, t.hidden_ratio / untrained('hidden_ratio'))
  t['massive_before_norm'] = largest('hidden_before_norm_ratio', 1)
  t['massive_sink_token'] = largest('sink_token_ratio', 1)
  in_prefix = t[sinks].where(np.arange(1, FIRST + 1) <= t.prefix.to_numpy(float)[:, None])
  t['prefix_sink'] = in_prefix.sum(axis=1).where(t.sink_1.notna() & (t.prefix <= FIRST))
  t['prefix_first'] = 100 * t.sink_1 / t.prefix_sink.where(t.prefix_sink > 0)
  return t.join(validity.judge(t)).reset_index()


def describe_attention(experiment: Experiment) -> str:
  """The attention operation in words, e.g. 'sigmoid without normalisation, K bias'."""
  spec, normalizer, plain = experiment.attention, experiment.attention.normalizer, AttentionSpec()
  name = _SHORT.get(short_text(spec.similarity), short_text(spec.similarity))
  # exp(score) divided by the sum of its row is softmax, whatever the parts are called.
  if spec.similarity.kind == 'exponential' and isinstance(normalizer, RowSum):
    words = 'softmax' if normalizer.scale == 1 else f'softmax times {normalizer.scale:g}'
    words += f' of scores capped at {spec.similarity.cap:g}' if spec.similarity.cap else ''
  elif isinstance(normalizer, AbsSum):
    words = name  # of Softpick, whose name says it
  elif isinstance(normalizer, Unnormalized):
    words = f'{name} without normalisation'
  elif spec.rows_sum_to_one:
    words = f'{name} with normalisation'
  else:
    words = f'{"softmax" if normalizer.clips else name}, {normalizer}'
  parts = [f'feature map {spec.feature_map}'] if spec.feature_map != plain.feature_map else []
  parts += [_SHORT.get(short_text(part), str(part)) for part in (
      spec.temperature, spec.value, spec.kv_bias, spec.head)]
  sink_token = 'a learned sink token' if experiment.model.sink_tokens else ''
  return ', '.join(filter(None, [words, *parts, sink_token]))


# What components are called where all of their arguments have their defaults; '' changes nothing.
_SHORT = {'Exp()': 'exp', 'Sigmoid()': 'sigmoid', 'Relu()': 'relu', 'SquaredRelu()': 'squared relu',
          'Linear()': 'linear', 'EluPlusOne()': 'elu plus one', 'Softpick()': 'softpick',
          'NoBias()': '', 'KBias()': 'K bias', 'KVBias()': 'KV bias', 'VBias()': 'V bias',
          'SinkLogit()': 'sink logit', 'ZeroSink()': 'off by one', 'Fixed()': '', 'PlainValue()': '',
          'PlainOutput()': '', 'HeadGate()': 'head gate', 'ElementGate()': 'element gate',
          'HeadNorm()': 'head norm', 'Exclusive()': 'exclusive self attention'}


def _read_run(workdir: AnyPath) -> tuple[dict[str, Any], list[_Point]]:
  """The row of a run, and its measurements."""
  status = read_status(workdir)
  row = {'status': status['status'], 'reason': status.get('error') or status.get('reason'),
         'step': status.get('step'), 'command': status.get('command'), 'code': status.get('code'),
         **(status.get('label') or {})}
  if 'hardware' in status:
    row |= {'hardware': f'{status["hardware"]}; jax {status["jax"]}', 'date': status['date'].split('T')[0]}
  if not (workdir / 'config.json').exists() and row['status'] in ('failed', 'not expressible'):
    return row, []  # it never began
  try:
    experiment = from_dict(read_config(workdir))
    row |= _facts(experiment, read_data_summary(workdir))
    blocks = [layer + 1 for layer in experiment.model_before_data().attention_layers]
    points = [*_measured(read_metrics(workdir), blocks, row['task'] == 'sft'),
              *_analysed(read_object(workdir / 'analyses.json') or {}, row['steps'])]
  except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
    what = f'metrics.jsonl has no {error}' if isinstance(error, KeyError) else ' '.join(str(error).split())
    return row | {'status': 'unreadable', 'reason': what}, []
  return row | {'step': max([step for _, step, *_ in points] + [row['step'] or 0])}, points


def _facts(experiment: Experiment, data: Mapping[str, Any]) -> dict[str, Any]:
  """What a config and `Dataset.summary()` say of a run; epochs are of all its steps."""
  source, spec, model = experiment.data.source, experiment.attention, experiment.model_before_data()
  synthetic, tokens = isinstance(source, SyntheticTask), experiment.steps * experiment.tokens_per_step
  epoch, length, blocks = data.get('tokens_per_epoch'), experiment.probe.length, model.attention_layers
  specs = [model.attention_of(model.pattern[layer % len(model.pattern)]) for layer in blocks]
  defaults = dict(_settings(Experiment()))
  return vars(experiment.label) | {
      'seed': experiment.seed, 'steps': experiment.steps, 'heads': len(blocks) * model.heads,
      'attention': describe_attention(experiment), 'proxy': not spec.rows_sum_to_one,
      'source': str(source) if synthetic else f'{source}, {experiment.data.tokenizer}',
      'content': data.get('content'), 'tokens': tokens, 'epochs': tokens / epoch if epoch else None,
      'unique_tokens': data.get('unique_training_tokens'), 'length': length, 'window': spec.mask.window,
      'prefix': spec.mask.prefix, 'unigram_loss': data.get('unigram_loss', data.get('loss_of_zero')),
      'uniform_importance': np.mean([validity.uniform_importance(
          of_block, length, model.sink_tokens) for of_block in specs]) if specs else None,
      'settings': json.dumps({key: value for key, value in _settings(experiment)
                              if value != defaults[key]})}


def _settings(section: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """The config keys that decide what is computed, with their values; components as texts."""
  text = lambda value: short_text(value) if isinstance(value, Component) else value
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value) and not isinstance(value, Component):
      yield from _settings(value, f'{prefix}{field.name}.')
    elif not field.metadata.get('where') and field.metadata.get('key', True):
      yield prefix + field.name, [*map(text, value)] if isinstance(value, tuple) else text(value)


def _measured(rows: Sequence[Mapping[str, Any]], blocks: Sequence[int], gradients: bool) -> Iterator[_Point]:
  """The rows of metrics.jsonl as points. blocks: the numbers, from 1, of those with attention."""
  # A row with None or NaN for these was measured while activations were not finite.
  probes = [row for row in rows if row['kind'] == 'probe' and all(
      map(_is_finite, (row['largest_importance'], *row['value_ratio'])))]
  for row in probes:
    yield from _probe(row, blocks, row is probes[-1])
  for row in rows:
    for name, value in row.items():
      if row['kind'] == 'valid' and name not in ('kind', 'step'):
        name = 'valid_loss' if name == 'valid' else f'valid_loss:{name}'
        yield name, row['step'], None, value if _is_finite(value) else math.nan
  for metric, key in (('train_loss', 'loss'), ('grad_norm', 'grad_norm'))[:1 + gradients]:
    course = [(row['step'], row[key]) for row in rows if row['kind'] == 'train' and _is_finite(row.get(key))]
    size = math.ceil(len(course) / _POINTS)
    # Means of rows, from the end, at the step of their last one.
    for end in range(len(course), 0, -max(size, 1)):
      steps, values = zip(*course[max(0, end - size):end])
      yield metric, steps[-1], None, statistics.fmean(values)
  rates = [(rate, row['step']) for row in rows if _is_finite(rate := row.get('tokens_per_second'))]
  if rates:
    yield 'tokens_per_second', rates[-1][1], None, statistics.median_high(rate for rate, _ in rates)


def _probe(row: Mapping[str, Any], blocks: Sequence[int], is_last: bool) -> Iterator[_Point]:
  """The points of a row of the probe."""
  # Entry 0 of what is measured between blocks is the embedding.
  medians = list(zip(row['activation_max'], row['activation_median'], strict=True))[1:]
  found: dict[tuple[str, int | None], Any] = {(name, None): row[key] for name, key in _EVERY.items()}
  found |= {('value_ratio', None): min(row['value_ratio'], default=None),
            ('hidden_ratio', None): max(filter(_is_finite, row['hidden_ratio'][1:]), default=None),
            ('max_over_median', None): max((largest / median for largest, median in medians
                                            if _is_finite(largest) and median), default=None)}
  nulls = row.get('null_p99') or {}
  if is_last or row['step'] == 0:
    found['null_hidden_ratio', None] = nulls.get('hidden_ratio')
    found |= {('hidden_ratio', block): value for block, value in enumerate(row['hidden_ratio'])}
  if is_last:
    found |= {(f'sink_{k}', None): rate for k, rate in enumerate(row['sink'][1:FIRST], 2)}
    found |= {(name, None): row.get(key) for name, key in _FINAL.items()}
    found['null_sink_1', None] = nulls.get('sink_1')
    found['least_entropy', None] = min((ratio for block in row.get('entropy_ratio') or () for ratio in block
                                        if _is_finite(ratio)), default=None)
    found |= {(name, block): value for name, key in _BLOCKS.items()
              for block, value in enumerate(row.get(key) or ())}
    found |= {('hidden_before_norm_ratio', block): value
              for block, value in enumerate(row.get('hidden_before_norm_ratio') or (), 1)}
    found |= {(name, block): value for name in ('value_ratio', 'key_ratio')
              for block, value in zip(blocks, row.get(name) or ())}
  return ((name, row['step'], block, value) for (name, block), value in found.items() if _is_finite(value))


def _analysed(results: Mapping[str, Any], step: int) -> Iterator[_Point]:
  """The points of analyses.json, of the trained model."""
  removed, window, prefix, chain = (results.get(name) or {} for name in (
      'removed', 'window', 'prefix', 'first_token_chain'))
  number = lambda of, key: float(of[key]) if _is_finite(of.get(key)) else math.nan
  ratio = lambda a, b: a / b if b else math.nan
  for name, value in {
      'removed_sink_1': number(removed, 'sink_1'),
      'removed_loss': number(removed, 'valid_loss') - number(removed, 'valid_loss_before'),
      'window_absolute': ratio(number(window, 'absolute_first'), number(window, 'absolute_uniform')),
      'window_relative': ratio(number(window, 'relative_first'), number(window, 'uniform')),
      'prefix_share': 100 * number(prefix, 'strongest_in_prefix'),
      'chain_difference': number(chain, 'largest_relative_difference')}.items():
    if math.isfinite(value):
      yield name, step, None, value


def _emergence(rows: pd.DataFrame) -> float:
  found = emergence_step(rows.step.to_numpy(), rows.value.to_numpy() / 100, EMERGED / 100)
  return math.inf if found is None else found


def _is_finite(value: Any) -> TypeGuard[float]:
  """Whether a value is a number; to Python a truth is an int."""
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

