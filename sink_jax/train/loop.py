"""The training loop, from a config to the trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.data.batches import Batch
from sink_jax.data.token_edits import first_token
from sink_jax.evaluate.probe import first_token_limits
from sink_jax.evaluate.sink_report import limit_note
from sink_jax.foreign import standard_promotion
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.terminal import Progress
from sink_jax.models.record import GraftReport
from sink_jax.models.run import Run
from sink_jax.models.sharding import GlobalBatches
from sink_jax.models.sizes import flops_per_token
from sink_jax.train.checkpoint import CheckpointError, Checkpoints
from sink_jax.train.config import Experiment
from sink_jax.train.evaluation import Diverged, Evaluation
from sink_jax.train.failures import Repeated, forget_starts, may_start_again, passes
from sink_jax.train.memory import DoesNotFit, check_fits, device_memory, memory
from sink_jax.train.metrics import Clock, read_metrics
from sink_jax.train.multihost import (
  Interrupted,
  StopHandler,
  Unsaved,
  broadcast_from_process0,
  is_first,
)
from sink_jax.train.optimizer import learning_rate
from sink_jax.train.prepare import Job, banner, prepare
from sink_jax.train.start import start_params
from sink_jax.train.step import (
  TrainState,
  init_state,
  make_train_step,
  state_layout,
  state_of_params,
)
from sink_jax.train.workdir import Workdir, WorkdirLocked, read_status

_log = logging.getLogger('sink_jax')


@standard_promotion()
def train(experiment: Experiment, workdir: str | AnyPath, *, show_progress: bool = True) -> Run:
  """Trains what a config describes, or resumes it, and returns the trained model.

  A run is a pure function of its config: interrupted and resumed it gives the same
  parameters and metrics as in one go. Everything is written below `workdir`:
  config.json, status.json, metrics.jsonl, tensorboard/, checkpoints/, probe_tokens.npy, and
  tokenizer/ if the data are text.
  In a job of several processes all of them call it with the same arguments.

  Raises:
    ValueError: the config, the data, the devices or the workdir do not fit. It comes before any
      computation, and nothing is lost. WorkdirLocked, a subclass: another job trains in the
      workdir, or has begun to train there.
    Diverged: a step was not finite. Interrupted: a signal asked it to stop; the state is saved.
    CheckpointError: a checkpoint could not be written, or holds another model.
  """
  path = to_path(workdir)
  job = prepare(experiment, path)
  experiment = job.experiment
  shown = show_progress and is_first()
  if shown:
    print(banner(job, path.name), file=sys.stderr, flush=True)
  for remark in job.data.remarks():
    _log_once(remark)
  checkpoints = Checkpoints(path, experiment.checkpoints_kept, experiment.checkpoint_minutes)
  with (
    StopHandler() as stop,
    Workdir(path, experiment, job.data.summary(), job.stored) as folder,
    Evaluation(experiment, job.model, job.mesh, job.data, job.probe_tokens, path) as evaluation,
    _recorded(job, folder, checkpoints, evaluation),
  ):
    folder.write_inputs(job.probe_tokens, job.data.tokenizer)
    state, graft = checkpoints.restore(state_layout(job.model, job.optimizer, job.mesh)), None
    checkpoints.open()  # a store that refuses is found out before the first step
    if state is None:
      state, graft = _first_state(job)
    start = int(state.step)
    if not _is_done(folder, start, experiment.steps):
      folder.write_status('running', step=start, attention=job.attention)
      evaluation.begin(start, graft)
      with _StepLog(job, evaluation, start, path.name, shown) as log:
        state = _steps(job, state, stop, folder, checkpoints, evaluation, log)
  model = dataclasses.replace(job.model, implementation=None, unroll=1)  # of training; see load_run
  return Run(
    model,
    state.params,
    path.name,
    experiment.steps,
    probe_tokens=job.probe_tokens,
    first_token=first_token(experiment.data.interventions),
  )


def _steps(
  job: Job,
  state: TrainState,
  stop: StopHandler,
  folder: Workdir,
  checkpoints: Checkpoints,
  evaluation: Evaluation,
  log: _StepLog,
) -> TrainState:
  """Takes the steps that are left. Each update goes through these events, in this order:

    1. the step is dispatched, which returns before the devices have computed it;
    2. the metrics of the step before are read, checked and logged, while the devices compute;
    3. if the probe, the validation, a checkpoint or a request to stop needs the state, the metrics
       of this step are read too, which waits for the devices, and the state is checked;
    4. the state is saved, in the background unless a request to stop waits for it; then it is
       probed and validated, unless a request to stop ends that.

  Only finite states are saved, so a run can always resume from its newest checkpoint. If a kill
  loses a probe, the resumed run measures it first. The state is saved before the next step is
  dispatched, which donates its memory.
  """
  experiment, start, last = job.experiment, int(state.step), job.experiment.steps
  _catch_up(state, last, stop, folder, evaluation)
  update, batches = _update(job), _batches(job, start, log.clock)
  with contextlib.ExitStack() as trace:
    for step in range(start + 1, last + 1):
      _trace(trace, job, folder, step - start)
      batch = next(batches)
      # Steps are numbered by the updates done, from 1; the schedule counts updates from 0.
      rate = learning_rate(job.optimizer, last, step - 1)
      if step == start + 1:
        _check_memory(job, update, state, batch, rate)
      state, values = update(state, batch, rate)
      log.read()
      log.add(step, values)
      checkpoints.poll()
      # Asked once in a step: with one process the answer may change at any moment.
      asked = stop.poll(save=checkpoints.due())
      stopping = asked.stop and step < last
      every = experiment.checkpoint_every
      saving = stopping or asked.save or step == last or every > 0 and step % every == 0
      if not (saving or evaluation.due(step)):
        continue
      log.read()
      # The loss can be finite and the updated parameters not.
      if not _all_finite(state):
        raise Diverged(step, values['loss'])
      if saving:
        with log.clock.spent_on('save'):
          _save(step, state, folder, checkpoints, evaluation)
      if stopping:
        raise Interrupted(step, last)
      with log.clock.spent_on('probe'):
        complete = evaluation(step, state.params, stop=stop.poll_to_stop)
      if not complete:  # the resumed run measures it
        if not saving:
          _save(step, state, folder, checkpoints, evaluation)
        raise Interrupted(step, last)
  return state


def _save(
  step: int, state: TrainState, folder: Workdir, checkpoints: Checkpoints, evaluation: Evaluation
) -> None:
  """Starts saving a state, and writes what it vouches for."""
  folder.check_owner()
  evaluation.metrics.flush()  # a checkpoint vouches for the rows up to its step
  checkpoints.save(step, state)


def _update(job: Job) -> jax.stages.Wrapped:
  """The compiled step of a job."""
  return make_train_step(
    job.model,
    job.optimizer,
    job.mesh,
    job.experiment.microbatches,
    loss_logits=job.experiment.loss_logits,
    gradient_dtype=job.experiment.gradient_dtype,
  )


def _check_memory(
  job: Job, update: jax.stages.Wrapped, *arguments: TrainState | Batch | float
) -> None:
  """Says how much memory the step takes; raises a ValueError where the device has less."""
  limit = device_memory()
  if not limit:
    return
  compiled = update.lower(*arguments).compile()  # once: the call finds it in a cache
  split = job.mesh.shape['data'] * job.mesh.shape['fsdp']
  sequences = job.experiment.batch_size // split
  _log_once(check_fits(memory(compiled), limit, job.experiment.microbatches, sequences))


def _batches(job: Job, start: int, clock: Clock) -> Iterator[Batch]:
  """The global batches after step `start`; the clock counts the time in which they are read."""
  experiment = job.experiment
  to_global = GlobalBatches(job.mesh, experiment.batch_size)
  batches = job.data.batches(start, experiment.batch_size, experiment.seed, to_global.rows)
  while True:
    with clock.spent_on('data'):
      batch = next(batches)
    yield to_global.make_global_batch(batch)


def _catch_up(
  state: TrainState, last: int, stop: StopHandler, folder: Workdir, evaluation: Evaluation
) -> None:
  """Measures at the first step what is due there and was not measured before a kill."""
  start = int(state.step)

  def end_if_stopped() -> None:  # in all processes, before there is anything new to save
    if start < last and stop.poll(wait=True).stop:
      raise Interrupted(start, last)

  end_if_stopped()
  there = broadcast_from_process0(
    lambda: {row['kind']: row for row in read_metrics(folder.path) if row['step'] == start}
  )
  if not evaluation(start, state.params, there, stop=stop.poll_to_stop):
    raise Interrupted(start, last)
  end_if_stopped()  # before the step is compiled, which can take minutes


class _StepLog:
  """Checks and logs the metrics of steps: a context, with a line of progress that it closes.

  clock: counts the time of the steps that were read.
  """

  def __init__(self, job: Job, evaluation: Evaluation, start: int, name: str, shown: bool):
    experiment = job.experiment
    self._job, self._evaluation = job, evaluation
    self.clock = Clock(
      experiment.tokens_per_step, flops_per_token(job.model, experiment.data.context)
    )
    self._progress = Progress(name, experiment.steps, start, unit='step', enabled=shown)
    self._unread: tuple[int, Mapping[str, jax.Array]] | None = None
    self._loss = math.nan

  def __enter__(self) -> _StepLog:
    return self

  def __exit__(self, kind: object, *error: object) -> None:
    if kind is None:  # the last line comes with the last evaluation
      self._show(self._job.experiment.steps, {})
    self._progress.close()

  def add(self, step: int, values: Mapping[str, jax.Array]) -> None:
    """Keeps the metrics of a step that the devices may still compute."""
    self._unread = step, values

  def read(self) -> None:
    """Waits for the metrics that were added last, and writes their row if one is due.

    Raises Diverged if one of them is not finite.
    """
    if self._unread is None:
      return
    (step, values), self._unread = self._unread, None
    values = {key: float(x) for key, x in values.items()}  # waits until the devices have done it
    self.clock.step()
    # Before the row is written, so that a step that diverged leaves none.
    if not all(map(math.isfinite, values.values())):
      raise Diverged(step, values['loss'])
    experiment, self._loss = self._job.experiment, values['loss']
    if step % experiment.log_every and step < experiment.steps:
      return
    speed, parts = self.clock.read()
    rate = learning_rate(self._job.optimizer, experiment.steps, step - 1)
    metrics = self._evaluation.metrics
    metrics.write('train', step, {**values, 'learning_rate': rate, **speed})
    if parts:
      metrics.write('time', step, parts)
    if step < experiment.steps:
      self._show(step, speed)

  def _show(self, step: int, speed: Mapping[str, Any]) -> None:
    """Numbers next to the progress."""
    text = lambda x, form: x if isinstance(x, str) else format(x, form)
    shown = {'loss': f'{self._loss:.3f}'} if math.isfinite(self._loss) else {}
    if speed:
      shown |= {
        'tokens/s': text(speed['tokens_per_second'], ',.0f'),
        'MFU': text(speed['mfu'], '.0%'),
      }
    last = self._evaluation.last
    if 'sink_1' in last and shown:
      shown['Sink_1'] = f'{last["sink_1"]:.1f}%'
    self._progress.update(step, **shown)


def _first_state(job: Job) -> tuple[TrainState, GraftReport | None]:
  """The state before the first step, and the report of a graft."""
  experiment = job.experiment
  limits = first_token_limits(job.model, experiment.probe.length)
  if note := limit_note(limits, experiment.probe.length, experiment.probe.epsilon):
    _log_once(note)
  if job.source is None:
    return init_state(job.model, job.optimizer, experiment.seed, job.mesh), None
  params, graft = start_params(
    job.source, experiment.init, job.model, job.mesh, job.probe_tokens, experiment.seed
  )
  if graft is not None:
    _log_once(str(graft))
  return state_of_params(params, job.model, job.optimizer, job.mesh), graft


def _is_done(folder: Workdir, start: int, last: int) -> bool:
  """True if no step is left, and the end of the run is recorded."""
  if start:
    _log_once(f'resuming from step {start} of {last}')
  return start == last and broadcast_from_process0(
    lambda: read_status(folder.path)['status'] == 'done'
  )


@contextlib.contextmanager
def _recorded(
  job: Job, folder: Workdir, checkpoints: Checkpoints, evaluation: Evaluation
) -> Iterator[None]:
  """Writes the status of a run that has begun, however it ends, once its saves are on the disk."""
  status, details, passing = 'done', {'step': job.experiment.steps}, False
  try:
    yield
    evaluation.metrics.flush()  # a run that is done is never opened again
  except (WorkdirLocked, Unsaved) as ended:  # another job has the workdir, or it ends as if killed:
    status = None  # 'running' stays, and no save is awaited
    evaluation.metrics.abandon()
    if isinstance(ended, Unsaved) and is_first():  # by a person
      forget_starts(folder.path)
    raise
  except Interrupted as stop:
    status, details = 'interrupted', {'step': stop.step}
    raise
  except Diverged as diverged:
    status, details = 'diverged', {'step': diverged.step, 'loss': str(diverged.loss)}
    raise
  except BaseException as error:
    status, details = 'failed', {'error': f'{type(error).__name__}: {error}'}
    passing = passes(error)
    if passing and is_first() and not may_start_again(error, folder.path):
      raise Repeated(error) from None
    # A failure between processes is a ValueError too, but not a mistake in the config.
    between = isinstance(error, ValueError) and not isinstance(error, DoesNotFit)
    if folder.begun and between and jax.process_count() > 1:
      raise RuntimeError(f'process {jax.process_index()} cannot go on: {error}') from error
    raise
  finally:
    try:
      # If only this process failed, the others do not complete a save.
      if status is not None and (status != 'failed' or jax.process_count() == 1):
        checkpoints.close()
    except CheckpointError as error:
      # A status 'done' whose checkpoint is lost would never be trained again.
      status, details, passing = 'failed', {'error': str(error)}, passes(error)
      raise
    finally:
      if status is not None and is_first() and not passing:
        with contextlib.suppress(Exception):  # of a store: it would hide the error
          forget_starts(folder.path)
      if status is not None and folder.begun:
        with contextlib.suppress(OSError):  # on a full disk only the error is left
          folder.write_status(
            status,
            **details,
            **evaluation.last,
            attention=job.attention,
            last_good_checkpoint=checkpoints.latest,
          )


def _trace(trace: contextlib.ExitStack, job: Job, folder: Workdir, step: int) -> None:
  """Begins or ends a trace of the profiler before a step of this process, from 1."""
  profile = job.experiment.profile
  if step == profile.first and profile.steps:
    trace.enter_context(jax.profiler.trace(str(folder.path / 'profile')))
  if step == profile.first + profile.steps:
    trace.close()


@jax.jit
def _all_finite(state: TrainState) -> jax.Array:
  """True if all floating-point numbers of a state are finite."""
  return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(state)]))


def _log_once(remark: str) -> None:
  """Logs a remark about the job in one of its processes."""
  if is_first():
    _log.warning(remark)
