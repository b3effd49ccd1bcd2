"""What a run leaves in its workdir while it trains: metrics, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp

from sink_jax.data.batches import Batch
from sink_jax.evaluate.finite import NotFinite
from sink_jax.evaluate.limits import first_token_limits, limit_note
from sink_jax.evaluate.probe import probe
from sink_jax.io.paths import AnyPath
from sink_jax.models.graft_report import GraftReport
from sink_jax.models.run import Run
from sink_jax.train import run_dir as runs
from sink_jax.train.checkpoint import Checkpoints
from sink_jax.train.global_batch import GlobalBatches
from sink_jax.train.metrics_log import MetricsWriter
from sink_jax.train.multihost import broadcast_from_process0, is_first
from sink_jax.train.outcome import Diverged, recorded_outcome
from sink_jax.train.prepare import PreparedRun
from sink_jax.train.probe_tokens import write_probe_tokens
from sink_jax.train.run_tokenizer import write_tokenizer
from sink_jax.train.step import (
  Params,
  TrainState,
  init_state,
  make_validation_step,
  state_layout,
  state_of_params,
)

_log = logging.getLogger('sink_jax')


@contextlib.contextmanager
def open_recorder(run: PreparedRun, workdir: str | AnyPath, name: str) -> Iterator[Recorder]:
  """Locks a workdir for one run and yields its Recorder; all processes of a job call it.

  Raises:
    ValueError: as `run_dir.lock_workdir` does.
  """
  with runs.lock_workdir(workdir, run.config, run.data_summary) as lock:
    for remark in run.data.remarks():
      _warn_once(remark)
    lock.digests['probe_tokens.npy'] = {
        'sha256': write_probe_tokens(workdir, run.probe_tokens)}
    write_tokenizer(workdir, run.encoder)
    yield Recorder(run, lock, name)


class Recorder:
  """Writes everything that the steps of a run leave in its workdir.

  Nothing in the workdir changes between `restore` and `recording`.
  start: the step of the newest checkpoint, 0 without one; known after `restore`.
  sink_1: the Sink_1 of the last probe, as text.
  """

  def __init__(self, run: PreparedRun, lock: runs.RunLock, name: str):
    self.name, self.start, self.sink_1 = name, 0, 'n/a'
    self._run, self._lock = run, lock
    self._experiment = run.experiment
    self._graft: GraftReport | None = None
    self._checkpoints = Checkpoints(lock.workdir, run.experiment.checkpoints_kept)

  def restore(self) -> TrainState:
    """The newest saved state, or that before the first step."""
    model, optimizer, mesh = self._run.model, self._experiment.optimizer, self._run.mesh
    state = self._checkpoints.restore(state_layout(model, optimizer, mesh))
    for remark in self._checkpoints.damaged:
      _warn_once(remark)
    if state is None and self._run.start is not None:
      params, self._graft = self._run.start.params(mesh, model, self._run.probe_tokens,
                                                   self._experiment.seed)
      state = state_of_params(params, model, optimizer, mesh)
    elif state is None:
      state = init_state(model, optimizer, self._experiment.seed, mesh)
    self.start = int(state.step)
    return state

  def has_finished(self) -> bool:
    """Whether nothing is left to do; its record stays: when, where and by what it was trained."""
    workdir, step = self._lock.workdir, self.start
    # The last step alone is not enough: a process that was killed between its last save and its
    # status has yet to write the latter.
    if step != self._experiment.steps or not broadcast_from_process0(
        lambda: runs.read_status(workdir)['status'] == 'done'):
      return False
    self._checkpoints.close()
    if remark := broadcast_from_process0(lambda: runs.settle_finished(workdir, step)):
      _warn_once(remark)
    return True

  @contextlib.contextmanager
  def recording(self, width: int = 1) -> Iterator[None]:
    """Opens the metrics; whatever ends this context, the status has how the run ended.

    Args:
      width: members of the group that the run is trained in.
    """
    experiment, workdir = self._experiment, self._lock.workdir
    if self.start:
      _warn_once(f'resuming from step {self.start} of {experiment.steps}')
    with contextlib.closing(MetricsWriter(workdir, self.start)) as self._metrics:
      if self._metrics.remark:
        _warn_once(self._metrics.remark)
      self._evaluation = Evaluation(self._run, self.name, self._metrics)
      with recorded_outcome(workdir, self._checkpoints, self.start, experiment.steps,
                            self._metrics.whole_from, attention=self._run.attention, width=width):
        yield

  def begin(self, state: TrainState) -> None:
    """Evaluates the state before the first step, and writes what a graft has done to it."""
    if self._graft is not None:
      kept = self._experiment.init.kept
      _warn_once(f'{self._graft}{f"; as in the source: {kept}" if kept else ""}')
      self._metrics.write('graft', 0, self._graft.row())
    probe = self._experiment.probe
    limits = first_token_limits(self._run.model, probe.length)
    if note := limit_note(limits, probe.length, probe.epsilon):
      _warn_once(note)
    self._evaluate(0, state)

  def due(self, step: int) -> bool:
    """Whether the probe, the validation or a checkpoint needs the state of this step."""
    return self._saves(step) or self._evaluation.due(step)

  def logs(self, step: int) -> bool:
    """Whether the metrics of this step are written."""
    return step % self._experiment.log_every == 0 or step == self._experiment.steps

  def check(self, step: int, values: Mapping[str, float]) -> None:
    """Raises Diverged where the metrics of a step are not finite."""
    if not all(map(math.isfinite, values.values())):
      raise Diverged(step, values['loss'])

  def log(self, step: int, values: Mapping[str, float], learning_rate: float,
          speed: Mapping[str, float | str]) -> None:
    """Writes the metrics of a step; `speed` is what `Throughput.read` returns."""
    self._metrics.write('train', step, {**values, 'learning_rate': learning_rate, **speed})

  def poll(self) -> None:
    """Completes a save that has been committed; cheap, to be called at every step."""
    self._checkpoints.poll()

  def settle(self, step: int, state: TrainState, loss: SupportsFloat,
             saving: bool = False) -> None:
    """Evaluates and saves the state after a step, as far as that is due.

    Args:
      loss: of that step.
      saving: saves the state in any case; it may be donated afterwards.

    Raises:
      Diverged: the state is not finite. LockLost: another job has begun to train in the workdir.
      CheckpointError: as `Checkpoints.save`.
    """
    # A finite loss can come with parameters that are not: those of the update after it. Checked
    # before the probe, which refuses such parameters with an error of another kind.
    if not _all_finite(state):
      raise Diverged(step, loss)
    self._evaluate(step, state)
    if not (saving or self._saves(step)):
      return
    try:
      self._lock.check()
    except runs.WorkdirLocked:
      self._metrics.abandon()
      raise
    # The digest of metrics.jsonl goes with the checkpoint, so the file is on the disk first.
    self._metrics.flush()
    self._checkpoints.save(
        step, state, self._lock.digests | {'metrics.jsonl': self._metrics.record()})

  def _evaluate(self, step: int, state: TrainState) -> None:
    self._evaluation(step, state.params)
    self.sink_1 = self._evaluation.sink_1

  def _saves(self, step: int) -> bool:
    return step == self._experiment.steps or _due(step, self._experiment.checkpoint_every)


class Evaluation:
  """The sink probe and the validation loss, each at its steps and after the last one.

  sink_1: the Sink_1 of the last probe, as text.
  """

  def __init__(self, run: PreparedRun, name: str, metrics: MetricsWriter | None = None):
    """metrics: where the results are written; None for an evaluation that is only compiled."""
    self._experiment, self._model, self._name = run.experiment, run.model, name
    self._probe_tokens, self._metrics = run.probe_tokens, metrics
    self._validation_step = make_validation_step(run.model, run.mesh,
                                                 loss_logits=run.experiment.loss_logits)
    # As many sequences at a time as a training step has: the memory of a device is its bound.
    size, count = run.experiment.microbatch_size, run.experiment.validation.batches
    self._global_batches = GlobalBatches(run.mesh, size)
    self._sets = run.data.validation(size, count * run.experiment.microbatches,
                                     self._global_batches.rows)
    self.sink_1 = 'n/a'

  def compile(self, params: Params) -> None:
    """Compiles what a call needs, by running each of it once; writes nothing."""
    probe(Run(self._model, params), self._probe_tokens, dtype=self._experiment.probe.dtype)
    batch = next(iter(self._sets.values()))[0]
    global_batch = self._global_batches.make_global_batch(batch)
    jax.block_until_ready(self._validation_step(params, global_batch))

  def due(self, step: int) -> bool:
    """Whether the probe or the validation is due at this step."""
    return _due(step, self._experiment.probe.every) or _due(step, self._experiment.validation.every)

  def __call__(self, step: int, params: Params) -> None:
    """Writes what is due at `step`; everything is due before the first and after the last.

    Raises:
      Diverged: the probe or a validation loss is not finite.
    """
    always = step in (0, self._experiment.steps)
    if always or _due(step, self._experiment.probe.every):
      self._write('probe', step, self._probe(step, params))
    if always or _due(step, self._experiment.validation.every):
      losses = {key: self._loss(params, batches) for key, batches in self._sets.items()}
      for key, loss in losses.items():
        if not math.isfinite(loss):
          raise Diverged(step, loss, f'the validation loss {key!r} is {loss:g}.')
      self._write('valid', step, losses)

  def _write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    assert self._metrics is not None, 'an evaluation without metrics is only compiled'
    self._metrics.write(kind, step, values)

  def _probe(self, step: int, params: Params) -> dict[str, Any]:
    settings = self._experiment.probe
    run = Run(self._model, params, self._name, step)
    try:
      report = probe(run, self._probe_tokens, dtype=settings.dtype)
    except NotFinite as error:  # of parameters that are finite, and huge
      raise Diverged(step, math.nan, str(error)) from error
    summary = report.summary(settings.epsilon)
    self.sink_1 = f'{summary["sink_1"]:.1f}%'
    return summary

  def _loss(self, params: Params, batches: Sequence[Batch]) -> float:
    totals = []
    for batch in batches:
      totals.append(self._validation_step(params, self._global_batches.make_global_batch(batch)))
      jax.block_until_ready(totals[-2:-1])  # so that the device holds two batches at most
    return float(sum(t[0] for t in totals) / sum(t[1] for t in totals))


@jax.jit
def _all_finite(state: TrainState) -> jax.Array:
  """Whether all floating-point numbers of a state are finite."""
  return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(state)]))


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


def _warn_once(remark: str) -> None:
  """Logs what concerns the whole job, in one of its processes."""
  if is_first():
    _log.warning(remark)
