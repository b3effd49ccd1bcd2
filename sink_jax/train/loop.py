"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.data.cache_check import DamagedCache
from sink_jax.data.interventions import first_token
from sink_jax.data.pipeline import Data, open_data
from sink_jax.data.progress import Progress
from sink_jax.data.tokenizer import Encoder
from sink_jax.evaluate.finite import NotFinite
from sink_jax.evaluate.probe import probe
from sink_jax.kernels.dispatch import platform
from sink_jax.kernels.sharded import in_mesh
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.models.sizes import flops_per_token, parameter_shapes
from sink_jax.train import workdir as runs
from sink_jax.train.checkpoint import Checkpoints
from sink_jax.train.defaults import KEYS, completed, device_memory, filled, share_of
from sink_jax.train.distributed import agreed, check_same, is_first, together
from sink_jax.train.experiment import Experiment, from_dict, resolved
from sink_jax.train.feed import Feed
from sink_jax.train.metrics import MetricsWriter
from sink_jax.train.optimizer import Rates, learning_rates
from sink_jax.train.outcome import Diverged, Interrupted, recorded
from sink_jax.train.probe_tokens import write_probe_tokens
from sink_jax.train.run_tokenizer import write_tokenizer
from sink_jax.train.sharding import make_mesh
from sink_jax.train.step import (
    batch_layout,
    init_state,
    make_train_step,
    make_validation_step,
    state_layout,
)
from sink_jax.train.stop import StopSignal
from sink_jax.train.throughput import Throughput, measured_matmul_rate

_log = logging.getLogger('sink_jax')


def train(config: Mapping[str, Any], workdir, *, name: str = '', show_progress: bool = True) -> Run:
  """Trains what a config describes, or resumes it, and returns the trained model.

  A run is a pure function of its config: interrupted and resumed it gives the same
  parameters and metrics as in one go. Everything is written below `workdir`:
  config.json, status.json, metrics.jsonl, tensorboard/, checkpoints/, probe_tokens.npy, and
  tokenizer/ where the data are text.
  In a job of several processes all of them call it, with the same arguments.

  Args:
    config: the nested dict of `configs/base.py`, e.g. `ConfigDict.to_dict()`.
    name: what the progress display calls the run.

  Raises:
    ValueError: the config, the data, the devices or the workdir do not fit; before any
      compute, and nothing is lost. Busy, one of them: another job has the workdir, or has
      taken it since.
    Diverged: a step was not finite. Interrupted: a signal asked it to stop; the state is saved.
    CheckpointError: a checkpoint could not be written, or holds another model.
  """
  job = together(lambda: _prepared(config, workdir))
  data, mesh = job.data, job.mesh
  chosen = agreed(lambda: _completed(runs.as_begun(workdir, config), job), ValueError)
  config = filled(config, chosen, KEYS)  # all else may differ between processes, see below
  experiment = from_dict(config)
  model = experiment.model_config(data.vocab_size, data.input_features, data.output_features)
  name = name or PurePath(workdir).name
  about = resolved(config, data), data.summary()
  check_same('config, data or jax', json.dumps([*about, jax.__version__], sort_keys=True))
  with StopSignal() as stop, runs.claimed(workdir, *about) as claim:
    for line in data.remarks():
      _tell(line)
    intact = data.check_files()  # in a thread, while the step is compiled and first steps run
    claim.digests['probe_tokens.npy'] = {
        'sha256': write_probe_tokens(workdir, job.probe_tokens)}
    write_tokenizer(workdir, job.encoder)
    progress = functools.partial(Progress, name, unit='step', enabled=show_progress and is_first())
    evaluation = functools.partial(Evaluation, experiment, model, data, mesh, job.probe_tokens, name)
    outcome = functools.partial(recorded, attention=job.attention)
    try:
      params = _train(experiment, model, data, mesh, claim, evaluation, progress, outcome, stop,
                      intact)
    except (runs.Busy, DamagedCache):
      raise
    except ValueError as error:
      if jax.process_count() == 1:
        raise
      # What breaks between processes is a ValueError too, and no fault of the config.
      raise RuntimeError(f'process {jax.process_index()} cannot go on: {error}') from error
  model = dataclasses.replace(model, implementation=None, unroll=1)  # of training; see load_run
  return Run(model, params, name, experiment.steps, probe_tokens=job.probe_tokens,
             first_token=first_token(experiment.data.interventions))


