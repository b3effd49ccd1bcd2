"""`trials`: training steps of the trials of a config file, each in turns with those of softmax.

A ratio of two times says what a variant costs only where both were taken under the same conditions:
in one process, one after the other, again and again. The runs of a sweep were not.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from sink_jax.benchmark import machine
from sink_jax.benchmark.records import Column, Document, TrialRow
from sink_jax.benchmark.timing import Countdown, reason, summary
from sink_jax.data.batches import Batch
from sink_jax.kernels.dispatch import platform
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import parameter_count, parameter_shapes
from sink_jax.train.defaults import DeviceLoad, device_memory, with_defaults
from sink_jax.train.config import Experiment, from_dict
from sink_jax.train.optimizer import kept_arrays, peak_rates
from sink_jax.train.sharding import make_mesh
from sink_jax.train.step import batch_layout, init_state, make_train_step

SOFTMAX = 'softmax'
_PAIRS = 9
_WARMUP = 2  # steps; the first one of them compiles
_MOST_STEPS = 200  # of a timing
COLUMNS = [
    Column('task', 'task'), Column('variant', 'variant'), Column('step_ms', 'ms/step', '.2f'),
    Column('ratio', 'x softmax', '.3f'), Column('ratio_low', 'from', '.3f'),
    Column('ratio_high', 'to', '.3f'), Column('parameters', 'parameters', ',d'),
    Column('note', ''),
]


def run(configs: Mapping[str, Mapping[str, Any]], only: list[str], seconds: float, seed: int,
        limit: float | None = None,
        save: Callable[[Document], None] = lambda document: None) -> Document:
  """Times the steps of trials TASK-VARIANT in turns with those of TASK-softmax.

  The first row of a task is softmax in turns with itself: by how much it is off 1 is what this
  machine makes of no difference.

  Args:
    configs: {trial: its config}, as a config file with a table TRIALS has them.
    only: trials to time, or tasks for all of theirs; [] for all there are.
    seconds: of every timing; at least one step is made.

  Raises:
    ValueError: `only` has what is neither a trial nor a task, or a task has no softmax.
  """
  by_task: dict[str, dict[str, Mapping[str, Any]]] = {}
  for name, config in configs.items():
    task, _, variant = name.partition('-')
    by_task.setdefault(task, {})[variant] = config
  if unknown := [name for name in only if name not in configs and name not in by_task]:
    raise ValueError(f'--only={unknown[0]}: the config file has no such trial, and none that '
                     f'begins so. Choices: {", ".join((*by_task, *configs))}.')
  chosen: dict[str, dict[str, Mapping[str, Any]]] = {}
  for task, members in by_task.items():
    wanted = {variant for variant in members
              if not only or task in only or f'{task}-{variant}' in only}
    if wanted and SOFTMAX not in members:
      raise ValueError(f'--only: the config file has no trial {task}-{SOFTMAX}, beside which the '
                       f'others of {task} would be timed. Name trials of tasks that have one.')
    if wanted:
      chosen[task] = {variant: members[variant] for variant in members
                      if variant in wanted | {SOFTMAX}}
  notes = [f'x softmax: medians of {_PAIRS} pairs of timings in turns, in one process, and the '
           'quartiles of the pairs. Batches are random and lie on the device.']
  rows: list[TrialRow] = []
  options = {'only': only, 'seconds': seconds, 'limit': limit}
  where = machine.describe(seed)
  result = lambda complete: Document('trials', where, options, COLUMNS, list(rows), notes, complete)
  progress = Countdown(sum(map(len, chosen.values())), limit)
  for task, members in chosen.items():
    softmax = None
    for variant in (SOFTMAX, *(name for name in members if name != SOFTMAX)):
      row = TrialRow(task=task, variant=variant)
      if progress.over():
        row = dataclasses.replace(row, failed='not run: the time was up')
      else:
        progress.next(f'{task}-{variant}')
        try:
          # It is compiled once for all variants of its task, and has a state of its own.
          softmax = softmax or _Steps(members[SOFTMAX], seed)
          own = _Steps(members[variant], seed, softmax if variant == SOFTMAX else None)
          row = _timed(row, own, softmax, seconds)
        except Exception as error:  # most of all, no memory
          row = dataclasses.replace(row, failed=reason(error))
      rows.append(row)
      save(result(False))
  return result(True)


class _Steps:
  """The training step of a config, compiled, with a state that goes on from call to call.

  same: steps of the same config, whose program is used.
  """

  def __init__(self, config: Mapping[str, Any], seed: int, same: _Steps | None = None):
    experiment, mesh = from_dict(config), make_mesh()
    model = _model(experiment)
    self.parameters = parameter_count(model)
    self._rates = peak_rates(experiment.optimizer)
    layout = batch_layout(model, experiment.batch_size, experiment.data.context, mesh)
    self._batch = jax.device_put(_random(layout, model.vocab_size, seed),
                                 jax.tree.map(lambda array: array.sharding, layout))
    self._state = init_state(model, experiment.optimizer, seed, mesh)
    self._step = same._step if same else make_train_step(
        model, experiment.optimizer, mesh, experiment.microbatches,
        loss_logits=experiment.loss_logits,
        gradient_reduction=experiment.gradient_reduction or 'step',
    ).lower(self._state, self._batch, self._rates).compile()

  def seconds(self, steps: int) -> float:
    """Of so many steps one after the other, from an idle device to an idle device."""
    jax.block_until_ready(self._state)
    began = time.perf_counter()
    for _ in range(steps):
      self._state, _ = self._step(self._state, self._batch, self._rates)
    jax.block_until_ready(self._state)
    return time.perf_counter() - began


def _timed(row: TrialRow, own: _Steps, softmax: _Steps, seconds: float) -> TrialRow:
  """The row with the times of its steps and their ratio to those of softmax."""
  # A run of as many steps for both: what a call costs beside its steps is then the same share.
  once = max(max(steps.seconds(_WARMUP) / _WARMUP for _ in range(2)) for steps in (own, softmax))
  count = max(1, min(_MOST_STEPS, int(seconds / once)))
  times: dict[_Steps, list[float]] = {own: [], softmax: []}
  for pair in range(_PAIRS):
    # The other one first every second time, since the first of a pair may find a colder machine.
    for steps in (own, softmax)[::1 if pair % 2 else -1]:
      times[steps].append(steps.seconds(count) / count)
  ratios = [mine / its for mine, its in zip(times[own], times[softmax])]
  low, middle, high = statistics.quantiles(ratios, n=4, method='inclusive')
  return dataclasses.replace(
      row, step=summary(times[own], count), softmax=summary(times[softmax], count), ratio=middle,
      ratio_low=low, ratio_high=high, pairs=_PAIRS, parameters=own.parameters)


def _model(experiment: Experiment) -> ModelConfig:
  """The model of a run, with what it chooses by itself for these devices."""
  model = experiment.model_before_data()
  tokens = experiment.microbatch_size * experiment.data.context / jax.device_count()
  load = DeviceLoad(platform(), device_memory(), tokens, microbatches=experiment.microbatches,
                    logits=experiment.loss_logits,
                    kept=kept_arrays(experiment.optimizer, parameter_shapes(model)))
  return with_defaults(model, load, experiment.model.remat, experiment.model.unroll)


def _random(layout: Batch, vocab_size: int, seed: int) -> Batch:
  """A batch of random tokens, or of normal numbers for a task without any, all of which count."""
  draw = np.random.default_rng(seed)

  def array(of: np.ndarray | jax.ShapeDtypeStruct) -> np.ndarray:
    if np.issubdtype(of.dtype, np.integer):
      return draw.integers(0, vocab_size, of.shape, of.dtype)
    return draw.standard_normal(of.shape).astype(of.dtype)

  inputs, targets, weights = layout
  return Batch(array(inputs), array(targets), np.ones(weights.shape, weights.dtype))
