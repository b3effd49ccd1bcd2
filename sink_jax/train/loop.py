"""The training loop: the order in which the events of a run happen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

from sink_jax.data.token_edits import first_token
from sink_jax.io.paths import AnyPath
from sink_jax.io.progress import Progress
from sink_jax.models.run import Run
from sink_jax.models.sizes import flops_per_token
from sink_jax.train import run_dir as runs
from sink_jax.train.global_batch import GlobalBatches
from sink_jax.train.multihost import check_same, is_first
from sink_jax.train.optimizer import Rates, learning_rates
from sink_jax.train.outcome import Interrupted
from sink_jax.train.prepare import PreparedRun, prepare_run
from sink_jax.train.recorder import Recorder, open_recorder
from sink_jax.train.start import OpenSource
from sink_jax.train.step import Params, TrainState, make_train_step
from sink_jax.train.stop_handler import StopHandler
from sink_jax.train.throughput import Throughput, measured_matmul_rate


def train(config: Mapping[str, Any], workdir: str | AnyPath, *, name: str = '',
          show_progress: bool = True, open_source: OpenSource | None = None) -> Run:
  """Trains what a config describes, or resumes it, and returns the trained model.

  A run is a pure function of its config: interrupted and resumed it gives the same
  parameters and metrics as in one go. Everything is written below `workdir`:
  config.json, status.json, metrics.jsonl, tensorboard/, checkpoints/, probe_tokens.npy, and
  tokenizer/ where the data are text.
  In a job of several processes all of them call it, with the same arguments.

  Args:
    config: the nested dict of `configs/base.py`, e.g. `ConfigDict.to_dict()`.
    name: what the progress display calls the run.
    open_source: opens the model that `init.source` names, where there is one:
      `pretrained.source.open_source`, which is of a room above this one.

  Raises:
    ValueError: the config, the data, the devices or the workdir do not fit; before any
      compute, and nothing is lost. WorkdirLocked, one of them: another job trains in the workdir,
      or has begun to since.
    Diverged: a step was not finite. Interrupted: a signal asked it to stop; the state is saved.
    CheckpointError: a checkpoint could not be written, or holds another model.
  """
  run = prepare_run(config, workdir, open_source=open_source)
  name = name or PurePath(workdir).name
  # Processes with other programs would wait for each other in the first collective for ever.
  check_same('config, data or jax', json.dumps(
      [run.config, run.data_summary, jax.__version__], sort_keys=True))
  with StopHandler() as stop, open_recorder(run, workdir, name) as recorder:
    try:
      params = _train(run, recorder, stop, show_progress)
    # Both are ValueErrors that all processes raise together, and whose messages hold in all of
    # them.
    except runs.WorkdirLocked:
      raise
    except ValueError as error:
      if jax.process_count() == 1:
        raise
      # What breaks between processes is a ValueError too, and no fault of the config.
      raise RuntimeError(f'process {jax.process_index()} cannot go on: {error}') from error
  model = dataclasses.replace(run.model, implementation=None, unroll=1)  # of training; see load_run
  return Run(model, params, name, run.experiment.steps, probe_tokens=run.probe_tokens,
             first_token=first_token(run.experiment.data.interventions))


def _train(run: PreparedRun, recorder: Recorder, stop: StopHandler, show_progress: bool) -> Params:
  """Trains from the newest checkpoint to the last step; returns the parameters."""
  state = recorder.restore()
  if recorder.has_finished():
    return state.params
  loop = _Loop(run, recorder, stop, show_progress)
  with contextlib.closing(loop.progress), recorder.recording():
    return loop.run(state).params


class _Loop:
  """The steps of one run that are left, and the metrics that no step has read yet.

  Each update goes through these events, in this order:

    1. the step is dispatched, which returns before the devices have computed it;
    2. the metrics of the step before are read, checked and logged: they are there by now, or
       almost, and the devices compute the next step meanwhile;
    3. if the probe, the validation, a checkpoint or a request to stop wants the state of this very
       step, its metrics are read too, which waits for the devices;
    4. the state is checked for numbers that are not finite, then probed and validated, then saved.

  Only finite states are saved, so a run can always resume from its newest checkpoint. The probe
  comes before the save because a save vouches for the metrics up to its step: a run that resumes
  there has that step's probe in metrics.jsonl, and writes it no second time. The state is saved
  before the next step is dispatched, which donates its memory.
  """

  def __init__(self, run: PreparedRun, recorder: Recorder, stop: StopHandler, show_progress: bool):
    experiment, model = run.experiment, run.model
    self._recorder, self._stop = recorder, stop
    self._last_step = experiment.steps
    self._learning_rate = learning_rates(experiment.optimizer, experiment.steps)
    self._weight_decay = np.float32(experiment.optimizer.weight_decay)
    distillation = run.start.distillation(model) if run.start else None
    self._train_step = make_train_step(
        model, experiment.optimizer, run.mesh, experiment.microbatches,
        loss_logits=experiment.loss_logits,
        gradient_reduction=experiment.gradient_reduction or 'step', distillation=distillation)
    # The source's own parameters, and not a copy of the run's, which have been trained by now where
    # it is resumed.
    self._source = [run.start.source_params(run.mesh)] if run.start and distillation else []
    self._global_batches = GlobalBatches(run.mesh, experiment.batch_size)
    self._batches = run.data.batches(recorder.start, experiment.batch_size, experiment.seed,
                                     self._global_batches.rows)
    self._clock = Throughput(run.tokens_per_step, flops_per_token(model, experiment.data.context),
                             measured_matmul_rate(model.dtype))
    self._unread: tuple[int, Mapping[str, jax.Array]] | None = None  # (step, its metrics)
    self.progress = Progress(recorder.name, experiment.steps, recorder.start, unit='step',
                             enabled=show_progress and is_first())

  def run(self, state: TrainState) -> TrainState:
    """Trains from a restored or fresh state; returns the state after the last step."""
    start = self._recorder.start
    if start < self._last_step:
      self._end_if_stopped(start)
    if start == 0:
      self._recorder.begin(state)
      self._end_if_stopped(0)  # before the step is compiled, which can take minutes
    for step in range(start + 1, self._last_step + 1):
      state = self._take_step(step, state)
    return state

  def _end_if_stopped(self, step: int) -> None:
    if self._stop.poll(wait=True):
      raise Interrupted(step, self._last_step)

  def _take_step(self, step: int, state: TrainState) -> TrainState:
    # Steps are numbered by the updates done, from 1; the schedule counts updates from 0. The rates
    # are NumPy's float32, since to jit a Python float is of another (weak) type, for which it would
    # compile anew.
    rates = Rates(np.float32(self._learning_rate(step - 1)), self._weight_decay)
    batch = self._global_batches.make_global_batch(next(self._batches))
    # The old state's memory is gone then.
    state, metrics = self._train_step(state, batch, rates, *self._source)
    self._read_metrics()
    self._unread = (step, metrics)
    # If a checkpoint has been committed meanwhile, its checksums begin here, in a thread.
    self._recorder.poll()
    # Asked once in a step: with one process the answer may change at any moment.
    stopping = self._stop.poll() and step < self._last_step
    if stopping or self._recorder.due(step):
      self._read_metrics()
      self._recorder.settle(step, state, metrics['loss'], saving=stopping)
      self._clock.pause()  # the probe and the save are no part of the tokens per second
    if stopping:
      raise Interrupted(step, self._last_step)
    return state

  def _read_metrics(self) -> None:
    """Waits for the step whose metrics are unread, if there is one; checks and logs them."""
    if self._unread is None:
      return
    (step, metrics), self._unread = self._unread, None
    # float() waits until the devices have done the step. Only then does the clock count it: a step
    # that is merely dispatched has taken no time yet.
    values = {key: float(x) for key, x in metrics.items()}
    self._clock.step()
    # Before the row is written, so that a step that diverged leaves none; the status records it.
    self._recorder.check(step, values)
    if self._recorder.logs(step):
      speed = self._clock.read()
      self._recorder.log(step, values, self._learning_rate(step - 1), speed)
      text = lambda x, form: x if isinstance(x, str) else format(x, form)
      self.progress.update(step, loss=f'{values["loss"]:.3f}',
                           **{'tokens/s': text(speed['tokens_per_second'], ',.0f'),
                              'MFU': text(speed['mfu'], '.0%'), 'Sink_1': self._recorder.sink_1})