class _Job(NamedTuple):
  """A config as typed objects, with its data, the devices and the inputs of the probe."""
  experiment: Experiment  # as is `model`, without what `_completed` chooses
  model: ModelConfig
  data: Data
  mesh: jax.sharding.Mesh
  attention: str  # the implementation
  probe_tokens: np.ndarray
  encoder: Encoder | None


def _prepared(config, workdir) -> _Job:
  """Finds what does not fit before any file is made, and all it can before it opens the data."""
  experiment = from_dict(config)
  experiment.check_devices()
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh))
  _trace(experiment, mesh)
  if is_first():
    runs.check_unclaimed(workdir, config)
  data = open_data(experiment.data)
  model = experiment.model_config(data.vocab_size, data.input_features, data.output_features)
  return _Job(experiment, model, data, mesh,
              training_implementation(model, experiment.data.context),
              data.probe_tokens(experiment.probe.sequences, experiment.probe.length),
              data.encoder)


def _completed(config, job):
  """The config with the empty keys that these devices decide."""
  with in_mesh(job.mesh):
    share = share_of(job.experiment, tuple(job.mesh.shape.values()), platform(), device_memory())
  return completed(config, job.model, share)


def _trace(experiment, mesh):
  """Raises a ValueError if the model cannot be built or run; the data play no part in it."""
  model, context = experiment.model_before_data(), experiment.data.context
  training_implementation(model, context)
  jax.eval_shape(make_validation_step(model, mesh), parameter_shapes(model),
                 batch_layout(model, experiment.microbatch_size, context, mesh))


def _train(experiment, model, data, mesh, claim, evaluation, progress, outcome, stop, intact):
  """From the newest checkpoint to the last step, or to where the run has to stop.

  intact: waits until the files of the data are checked, and raises where they are damaged.
  """
  workdir = claim.workdir
  optimizer, decay = experiment.optimizer, np.float32(experiment.optimizer.weight_decay)
  rates = [Rates(rate, decay) for rate in learning_rates(optimizer, experiment.steps)]
  train_step = make_train_step(model, optimizer, mesh, experiment.microbatches,
                               loss_logits=experiment.loss_logits,
                               gradient_reduction=experiment.gradient_reduction)
  checkpoints = Checkpoints(workdir, experiment.checkpoints_kept)
  state = checkpoints.restore(state_layout(model, optimizer, mesh))
  for line in checkpoints.damaged:
    _tell(line)
  if state is None:
    state = init_state(model, optimizer, experiment.seed, mesh)
  start = int(state.step)
  if start == experiment.steps and agreed(
      lambda: runs.read_status(workdir)['status'] == 'done'):
    checkpoints.close()
    if line := agreed(lambda: runs.settle_finished(workdir, start)):
      _tell(line)
    return state.params  # its record stays as it is: when, where and by what it was trained
  if start:
    _tell(f'resuming from step {start} of {experiment.steps}')

  metrics = MetricsWriter(workdir, start)
  if metrics.line:
    _tell(metrics.line)
  progress = progress(experiment.steps, start)
  evaluate = evaluation(metrics)
  clock = Throughput(experiment.batch_size * experiment.data.context,
                     flops_per_token(model, experiment.data.context),
                     measured_matmul_rate(model.dtype))
  feed = Feed(mesh, experiment.batch_size)
  batches = data.batches(start, experiment.batch_size, experiment.seed, feed.rows)

  def report(step, values):
    """Checks and logs the metrics of an update; waits for the device to finish it."""
    values = {k: float(v) for k, v in values.items()}
    clock.step()
    if not all(map(math.isfinite, values.values())):
      raise Diverged(step, values['loss'])
    if step % experiment.log_every == 0 or step == experiment.steps:
      speed = clock.read()
      metrics.write('train', step, {
          **values, 'learning_rate': float(rates[step - 1].learning_rate), **speed})
      show = lambda x, form: x if isinstance(x, str) else format(x, form)
      progress.update(step, loss=f'{values["loss"]:.3f}',
                      **{'tokens/s': show(speed['tokens_per_second'], ',.0f'),
                         'MFU': show(speed['mfu'], '.0%'), 'Sink_1': evaluate.sink_1})

  with contextlib.closing(metrics), contextlib.closing(progress), outcome(
      workdir, checkpoints, start, experiment.steps, metrics.whole_from):
    if stop.poll(wait=True) and start < experiment.steps:
      raise Interrupted(start, experiment.steps)
    if start == 0:
      evaluate(0, state.params)
      if stop.poll(wait=True):  # before the step is compiled, which can take minutes
        raise Interrupted(start, experiment.steps)
    pending = None  # metrics are read one step late, so that the device never waits
    for step in range(start + 1, experiment.steps + 1):
      state, values = train_step(state, feed.put(next(batches)), rates[step - 1])
      if pending is not None:
        report(*pending)
      pending = (step, values)
      checkpoints.poll()
      finished = step == experiment.steps
      stopping = stop.poll() and not finished  # asked once: it may change at any moment
      saving = finished or stopping or _due(step, experiment.checkpoint_every)
      if saving or evaluate.due(step):
        report(*pending)
        pending = None
        if not _all_finite(state):  # before the probe, which refuses such parameters
          raise Diverged(step, values['loss'])
        evaluate(step, state.params)
        if saving:
          try:
            claim.check()
          except runs.Busy:
            metrics.abandon()
            raise
          _all_intact(intact)
          metrics.flush()
          checkpoints.save(step, state, claim.digests | {'metrics.jsonl': metrics.record()})
        clock.pause()
      if stopping:
        raise Interrupted(step, experiment.steps)
  return state.params


