"""Training runs as two tables of pandas, read from workdirs or from CSV files that keep them."""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sink_jax.evaluate.activations import BEYOND
from sink_jax.evaluate.sinks import emergence_step
from sink_jax.io.paths import AnyPath, files_below, inside, to_path
from sink_jax.report import validity
from sink_jax.report.one_run import EVERY, FINAL, FIRST, read_run
from sink_jax.train.workdir import FINAL_STATUSES

EMERGED = 10  # percent: a sink has emerged once Sink_1 stays at or above it (our definition)
IDENTITY = ['task', 'budget', 'protocol', 'trial', 'seed']  # what makes two runs the same one
NO_SEED = -1.0
_LAST = 0.1  # the last share of the steps; its mean is the final training loss
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
_WHOLE = (
  'value_ratio hidden_ratio max_over_median least_entropy valid_loss removed_sink_1 removed_loss '
  'window_absolute window_relative prefix_share chain_difference tokens_per_second'
).split()


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
    row, measured = read_run(workdir)
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


def _emergence(sink_1: pd.DataFrame) -> pd.Series:
  """The step from which on each run has a sink; infinite if none emerges. sink_1: its points."""
  steps = {
    run: emergence_step(rows.step.to_numpy(), rows.value.to_numpy() / 100, EMERGED / 100)
    for run, rows in sink_1.groupby('run')
  }
  return pd.Series(steps, dtype=float).fillna(math.inf)


def _last_mean(train: pd.DataFrame) -> pd.Series:
  """The mean training loss of each run at its end. train: the points of the loss."""
  last_step = train.groupby('run').step.transform('max')
  ending = train.step > (1 - _LAST) * last_step
  return train.value[ending].groupby('run').mean()


def _papers_loss(t: pd.DataFrame) -> pd.Series:
  """The validation loss; on Pile-CC where it was measured there, as the paper's is."""
  loss: pd.Series = t.valid_loss
  for name in t:
    part = name.partition(':')[2].lower()
    if ''.join(filter(str.isalpha, part)) == 'pilecc':
      loss = pd.Series(t[name]).fillna(loss)
  return loss


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
  columns = dict.fromkeys([*last, *sinks, *EVERY, *FINAL, *_WHOLE])
  t = runs.runs.set_index('run').join(last.reindex(columns=list(columns)))
  curve = lambda metric: whole.loc[whole.metric == metric].set_index('run')
  untrained = lambda metric: curve(metric).value[curve(metric).step == 0]
  by_run = lambda metric: of_blocks.loc[of_blocks.metric == metric].groupby('run')
  for name in ('sink_1', 'sink_2', 'sink_3'):
    others = t[sinks].drop(columns=name)
    t[name.replace('sink', 'lead')] = t[name] - others.max(axis=1)
  t['largest_sink'] = t[sinks].max(axis=1)
  t['untrained_sink_1'] = untrained('sink_1')
  t['emergence_step'] = _emergence(curve('sink_1'))
  t['train_loss'] = _last_mean(curve('train_loss'))
  t['overfitting'] = t.valid_loss - t.train_loss
  t['valid_loss'] = _papers_loss(t)
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
