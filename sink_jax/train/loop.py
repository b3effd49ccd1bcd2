"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import absl.logging
import jax
import numpy as np

from sink_jax.data.cache_check import DamagedCache
from sink_jax.data.dataset import DataConfig, Dataset, open_data
from sink_jax.data.token_edits import first_token
from sink_jax.data.tokenizer import Encoder
from sink_jax.io.progress import Progress
from sink_jax.kernels.dispatch import platform
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.models.sizes import flops_per_token, parameter_shapes
from sink_jax.train import run_dir as runs
from sink_jax.train.defaults import KEYS, Share, completed, device_memory, filled
from sink_jax.train.experiment import Experiment, from_dict, resolved
from sink_jax.train.global_batch import GlobalBatches
from sink_jax.train.multihost import broadcast_from_process0, check_same, is_first, on_all_processes
from sink_jax.train.old_keys import with_update_rule
from sink_jax.train.optimizer import Rates, learning_rates
from sink_jax.train.outcome import Interrupted
from sink_jax.train.recorder import held
from sink_jax.train.sharding import make_mesh
from sink_jax.train.step import batch_layout, make_train_step, make_validation_step
from sink_jax.train.stop_handler import StopHandler
from sink_jax.train.throughput import Throughput, measured_matmul_rate


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
  job, name = prepared(config, workdir), name or PurePath(workdir).name
  check_same('config, data or jax', json.dumps(
      [job.config, job.data_summary, jax.__version__], sort_keys=True))
  with StopHandler() as stop, held(job, workdir, name, job.data.check_files) as recorder:
    try:
      params = _train(job, recorder, show_progress, stop)
    except (runs.WorkdirLocked, DamagedCache):
      raise
    except ValueError as error:
      if jax.process_count() == 1:
        raise
      # What breaks between processes is a ValueError too, and no fault of the config.
      raise RuntimeError(f'process {jax.process_index()} cannot go on: {error}') from error
  model = dataclasses.replace(job.model, implementation=None, unroll=1)  # of training; see load_run
  return Run(model, params, name, job.experiment.steps, probe_tokens=job.probe_tokens,
             first_token=first_token(job.experiment.data.interventions))


class Job(NamedTuple):
  """A config as typed objects, with its data, the devices and the inputs of the probe."""
  config: Mapping[str, Any]  # with what the data and the platform decide
  data_summary: Mapping[str, Any]
  experiment: Experiment
  model: ModelConfig
  data: Dataset
  mesh: jax.sharding.Mesh
  attention: str  # the implementation
  probe_tokens: np.ndarray
  encoder: Encoder | None


def prepared(config: Mapping[str, Any], workdir,
             opened: Callable[[DataConfig], Dataset] = open_data) -> Job:
  """What a run needs. What does not fit is found before any file is made.

  All processes of a job call it. opened: how the data are opened, after all other checks.

  Raises:
    ValueError: as `train` does.
  """
  config = with_update_rule(config)
  job = on_all_processes(lambda: _prepared(config, workdir, opened))
  data = job.data
  chosen = broadcast_from_process0(
      lambda: _completed(runs.as_begun(workdir, config), job), ValueError)
  config = filled(config, chosen, KEYS)  # all else may differ between processes
  experiment = from_dict(config)
  model = experiment.model_config(data.vocab_size, data.input_features, data.output_features)
  return job._replace(config=resolved(config, data), experiment=experiment, model=model)


def _prepared(config, workdir, opened):
  """The Job without what `_completed` chooses."""
  experiment = from_dict(config)
  experiment.check_devices()
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh))
  _trace(experiment, mesh)
  if is_first():
    runs.check_unlocked(workdir, config)
  data = opened(experiment.data)
  model = experiment.model_config(data.vocab_size, data.input_features, data.output_features)
  return Job(config, data.summary(), experiment, model, data, mesh,
             training_implementation(model, experiment.data.context),
             data.probe_tokens(experiment.probe.sequences, experiment.probe.length),
             data.encoder)