class Evaluation:
  """The sink probe and the validation loss, each at its steps and after the last one."""

  def __init__(self, experiment: Experiment, model, data, mesh, probe_tokens, name, metrics):
    self._experiment, self._model = experiment, model
    self._probe_tokens, self._name, self._metrics = probe_tokens, name, metrics
    self._validation_step = make_validation_step(model, mesh,
                                                 loss_logits=experiment.loss_logits)
    # As many sequences at a time as a training step has: the memory of a device is its bound.
    size = experiment.microbatch_size
    self._feed = Feed(mesh, size)
    self._sets = data.validation(
        size, experiment.validation.batches * experiment.microbatches, self._feed.rows)
    self.sink_1 = 'n/a'

  def due(self, step: int) -> bool:
    return _due(step, self._experiment.probe.every) or _due(step, self._experiment.validation.every)

  def __call__(self, step: int, params) -> None:
    """Writes what is due at `step`; everything is due before the first and after the last."""
    always = step in (0, self._experiment.steps)
    settings = self._experiment.probe
    if always or _due(step, settings.every):
      run = Run(self._model, params, self._name, step)
      try:
        report = probe(run, self._probe_tokens, dtype=settings.dtype)
      except NotFinite as error:  # of parameters that are finite, and huge
        raise Diverged(step, math.nan, str(error)) from error
      summary = report.summary(settings.epsilon)
      self._metrics.write('probe', step, summary)
      self.sink_1 = f'{summary["sink_1"]:.1f}%'
    if always or _due(step, self._experiment.validation.every):
      losses = {key: self._loss(params, batches) for key, batches in self._sets.items()}
      for key, loss in losses.items():
        if not math.isfinite(loss):
          raise Diverged(step, loss, f'the validation loss {key!r} is {loss:g}.')
      self._metrics.write('valid', step, losses)

  def _loss(self, params, batches):
    totals = []
    for batch in batches:
      totals.append(self._validation_step(params, self._feed.put(batch)))
      jax.block_until_ready(totals[-2:-1])  # so that the device holds two batches at most
    return float(sum(t[0] for t in totals) / sum(t[1] for t in totals))


def quiet_logs() -> None:
  """Keeps the libraries' own progress reports out of a command's output."""
  absl.logging.set_verbosity(absl.logging.ERROR)
  logging.getLogger('sink_jax').setLevel(logging.INFO)


@jax.jit
def _all_finite(state):
  """Are all floating-point numbers of a state finite?"""
  return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(state)]))


def _all_intact(intact):
  """Raises DamagedCache in all processes where the data of one is damaged."""
  try:
    together(intact)
  except ValueError as error:
    raise DamagedCache(str(error)) from None


def _due(step, every):
  return every > 0 and step % every == 0


def _tell(line):
  """Of what concerns the job, one process tells."""
  if is_first():
    _log.warning(line)
