"""The progress of the trials of a sweep, read from their files, and their cost."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from sink_jax.benchmark.train_step import timed_step
from sink_jax.devices import cores, platform
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, inside
from sink_jax.io.terminal import Progress, escaped, markdown_table, text_table
from sink_jax.models.sharding import make_mesh
from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.sweep.trials import Trial
from sink_jax.train.config import Experiment, unrolled
from sink_jax.train.metrics import PEAK_FLOPS
from sink_jax.train.start import completed
from sink_jax.train.workdir import read_status

_WRITE_EVERY, _READ_EVERY = 30, 2  # seconds
# The share of an H100's peak that a step is assumed to reach in `dry_run`; nothing was timed there.
_SHARE = 0.35
_SMALL_STEP = 5e10  # FLOPs, see `idle_cores`
_SHORT_STEP = 1e11  # FLOPs, a second or two of a CPU: `dry_run` times a few of them


def as_markdown(trials: Mapping[str, Trial], root: AnyPath, headline: str) -> str:
  """A table to read while the sweep runs: how many of each status, then a row per trial.

  A row has the last step that was logged, Sink_1 of the last probe in percent of heads, the last
  validation loss in nats per token, and an error or the reason why the trial was not run.
  """
  number = lambda x, form: format(x, form) if isinstance(x, (int, float)) else ''
  rows, statuses = [], []
  for name, trial in trials.items():
    try:
      folder = inside(root, name)
      status, last = read_status(folder), _last_rows(inside(folder, 'metrics.jsonl'))
    except ValueError as error:  # a link to another place, which is not read
      status, last = {'status': 'not read', 'error': str(error)}, {}
    step = max((row['step'] for row in last.values()), default=None)
    note = status.get('error') or status.get('reason') or ''
    statuses.append(status['status'])
    steps = f' of {trial.experiment.steps:,}' if step and trial.experiment else ''
    rows.append(
      [
        name,
        statuses[-1],
        number(step, ',') + steps,
        number(last.get('probe', {}).get('sink_1'), '.1f'),
        number(last.get('valid', {}).get('valid'), '.3f'),
        ' '.join(str(note).split())[:200],
      ]
    )
  counts = ', '.join(f'{statuses.count(status)} {status}' for status in dict.fromkeys(statuses))
  head = ['trial', 'status', 'step', 'Sink_1 %', 'valid loss', '']
  table = markdown_table(head, [map(escaped, row) for row in rows], left=(0, 1, 5))
  return f'# {headline}\n\n{counts}\n\n{table}\n'


@contextlib.contextmanager
def keep_summary(trials: Mapping[str, Trial], file: AnyPath) -> Iterator[None]:
  """Keeps a file next to the folders of the trials up to date for as long as the block runs."""
  over = threading.Event()

  def write(headline: str) -> None:
    headline = f'{headline}; {time.strftime("%Y-%m-%d %H:%M")}'
    with contextlib.suppress(OSError):  # the trials report a full disk
      write_atomically(file, as_markdown(trials, file.parent, headline))

  def update() -> None:
    while not over.wait(_WRITE_EVERY):
      write('Running')

  # A daemon, so that a process that must end at once does not wait for an object store.
  thread = threading.Thread(target=update, daemon=True)
  write('Running')
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()
    write('Not running')


class Bars:
  """A line for each trial that runs, read from its files: steps, loss, Sink_1, the time left."""

  def __init__(self, trials: Mapping[str, Trial], root: AnyPath):
    self._trials, self._root = trials, root
    self._bars: dict[tuple[int, str], Progress] = {}
    self._read = -math.inf

  def show(self, running: Mapping[int, str]) -> None:
    """Shows {line: name of the trial}; call it often, files are read every few seconds."""
    for ended in self._bars.keys() - running.items():
      self._bars.pop(ended).close()
    if time.monotonic() < self._read + _READ_EVERY:
      return
    self._read = time.monotonic()
    for place, name in running.items():
      rows = _last_rows(self._root / name / 'metrics.jsonl')
      experiment = self._trials[name].experiment
      if experiment is None or 'train' not in rows:
        continue
      step = rows['train']['step']
      if (place, name) not in self._bars:
        self._bars[place, name] = Progress(name, experiment.steps, step, unit='step', place=place)
      numbers = {
        'loss': (rows['train'].get('loss'), '.3f'),
        'Sink_1': (rows.get('probe', {}).get('sink_1'), '.1f'),
      }
      shown = {
        key: format(x, form) for key, (x, form) in numbers.items() if isinstance(x, (int, float))
      }
      self._bars[place, name].update(step, **shown)

  def close(self) -> None:
    """Clears all lines."""
    self.show({})


class Cost(NamedTuple):
  """The cost of training one trial: parameters with and without embeddings, tokens, FLOPs."""

  parameters: int
  without_embeddings: int
  tokens: int
  flops: float


def cost_of(experiment: Experiment) -> Cost:
  """The cost of a run; reads no text. A tokenizer that is yet to be opened counts as bytes.

  Raises:
    ValueError: packed data, or the model that `init.source` names, cannot be opened; names the
      option.
  """
  experiment, _ = completed(experiment)
  model, tokens = experiment.model_config(), experiment.steps * experiment.tokens_per_step
  parameters = parameter_count(model)
  return Cost(
    parameters,
    parameter_count(model, embeddings=False),
    tokens,
    tokens * flops_per_token(model, experiment.data.context),
  )


def dry_run(trials: Mapping[str, Trial]) -> str:
  """A table of the cost of every trial, and the sum; on a CPU in minutes of this machine."""
  costs = {name: cost_of(trial.experiment) for name, trial in trials.items() if trial.experiment}
  where, unit, rate = 'H100', 'h', _SHARE * PEAK_FLOPS['H100'] * 3600
  note = f'on one H100 at {_SHARE:.0%} of its peak, an assumption'
  timed = next(iter(costs), None)
  if timed and (here := _flops_here(trials[timed], costs[timed])):
    where, unit, rate = 'here', 'min', here * 60
    note = f'of steps on this machine, by a few timed steps of {timed}; probes come on top'
  took = lambda flops: f'{flops / rate:,.3g} {unit}'
  lines = text_table(
    ['trial', 'parameters', 'without embeddings', 'tokens', 'FLOPs', where],
    [
      [
        name,
        f'{cost.parameters:,}',
        f'{cost.without_embeddings:,}',
        f'{cost.tokens:,}',
        f'{cost.flops:.2g}',
        took(cost.flops),
      ]
      for name, cost in costs.items()
    ],
  )
  lines += [
    f'{trial.name}: not expressible: {trial.reason}'
    for trial in trials.values()
    if not trial.experiment
  ]
  total = sum(cost.flops for cost in costs.values())
  return '\n'.join(
    [*lines, '', f'{len(costs)} trials, {total:.2g} FLOPs in matrix products: {took(total)} {note}']
  )


def _flops_here(trial: Trial, cost: Cost) -> float | None:
  """FLOP/s of training steps on this machine; None without a CPU, text, or for long steps."""
  experiment = trial.experiment
  assert experiment is not None
  per_step = cost.flops / experiment.steps
  mesh = make_mesh().shape
  model = unrolled(experiment.model_config(), experiment, platform(), mesh)
  if jax.default_backend() != 'cpu' or per_step > _SHORT_STEP or not model.vocab_size:
    return None
  return per_step / timed_step(model, experiment.batch_size, experiment.data.context)


def idle_cores(trials: Mapping[str, Trial], costs: Mapping[str, float]) -> str:
  """A remark where trials, one after another, leave cores of a CPU idle, or an empty text.

  Measured on two cores, two trials at a time took, of the time of one after another: 0.78 at 0.6
  GFLOP a step (`tiny`, 16 x 64 tokens), 0.83 at 5, 0.85 at 25 and 0.90 at 123 (10M parameters, 8 x
  256).
  """
  experiments = [trials[name].experiment for name in costs]
  steps = [experiment.steps for experiment in experiments if experiment]
  at_a_time = min(len(steps), cores())
  if jax.default_backend() != 'cpu' or at_a_time < 2:
    return ''
  per_step = sum(costs.values()) / sum(steps)
  if per_step >= _SMALL_STEP:
    return ''
  return (
    'These models are small: their steps leave cores idle, and '
    f'--processes={at_a_time} takes less time.'
  )


def remaining(costs: Mapping[str, float], ended: Collection[str], seconds: float) -> str:
  """'about 12 min left', where trials of these FLOPs have ended in so many seconds, or ''."""
  total, left = sum(costs.values()), sum(costs[name] for name in costs.keys() - {*ended})
  if not 0 < left < total:
    return ''
  return f'about {seconds / 60 * left / (total - left):,.0f} min left'


def _last_rows(path: AnyPath) -> dict[str, dict[str, Any]]:
  """{kind: last row} in the last MiB of metrics.jsonl."""
  rows = {}
  with contextlib.suppress(OSError):
    with path.open('rb') as file:
      file.seek(max(0, file.seek(0, 2) - 2**20))
      lines = file.read().splitlines()
    for line in lines:  # the first and the last may be cut off
      with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        row = json.loads(line)
        rows[row['kind']] = row | {'step': int(row['step'])}
  return rows