def _completed(config, job):
  """The config with the empty keys that these devices decide."""
  experiment, (data, fsdp, tensor) = job.experiment, job.mesh.shape.values()
  tokens = experiment.microbatch_size * experiment.data.context / (data * fsdp)
  with mesh_context(job.mesh):
    share = Share(platform(), device_memory(), tokens, fsdp * tensor, tensor,
                  experiment.microbatches, experiment.loss_logits)
  return completed(config, job.model, share)


def _trace(experiment, mesh):
  """Raises a ValueError if the model cannot be built or run; the data play no part in it."""
  model, context = experiment.model_before_data(), experiment.data.context
  training_implementation(model, context)
  jax.eval_shape(make_validation_step(model, mesh), parameter_shapes(model),
                 batch_layout(model, experiment.microbatch_size, context, mesh))


def _train(job, recorder, show_progress, stop):
  """From the newest checkpoint to the last step, or to where the run has to stop."""
  experiment, model, data, mesh = job.experiment, job.model, job.data, job.mesh
  optimizer, decay = experiment.optimizer, np.float32(experiment.optimizer.weight_decay)
  learning_rate = learning_rates(optimizer, experiment.steps)
  train_step = make_train_step(model, optimizer, mesh, experiment.microbatches,
                               loss_logits=experiment.loss_logits,
                               gradient_reduction=experiment.gradient_reduction)
  state = recorder.restored()
  if recorder.has_finished():
    return state.params
  clock = Throughput(experiment.batch_size * experiment.data.context,
                     flops_per_token(model, experiment.data.context),
                     measured_matmul_rate(model.dtype))
  feed = GlobalBatches(mesh, experiment.batch_size)
  batches = data.batches(recorder.start, experiment.batch_size, experiment.seed, feed.rows)
  progress = Progress(recorder.name, experiment.steps, recorder.start, unit='step',
                      enabled=show_progress and is_first())

  def report(step, values):
    """Checks and logs the metrics of an update; waits for the device to finish it."""
    values = {k: float(v) for k, v in values.items()}
    clock.step()
    recorder.check(step, values)
    if recorder.logs(step):
      speed = clock.read()
      recorder.log(step, values, learning_rate(step - 1), speed)
      show = lambda x, form: x if isinstance(x, str) else format(x, form)
      progress.update(step, loss=f'{values["loss"]:.3f}',
                      **{'tokens/s': show(speed['tokens_per_second'], ',.0f'),
                         'MFU': show(speed['mfu'], '.0%'), 'Sink_1': recorder.sink_1})

  with contextlib.closing(progress), recorder.recording():
    if stop.poll(wait=True) and recorder.start < experiment.steps:
      raise Interrupted(recorder.start, experiment.steps)
    if recorder.start == 0:
      recorder.begin(state)
      if stop.poll(wait=True):  # before the step is compiled, which can take minutes
        raise Interrupted(recorder.start, experiment.steps)
    pending = None  # metrics are read one step late, so that the device never waits
    for step in range(recorder.start + 1, experiment.steps + 1):
      rates = Rates(np.float32(learning_rate(step - 1)), decay)
      state, values = train_step(state, feed.put(next(batches)), rates)
      if pending is not None:
        report(*pending)
      pending = (step, values)
      recorder.poll()
      # Asked once: it may change at any moment.
      stopping = stop.poll() and step < experiment.steps
      if stopping or recorder.due(step):
        report(*pending)
        pending = None
        recorder.settle(step, state, values['loss'], saving=stopping)
        clock.pause()
      if stopping:
        raise Interrupted(step, experiment.steps)
  return state.params


def quiet_logs() -> None:
  """Keeps the libraries' own progress reports out of a command's output."""
  absl.logging.set_verbosity(absl.logging.ERROR)
  logging.getLogger('sink_jax').setLevel(logging.INFO)
