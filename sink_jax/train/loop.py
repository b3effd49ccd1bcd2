"""The training loop, from a config to the trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sink_jax.component import short_text
from sink_jax.data.dataset import Dataset, as_packed, open_data
from sink_jax.data.packed import Packed
from sink_jax.data.sources import PackedDataset
from sink_jax.data.token_edits import first_token
from sink_jax.devices import platform
from sink_jax.evaluate.probe import first_token_limits
from sink_jax.evaluate.sink_report import limit_note
from sink_jax.foreign import standard_promotion
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.terminal import Progress
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.models.sharding import GlobalBatches, make_mesh
from sink_jax.models.sizes import flops_per_token, parameter_count, parameter_shapes
from sink_jax.train.checkpoint import CheckpointError, Checkpoints
from sink_jax.train.config import Experiment, from_dict, resolved, unrolled
from sink_jax.train.evaluation import Diverged, Evaluation
from sink_jax.train.memory import device_memory, memory, memory_note
from sink_jax.train.metrics import Clock, Metrics, read_metrics
from sink_jax.train.multihost import (
  Interrupted,
  StopHandler,
  Unsaved,
  broadcast_from_process0,
  gather,
  is_first,
  on_all_processes,
)
from sink_jax.train.optimizer import OptimizerConfig, learning_rate
from sink_jax.train.start import (
  Source,
  check_data,
  start_params,
  trained_paths,
  with_source,
)
from sink_jax.train.step import (
  Params,
  TrainState,
  batch_layout,
  init_state,
  make_train_step,
  make_validation_step,
  state_layout,
  state_of_params,
)
from sink_jax.train.workdir import Workdir, WorkdirLocked, check_workdir, read_status

_log = logging.getLogger('sink_jax')


@dataclasses.dataclass(frozen=True)
class Job:
  """A config as typed objects, with its data and the devices.

  config: the dict that config.json will hold, with what the data and the source decide.
  optimizer: names the parameters that are trained. source: None if the seed draws the parameters.
  probe_tokens: (S, T) int32, or (S, T, F) float32 of a continuous task.
  """

  config: Mapping[str, Any]
  experiment: Experiment
  model: ModelConfig
  optimizer: OptimizerConfig
  data: Dataset
  mesh: Mesh
  source: Source | None
  probe_tokens: np.ndarray


@standard_promotion()
def train(config: Mapping[str, Any], workdir: str | AnyPath, *,
          show_progress: bool = True) -> Run:
  """Trains what a config describes, or resumes it, and returns the trained model.

  A run is a pure function of its config: interrupted and resumed it gives the same
  parameters and metrics as in one go. Everything is written below `workdir`:
  config.json, status.json, metrics.jsonl, tensorboard/, checkpoints/, probe_tokens.npy, and
  tokenizer/ if the data are text.
  In a job of several processes all of them call it with the same arguments.

  Args:
    config: the nested dict of a config, e.g. `ConfigDict.to_dict()`.

  Raises:
    ValueError: the config, the data, the devices or the workdir do not fit. It comes before any
      computation, and nothing is lost. WorkdirLocked, a subclass: another job trains in the workdir,
      or has begun to train there.
    Diverged: a step was not finite. Interrupted: a signal asked it to stop; the state is saved.
    CheckpointError: a checkpoint could not be written, or holds another model.
  """
  path = to_path(workdir)
  job, name = prepare(config, path), path.name
  if show_progress and is_first():
    print(_banner(job, name), file=sys.stderr, flush=True)
  for remark in job.data.remarks():
    _log_once(remark)
  with StopHandler() as stop, Workdir(path, job.config, job.data.summary()) as folder:
    params = _trained(job, folder, stop, name, show_progress)
  model = dataclasses.replace(job.model, implementation=None, unroll=1)  # of training; see load_run
  return Run(model, params, name, job.experiment.steps, probe_tokens=job.probe_tokens,
             first_token=first_token(job.experiment.data.interventions))


def prepare(config: Mapping[str, Any], workdir: AnyPath) -> Job:
  """Checks a config against the devices, the data and the workdir, and makes what it describes.

  All processes of a job call it. It writes nothing except a corpus that was not built yet.
  """
  config, source = on_all_processes(lambda: completed(config))
  experiment = on_all_processes(lambda: _checked(config, workdir))
  # One process builds a corpus that is not there; the others then only open it.
  first = on_all_processes(lambda: open_data(experiment.data) if is_first() else None)
  data = on_all_processes(lambda: first or open_data(experiment.data))
  if source is not None:
    check_data(source, data)
  config = resolved(config, experiment, data)
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh))
  model = unrolled(experiment.model_config(
      data.vocab_size, data.input_features, data.output_features), experiment, platform(), mesh.shape)
  optimizer = dataclasses.replace(
      experiment.optimizer, trained=trained_paths(source, experiment.init, model))
  tokens = on_all_processes(
      lambda: data.probe_tokens(experiment.probe.sequences, experiment.probe.length))
  # Processes with different programs would wait for each other forever in the first collective.
  same = gather(json.dumps([config, data.summary(), jax.__version__], sort_keys=True))
  if other := [i for i, text in enumerate(same) if text != same[0]]:
    raise ValueError(f'Process {other[0]} has another config, data or jax than process 0: start '
                     'all with the same command, the same files and the same versions.')
  return Job(config, experiment, model, optimizer, data, mesh, source, tokens)


def completed(config: Mapping[str, Any]) -> tuple[dict[str, Any], Source | None]:
  """The config with what its packed data and its source decide, and the source, if it has one.

  Raises:
    ValueError: one of them cannot be opened, or does not fit the config.
  """
  packed = as_packed(from_dict(config).data)
  return with_source({**config, 'data': {
      **config['data'], 'tokenizer': short_text(packed.tokenizer), 'context': packed.context,
      'bos': packed.bos, 'eos': packed.eos, 'valid_fraction': packed.valid_fraction}})


def planned(config: Mapping[str, Any]) -> dict[str, Any]:
  """`completed`, with the vocabulary of packed data, for a model that is not trained now; raises as it does."""
  config, _ = completed(config)
  data = from_dict(config).data
  if isinstance(data.source, PackedDataset) and not config['model']['vocab_size']:
    size = Packed(to_path(data.source.path)).manifest['vocab_size']
    for edit in data.interventions:
      size = edit.vocab_size(size)
    config['model'] = {**config['model'], 'vocab_size': size}
  return config


def _checked(config: Mapping[str, Any], workdir: AnyPath) -> Experiment:
  """The typed config; checks all that can be checked without data, and writes nothing."""
  experiment = from_dict(config)
  if experiment.wandb and importlib.util.find_spec('wandb') is None:
    raise ValueError(f'wandb = {experiment.wandb!r} needs its package: pip install wandb.')
  experiment.check_devices()
  if is_first():
    check_workdir(workdir, config)
  model, context = experiment.model_before_data(), experiment.data.context
  training_implementation(model, context)
  # A trace takes a second, and finds shapes that do not fit before the data are opened.
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh))
  jax.eval_shape(make_validation_step(model, mesh), parameter_shapes(model),
                 batch_layout(model, experiment.microbatch_size, context, mesh))
  return experiment


def _trained(job: Job, folder: Workdir, stop: StopHandler, name: str,
             show_progress: bool) -> Params:
  """Trains from the newest checkpoint to the last step; returns the parameters."""
  experiment = job.experiment
  tokens = io.BytesIO()
  np.save(tokens, job.probe_tokens, allow_pickle=False)
  broadcast_from_process0(
      lambda: write_atomically(folder.path / 'probe_tokens.npy', tokens.getvalue()))
  if is_first() and job.data.tokenizer is not None:
    job.data.tokenizer.save(folder.path / 'tokenizer', digest=job.data.tokenizer.digest)
  checkpoints = Checkpoints(folder.path, experiment.checkpoints_kept)
  layout = state_layout(job.model, job.optimizer, job.mesh)
  state, graft = checkpoints.restore(layout), None
  if state is None:
    state, graft = _first_state(job)
  start = int(state.step)
  if start:
    _log_once(f'resuming from step {start} of {experiment.steps}')
  if start == experiment.steps and broadcast_from_process0(
      lambda: read_status(folder.path)['status'] == 'done'):
    checkpoints.close()
    return state.params
  metrics = Metrics(folder.path, start, experiment.wandb, job.config)
  evaluation = Evaluation(experiment, job.model, job.mesh, job.data, job.probe_tokens, metrics)
  progress = Progress(name, experiment.steps, start, unit='step',
                      enabled=show_progress and is_first())
  with contextlib.closing(metrics), contextlib.closing(progress), _recorded(
      job, folder, checkpoints, metrics, evaluation, start):
    if graft is not None:
      metrics.write('graft', 0, dataclasses.asdict(graft))
    return _steps(job, state, folder, stop, checkpoints, metrics, evaluation, progress).params


def _steps(job: Job, state: TrainState, folder: Workdir, stop: StopHandler,
           checkpoints: Checkpoints, metrics: Metrics, evaluation: Evaluation,
           progress: Progress) -> TrainState:
  """Takes the steps that are left. Each update goes through these events, in this order:

    1. the step is dispatched, which returns before the devices have computed it;
    2. the metrics of the step before are read, checked and logged, while the devices compute this step;
    3. if the probe, the validation, a checkpoint or a request to stop needs the state of this step, its
       metrics are read too, which waits for the devices, and the state is checked;
    4. the state is saved, in the background unless a request to stop waits for it; then it is probed and
       validated.

  Only finite states are saved, so a run can always resume from its newest checkpoint. If a kill loses a
  probe, the resumed run measures it first. The state is saved before the next step is dispatched, which
  donates its memory.
  """
  experiment, start, last = job.experiment, int(state.step), job.experiment.steps

  def end_if_stopped() -> None:  # in all processes, before there is anything new to save
    if start < last and stop.poll(wait=True):
      raise Interrupted(start, last)

  end_if_stopped()
  there = broadcast_from_process0(
      lambda: {row['kind']: row for row in read_metrics(folder.path) if row['step'] == start})
  evaluation(start, state.params, there)
  end_if_stopped()  # before the step is compiled, which can take minutes
  update = make_train_step(job.model, job.optimizer, job.mesh, experiment.microbatches,
                           loss_logits=experiment.loss_logits,
                           gradient_dtype=experiment.gradient_dtype)
  to_global = GlobalBatches(job.mesh, experiment.batch_size)
  batches = job.data.batches(start, experiment.batch_size, experiment.seed, to_global.rows)
  clock = Clock(experiment.tokens_per_step, flops_per_token(job.model, experiment.data.context))
  unread: list[tuple[int, Mapping[str, jax.Array]]] = []

  def read_metrics_of_step() -> None:
    while unread:
      step, values = unread.pop()
      values = {key: float(x) for key, x in values.items()}  # waits until the devices have done it
      clock.step()
      # Before the row is written, so that a step that diverged leaves none.
      if not all(map(math.isfinite, values.values())):
        raise Diverged(step, values['loss'])
      if step % experiment.log_every == 0 or step == last:
        speed, parts = clock.read()
        rate = learning_rate(job.optimizer, last, step - 1)
        metrics.write('train', step, {**values, 'learning_rate': rate, **speed})
        if parts:
          metrics.write('time', step, parts)
        if step < last:  # the last line comes with the last evaluation
          progress.update(step, **_shown(values['loss'], speed, evaluation))

  first = start + experiment.profile.first
  with contextlib.ExitStack() as trace:
    for step in range(start + 1, last + 1):
      if step == first and experiment.profile.steps:
        trace.enter_context(jax.profiler.trace(str(folder.path / 'profile')))
      if step == first + experiment.profile.steps:
        trace.close()
      with clock.spent_on('data'):
        batch = next(batches)
      # Steps are numbered by the updates done, from 1; the schedule counts updates from 0.
      batch, rate = to_global.make_global_batch(batch), learning_rate(job.optimizer, last, step - 1)
      if step == start + 1 and (limit := device_memory()):
        compiled = update.lower(state, batch, rate).compile()  # once: the call below takes it from a cache
        _log_once(memory_note(memory(compiled).total, limit))
      state, values = update(state, batch, rate)
      read_metrics_of_step()
      unread.append((step, values))
      checkpoints.poll()
      # Asked once in a step: with one process the answer may change at any moment.
      stopping = stop.poll() and step < last
      every = experiment.checkpoint_every
      saving = stopping or step == last or every > 0 and step % every == 0
      if not (saving or evaluation.due(step)):
        continue
      read_metrics_of_step()
      # The loss can be finite and the updated parameters not.
      if not _all_finite(state):
        raise Diverged(step, values['loss'])
      if saving:
        with clock.spent_on('save'):
          folder.check_owner()
          metrics.flush()  # a checkpoint vouches for the rows up to its step
          checkpoints.save(step, state)
      if stopping:
        raise Interrupted(step, last)
      with clock.spent_on('probe'):
        evaluation(step, state.params)
  progress.update(last, **_shown(float(values['loss']), {}, evaluation) if start < last else {})
  return state


def _first_state(job: Job) -> tuple[TrainState, Any]:
  """The state before the first step, and the report of a graft."""
  experiment = job.experiment
  limits = first_token_limits(job.model, experiment.probe.length)
  if note := limit_note(limits, experiment.probe.length, experiment.probe.epsilon):
    _log_once(note)
  if job.source is None:
    return init_state(job.model, job.optimizer, experiment.seed, job.mesh), None
  params, graft = start_params(job.source, experiment.init, job.model, job.mesh, job.probe_tokens,
                               experiment.seed)
  if graft is not None:
    _log_once(str(graft))
  return state_of_params(params, job.model, job.optimizer, job.mesh), graft


@contextlib.contextmanager
def _recorded(job: Job, folder: Workdir, checkpoints: Checkpoints, metrics: Metrics,
              evaluation: Evaluation, start: int) -> Iterator[None]:
  """Writes a status when the block ends, however it ends, once its saves are on the disk."""
  attention = training_implementation(job.model, job.experiment.data.context)
  folder.write_status('running', step=start, attention=attention)
  status, details = 'done', {'step': job.experiment.steps}
  try:
    yield
    metrics.flush()  # a run that is done is never opened again
  except (WorkdirLocked, Unsaved):  # another job has the workdir, or the run ends as if killed:
    status = None  # 'running' stays, and no save is awaited
    metrics.abandon()
    raise
  except Interrupted as stop:
    status, details = 'interrupted', {'step': stop.step}
    raise
  except Diverged as diverged:
    status, details = 'diverged', {'step': diverged.step, 'loss': str(diverged.loss)}
    raise
  except BaseException as error:
    status, details = 'failed', {'error': f'{type(error).__name__}: {error}'}
    # A failure between processes is a ValueError too, but not a mistake in the config.
    if isinstance(error, ValueError) and jax.process_count() > 1:
      raise RuntimeError(f'process {jax.process_index()} cannot go on: {error}') from error
    raise
  finally:
    try:
      # If only this process failed, the others do not complete a save.
      if status is not None and (status != 'failed' or jax.process_count() == 1):
        checkpoints.close()
    except CheckpointError as error:
      # A status 'done' whose checkpoint is lost would never be trained again.
      status, details = 'failed', {'error': str(error)}
      raise
    finally:
      if status is not None:
        with contextlib.suppress(OSError):  # on a full disk only the error is left
          folder.write_status(status, **details, **evaluation.last, attention=attention,
                              last_good_checkpoint=checkpoints.latest)


def _banner(job: Job, name: str) -> str:
  """Describes the coming training: the devices, the model, the steps and the data, a line each."""
  experiment, model = job.experiment, job.model
  total = parameter_count(model)
  tokens = experiment.steps * experiment.tokens_per_step
  epoch = job.data.summary().get('tokens_per_epoch')
  passes = f', {tokens / epoch:.3g} passes over {epoch:,}' if epoch else ''
  warm = ('' if experiment.optimizer.warmup_steps < experiment.steps else
          '; all of it is warm-up: lower optimizer.warmup_steps')
  tokenizer = (f'tokenizer {experiment.data.tokenizer!r}, ' if job.data.tokenizer is not None else '')
  inner = parameter_count(model, embeddings=False)
  return (f'{name} on {jax.device_count()} x {jax.devices()[0].device_kind}, '
          f'attention {training_implementation(model, experiment.data.context)}\n'
          f'  {model.layers} blocks of width {model.d_model} with {model.heads} heads, '
          f'{total:,} parameters ({inner:,} without embeddings), {model.dtype}\n'
          f'  {experiment.steps:,} steps of {experiment.batch_size} x {experiment.data.context} '
          f'tokens: {tokens:,} tokens{passes}{warm}\n'
          f'  data {experiment.data.source!r}, {tokenizer}{model.vocab_size:,} ids')


def _shown(loss: float, speed: Mapping[str, Any], evaluation: Evaluation) -> dict[str, str]:
  """Numbers next to the progress."""
  text = lambda x, form: x if isinstance(x, str) else format(x, form)
  shown = {'loss': f'{loss:.3f}'}
  if speed:
    shown |= {'tokens/s': text(speed['tokens_per_second'], ',.0f'), 'MFU': text(speed['mfu'], '.0%')}
  if 'sink_1' in evaluation.last:
    shown['Sink_1'] = f'{evaluation.last["sink_1"]:.1f}%'
  return shown


@jax.jit
def _all_finite(state: TrainState) -> jax.Array:
  """True if all floating-point numbers of a state are finite."""
  return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(state)]))


def _log_once(remark: str) -> None:
  """Logs a remark about the job in one of its processes."""
  if is_first():
    _log.warning(remark)
