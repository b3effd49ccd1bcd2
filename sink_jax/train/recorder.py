"""What a run leaves in its workdir while it trains: metrics, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sink_jax.data.cache_check import DamagedCache
from sink_jax.evaluate.finite import NotFinite
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run
from sink_jax.train import run_dir as runs
from sink_jax.train.checkpoint import Checkpoints
from sink_jax.train.experiment import Experiment
from sink_jax.train.global_batch import GlobalBatches
from sink_jax.train.metrics_log import MetricsWriter
from sink_jax.train.multihost import broadcast_from_process0, is_first, on_all_processes
from sink_jax.train.outcome import Diverged, recorded
from sink_jax.train.probe_tokens import write_probe_tokens
from sink_jax.train.run_tokenizer import write_tokenizer
from sink_jax.train.step import init_state, make_validation_step, state_layout

_log = logging.getLogger('sink_jax')


@contextlib.contextmanager
def held(job, workdir, name: str, check_files: Callable[[], Callable[[], None]]):
  """Holds a workdir for one run and yields its Recorder.

  All processes of a job call it, with what `loop.prepared` returned.

  Args:
    check_files: as `Dataset.check_files`.

  Raises:
    ValueError: as `workdir.claimed` does.
  """
  with runs.locked(workdir, job.config, job.data_summary) as claim:
    for line in job.data.remarks():
      _tell(line)
    intact = check_files()  # in a thread, while the step is compiled and first steps run
    claim.digests['probe_tokens.npy'] = {
        'sha256': write_probe_tokens(workdir, job.probe_tokens)}
    write_tokenizer(workdir, job.encoder)
    yield Recorder(job, claim, intact, name)


class Recorder:
  """Writes down a run: everything that its steps leave in the workdir.

  Between `restored` and `recording` the workdir keeps what it says.
  start: the step of the newest checkpoint, 0 without one; known once the state is `restored`.
  sink_1: that of the last probe, as text.
  """

  def __init__(self, job, claim, intact, name):
    self.name, self.start, self.sink_1 = name, 0, 'n/a'
    self._job, self._claim, self._intact = job, claim, intact
    self._experiment = job.experiment
    self._checkpoints = Checkpoints(claim.workdir, job.experiment.checkpoints_kept)

  def restored(self):
    """The newest saved state, or a fresh one."""
    model, optimizer, mesh = self._job.model, self._experiment.optimizer, self._job.mesh
    state = self._checkpoints.restore(state_layout(model, optimizer, mesh))
    for line in self._checkpoints.damaged:
      _tell(line)
    if state is None:
      state = init_state(model, optimizer, self._experiment.seed, mesh)
    self.start = int(state.step)
    return state

  def has_finished(self) -> bool:
    """Whether nothing is left to do; its record stays: when, where and by what it was trained."""
    workdir, step = self._claim.workdir, self.start
    if step != self._experiment.steps or not broadcast_from_process0(
        lambda: runs.read_status(workdir)['status'] == 'done'):
      return False
    self._checkpoints.close()
    if line := broadcast_from_process0(lambda: runs.settle_finished(workdir, step)):
      _tell(line)
    return True

  @contextlib.contextmanager
  def recording(self, width: int = 1):
    """Opens the metrics; whatever ends this, the status says how the run ended.

    width: slots of the group that the run is trained in.
    """
    experiment, workdir = self._experiment, self._claim.workdir
    if self.start:
      _tell(f'resuming from step {self.start} of {experiment.steps}')
    with contextlib.closing(MetricsWriter(workdir, self.start)) as self._metrics:
      if self._metrics.line:
        _tell(self._metrics.line)
      self._evaluation = Evaluation(
          experiment, self._job.model, self._job.data, self._job.mesh, self._job.probe_tokens,
          self.name, self._metrics)
      with recorded(workdir, self._checkpoints, self.start, experiment.steps,
                    self._metrics.whole_from, attention=self._job.attention, width=width):
        yield

  def begin(self, state) -> None:
    """Evaluates the state before the first step."""
    self._evaluate(0, state)

  def due(self, step: int) -> bool:
    """Does anything need the state of this step?"""
    return self._saves(step) or self._evaluation.due(step)

  def logs(self, step: int) -> bool:
    """Are the metrics of this step written?"""
    return step % self._experiment.log_every == 0 or step == self._experiment.steps

  def check(self, step: int, values: dict[str, float]) -> None:
    """Raises Diverged where the metrics of a step are not finite."""
    if not all(map(math.isfinite, values.values())):
      raise Diverged(step, values['loss'])

  def log(self, step: int, values: dict[str, float], learning_rate: float, speed: dict) -> None:
    """Writes the metrics of a step; speed: those of `Throughput.read`."""
    self._metrics.write('train', step, {**values, 'learning_rate': learning_rate, **speed})

  def poll(self) -> None:
    """Completes a save that has been committed; cheap, to be called often."""
    self._checkpoints.poll()

  def settle(self, step: int, state, loss, saving: bool = False) -> None:
    """Evaluates and saves the state after a step, as far as that is due.

    loss: of that step. saving: saves the state in any case; it may be donated afterwards.

    Raises:
      Diverged: the state is not finite. Busy: another job has taken the workdir over.
      DamagedCache: the files of the data are damaged. CheckpointError: as `Checkpoints.save`.
    """
    if not _all_finite(state):  # before the probe, which refuses such parameters
      raise Diverged(step, loss)
    self._evaluate(step, state)
    if not (saving or self._saves(step)):
      return
    try:
      self._claim.check()
    except runs.WorkdirLocked:
      self._metrics.abandon()
      raise
    _all_intact(self._intact)
    self._metrics.flush()
    self._checkpoints.save(
        step, state, self._claim.digests | {'metrics.jsonl': self._metrics.record()})

  def _evaluate(self, step, state):
    self._evaluation(step, state.params)
    self.sink_1 = self._evaluation.sink_1

  def _saves(self, step):
    return step == self._experiment.steps or _due(step, self._experiment.checkpoint_every)


class Evaluation:
  """The sink probe and the validation loss, each at its steps and after the last one."""

  def __init__(self, experiment: Experiment, model, data, mesh, probe_tokens, name, metrics=None):
    self._experiment, self._model = experiment, model
    self._probe_tokens, self._name, self._metrics = probe_tokens, name, metrics
    self._validation_step = make_validation_step(model, mesh,
                                                 loss_logits=experiment.loss_logits)
    # As many sequences at a time as a training step has: the memory of a device is its bound.
    size = experiment.microbatch_size
    self._feed = GlobalBatches(mesh, size)
    self._sets = data.validation(
        size, experiment.validation.batches * experiment.microbatches, self._feed.rows)
    self.sink_1 = 'n/a'

  def compile(self, params) -> None:
    """Compiles what a call needs, by running each of it once; writes nothing."""
    probe(Run(self._model, params), self._probe_tokens, dtype=self._experiment.probe.dtype)
    first = next(iter(self._sets.values()))[0]
    jax.block_until_ready(self._validation_step(params, self._feed.put(first)))

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


@jax.jit
def _all_finite(state):
  """Are all floating-point numbers of a state finite?"""
  return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(state)]))


def _all_intact(intact):
  """Raises DamagedCache in all processes where the data of one is damaged."""
  try:
    on_all_processes(intact)
  except ValueError as error:
    raise DamagedCache(str(error)) from None


def _due(step, every):
  return every > 0 and step % every == 0


def _tell(line):
  """Of what concerns the job, one process tells."""
  if is_first():
    _log.warning(line)
