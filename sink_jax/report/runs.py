"""Training runs as two tables of pandas, read from workdirs or from CSV files that keep them."""

from __future__ import annotations

import collections
import gzip
import io
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pandas as pd

from sink_jax.attention.mask import Causal
from sink_jax.attention.normalizer import Clipped, Normalizer, RowSum
from sink_jax.component import UnknownComponent, from_string, short_text
from sink_jax.data.sources import DocumentSource
from sink_jax.evaluate.activations import BEYOND
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.io.paths import AnyPath, files_below, inside, to_path
from sink_jax.report import validity
from sink_jax.train.config import Experiment, known_part, leaves
from sink_jax.train.metrics import read_metrics
from sink_jax.train.workdir import FINAL_STATUSES, read_config, read_object, read_status

EMERGED = 10  # percent: a sink has emerged once Sink_1 stays at or above it (our definition)
FIRST = 10  # tokens among which a sink is looked for; few queries see late ones
IDENTITY = ['task', 'budget', 'protocol', 'trial', 'seed']  # what makes two runs the same one
NO_SEED = -1.0
_LAST = 0.1  # the last share of the steps; its mean is the final training loss
_POINTS = 100  # of a training curve
_TEXTS = ['trial', 'task', 'budget', 'protocol']  # '' if they are missing; NaN elsewhere
_KEYS = {**dict.fromkeys(['run', *_TEXTS], 'str'), 'seed': float}
_METRICS = {**_KEYS, 'metric': 'str', 'step': int, 'block': float, 'value': float}
_RUNS = {
  **_KEYS,
  'status': 'str',
  'reason': 'str',
  **dict.fromkeys(
    (
      'step steps heads tokens unique_tokens epochs length window prefix uniform_importance '
      'unigram_loss'
    ).split(),
    float,
  ),
  'proxy': bool,
  **dict.fromkeys(('attention source content hardware command code date settings').split(), 'str'),
}
# The metrics of a probe by their keys in metrics.jsonl: of every probe, of the last one, of its
# blocks.
_EVERY = {
  'sink_1': 'sink_1',
  'sink_star': 'sink_bias_slot',
  'largest_importance': 'largest_importance',
}
_FINAL = {
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
_WHOLE = (
  'value_ratio hidden_ratio max_over_median least_entropy valid_loss removed_sink_1 removed_loss '
  'window_absolute window_relative prefix_share chain_difference tokens_per_second'
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
  'AbsSum()': '',
}  # of softpick, whose name says it
_Point = tuple[str, int, int | None, float]  # metric, step, block, value


class Runs(NamedTuple):
  """Training runs: a row per number in `metrics`, a row per run in `runs`; what is unknown is NaN.

  metrics: columns run, trial, task, budget, protocol, seed, metric, step, block, value. block is
  NaN for a quantity of the model, else 0 for the embedding and 1.. for blocks. Rates are
  percentages of heads. runs: the same keys, with what was trained, how far, where and by which
  command; `content` is a hash of the data, `proxy` that rows of attention do not sum to one, so
  that rates are of proxy scores.
  """

  metrics: pd.DataFrame
  runs: pd.DataFrame


def read_runs(folder: str | AnyPath) -> Runs:
  """Reads the runs in or below a folder: its workdirs, and metrics.csv.gz with runs.csv.gz in it.

  A run that cannot be read has the status 'unreadable', with the reason. Of a run with components
  that no imported module defines, what depends on them is unknown.

  Raises:
    ValueError: there is no such folder, or a CSV file of it is a link that leads out of it.
  """
  root = to_path(folder)
  if not root.is_dir():
    raise ValueError(
      f'There is no folder {folder}: name the folder of the runs, such as runs/quickstart.'
    )
  # A trial that never began has only status.json.
  workdirs = sorted(
    {
      path.parent
      for path in files_below(root)
      if path.name in ('config.json', 'status.json', 'metrics.jsonl')
    }
  )
  rows, points = [], []
  for workdir in workdirs:
    run = workdir.relative_to(root).as_posix() if workdir != root else root.name
    row, measured = _read_run(workdir)
    rows.append({**row, 'run': run})
    points += [(run, *point) for point in measured]
  runs = pd.DataFrame(rows, columns=list(_RUNS))
  metrics = pd.DataFrame(points, columns=['run', *list(_METRICS)[-4:]])
  metrics = metrics.merge(runs[list(_KEYS)], on='run')
  found = [[metrics[list(_METRICS)], runs]]
  if (root / 'runs.csv.gz').is_file():
    found.append([_stored(root, name) for name in Runs._fields])
  return Runs(
    *(
      pd.concat([_typed(frame, types) for frame in frames], ignore_index=True)
      for types, *frames in zip((_METRICS, _RUNS), *found)
    )
  )


def _stored(root: AnyPath, name: str) -> pd.DataFrame:
  stored = io.BytesIO(inside(root, f'{name}.csv.gz').read_bytes())
  return pd.read_csv(stored, compression='gzip', low_memory=False)


def _typed(frame: pd.DataFrame, types: Mapping[str, Any]) -> pd.DataFrame:
  typed = frame.fillna({'proxy': 0}).astype(types)
  return typed.fillna(dict.fromkeys(_TEXTS, ''))


def write_runs(runs: Runs, folder: str | AnyPath) -> None:
  """Writes metrics.csv.gz and runs.csv.gz, equal bytes for equal runs; measurements to 6 digits."""
  root = to_path(folder)
  root.mkdir(parents=True, exist_ok=True)
  for name, keys, digits in (
    ('metrics', ['run', 'metric', 'block', 'step'], 6),
    ('runs', ['run'], 12),
  ):
    rows = getattr(runs, name).sort_values(keys)
    text = rows.to_csv(index=False, float_format=f'%.{digits}g')
    (root / f'{name}.csv.gz').write_bytes(gzip.compress(text.encode(), mtime=0))


def identities(runs: Any) -> list[tuple]:
  """The `IDENTITY` of each row of a table `Runs.runs`; a trial that never began may lack a seed."""
  rows = runs[IDENTITY].fillna({'seed': NO_SEED})
  return [*map(tuple, rows.values.tolist())]


def no_runs() -> Runs:
  """A table without a run."""
  empty = lambda types: pd.DataFrame(columns=list(types)).astype(types)
  return Runs(empty(_METRICS), empty(_RUNS))


def merged(stored: Runs, new: Runs, folder: str = '') -> Runs:
  """Stored runs with the finished ones of `new`, each in place of the run with its `IDENTITY`.

  folder: of the new runs, before their names. Merging them again changes nothing.

  Raises:
    ValueError: a new run has the name of a stored one of another identity.
  """
  finished = new.runs[new.runs.status.isin(FINAL_STATUSES)]
  replaced = {*identities(finished)}
  kept = [identity not in replaced for identity in identities(stored.runs)]
  names = {run: f'{folder}/{run}' if folder else run for run in finished.run}
  if taken := {*names.values()} & {*stored.runs.run[kept]}:
    raise ValueError(
      f'{sorted(taken)[0]} is stored with another trial, budget or seed: rename the '
      'folder of the new runs.'
    )
  frames = []
  for before, after in zip(stored, new):
    old = before[before.run.isin(stored.runs.run[kept])]
    added = after[after.run.isin(names)]
    renamed = added.assign(run=added.run.map(names))
    frames.append(pd.concat([old, renamed], ignore_index=True))
  return Runs(*frames)


def table(runs: Runs) -> pd.DataFrame:
  """A row for each run: the columns of `runs.runs`, the last measurements, `valid` and `known`.

  massive: above 1 exactly if activations are massive by Sun et al. (arXiv 2402.17762): the largest
  exceeds 100 medians, and the first token's norm ratio exceeds its value before training. lead_k:
  Sink_k minus the largest of the other first 10 tokens' rates. emergence_step: infinite if no sink
  emerges. converges: 1 or 0. Other columns are named after their metrics. A ratio is the largest
  over blocks, but for values the least.
  """
  metrics = runs.metrics.sort_values('step', kind='stable')
  of_blocks = metrics.loc[metrics.block > 0]
  whole = metrics.loc[metrics.block.isna()]
  last = whole.drop_duplicates(['run', 'metric'], keep='last')
  last = last.pivot(index='run', columns='metric', values='value')
  sinks = [f'sink_{k}' for k in range(1, FIRST + 1)]
  columns = dict.fromkeys([*last, *sinks, *_EVERY, *_FINAL, *_WHOLE])
  t = runs.runs.set_index('run').join(last.reindex(columns=list(columns)))
  curve = lambda metric: whole.loc[whole.metric == metric].set_index('run')
  untrained = lambda metric: curve(metric).value[curve(metric).step == 0]
  by_run = lambda metric: of_blocks.loc[of_blocks.metric == metric].groupby('run')
  for name in ('sink_1', 'sink_2', 'sink_3'):
    others = t[sinks].drop(columns=name)
    t[name.replace('sink', 'lead')] = t[name] - others.max(axis=1)
  t['largest_sink'] = t[sinks].max(axis=1)
  t['untrained_sink_1'] = untrained('sink_1')
  emerged = {
    run: emergence_step(rows.step.to_numpy(), rows.value.to_numpy() / 100, EMERGED / 100)
    for run, rows in curve('sink_1').groupby('run')
  }
  t['emergence_step'] = pd.Series(emerged, dtype=float).fillna(math.inf)
  train = curve('train_loss')
  last_step = train.groupby('run').step.transform('max')
  ending = train.step > (1 - _LAST) * last_step
  t['train_loss'] = train.value[ending].groupby('run').mean()
  t['overfitting'] = t.valid_loss - t.train_loss
  for name in t:
    part = name.partition(':')[2].lower()
    if ''.join(filter(str.isalpha, part)) == 'pilecc':  # as the paper's loss is
      t['valid_loss'] = t[name].fillna(t.valid_loss)
  t['converges'] = t.status.map({'done': 1.0, 'diverged': 0.0})
  grown = t.hidden_ratio / untrained('hidden_ratio')
  t['massive'] = np.minimum(t.max_over_median / BEYOND[0], grown)
  t['massive_before_norm'] = by_run('hidden_before_norm_ratio').value.max()
  t['massive_sink_token'] = by_run('sink_token_ratio').value.max()
  places = np.arange(1, FIRST + 1)
  in_prefix = t[sinks].where(places <= t.prefix.to_numpy()[:, None])
  is_known = t.sink_1.notna() & (t.prefix <= FIRST)
  t['prefix_sink'] = in_prefix.sum(axis=1).where(is_known)
  t['prefix_first'] = 100 * t.sink_1 / t.prefix_sink.where(t.prefix_sink > 0)
  return t.join(validity.judge(t)).reset_index()


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


def _read_run(workdir: AnyPath) -> tuple[dict[str, Any], list[_Point]]:
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
  """What differs from the defaults, as JSON."""
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
) -> Iterator[_Point]:
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
    for name, value in row.items() if row['kind'] == 'valid' else ():
      if name not in ('kind', 'step'):
        name = 'valid_loss' if name == 'valid' else f'valid_loss:{name}'
        yield name, row['step'], None, value if _is_finite(value) else math.nan
  trained = [row for row in rows if row['kind'] == 'train']
  for metric, key in (('train_loss', 'loss'), ('grad_norm', 'grad_norm'))[: 1 + gradients]:
    course = [(row['step'], row[key]) for row in trained if _is_finite(row.get(key))]
    # A long course is shortened: means of several rows, counted from its end, at the step of their
    # last one.
    size = math.ceil(len(course) / _POINTS) or 1
    for end in range(len(course), 0, -size):
      steps, values = zip(*course[max(0, end - size) : end])
      yield metric, steps[-1], None, statistics.fmean(values)
  timed = [row for row in rows if _is_finite(row.get('tokens_per_second'))]
  if timed:
    median = statistics.median_high(row['tokens_per_second'] for row in timed)
    yield 'tokens_per_second', timed[-1]['step'], None, median


def _probed(row: Mapping[str, Any], blocks: Sequence[int], is_last: bool) -> Iterator[_Point]:
  """The points of a row of the probe; entry 0 of quantities between blocks is the embedding."""
  medians = list(zip(row['activation_max'], row['activation_median'], strict=True))[1:]
  peaks = [largest / median for largest, median in medians if _is_finite(largest) and median]
  nulls = row.get('null_p99') or {}
  of_model = {name: row[key] for name, key in _EVERY.items()}
  of_model['value_ratio'] = min(row['value_ratio'], default=None)
  of_model['hidden_ratio'] = max(filter(_is_finite, row['hidden_ratio'][1:]), default=None)
  of_model['max_over_median'] = max(peaks, default=None)
  if is_last or row['step'] == 0:
    of_model['null_hidden_ratio'] = nulls.get('hidden_ratio')
  if is_last:
    of_model |= {f'sink_{k}': rate for k, rate in enumerate(row['sink'][1:FIRST], 2)}
    of_model |= {name: row.get(key) for name, key in _FINAL.items()}
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


def _analysed(results: Mapping[str, Any], step: int) -> Iterator[_Point]:
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
