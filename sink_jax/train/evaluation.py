"""The sink probe and the validation loss of a run while it trains."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import jax
import numpy as np
from jax.sharding import Mesh

from sink_jax.data.batches import read_ahead
from sink_jax.data.dataset import Dataset
from sink_jax.evaluate.activations import NotFinite
from sink_jax.evaluate.explored import keep
from sink_jax.evaluate.probe import probe
from sink_jax.io.paths import AnyPath
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import GraftReport
from sink_jax.models.run import Run
from sink_jax.models.sharding import GlobalBatches
from sink_jax.train.config import Experiment, as_dict
from sink_jax.train.metrics import Metrics
from sink_jax.train.step import Params, make_validation_step


class Diverged(RuntimeError):
  """The loss, gradient or state of a step is not finite, or a result of its model is not.

  step, loss: of that step.
  """

  def __init__(self, step: int, loss: SupportsFloat, reason: str = ''):
    """reason: a sentence instead of the one about the loss, or ''."""
    self.step, self.loss = step, float(loss)
    reason = reason or (
      f'its loss is {self.loss:g}, and the loss, the gradient or the parameters '
      'after it are not finite.'
    )
    super().__init__(
      f'Step {step} diverged: {reason} status.json names the last good checkpoint. A lower '
      'optimizer.learning_rate or a lower optimizer.clip may help.'
    )


class Evaluation:
  """The sink probe and the validation loss, each at its steps, before the first and after the last.

  A context that closes the files of the metrics.
  metrics: the writer of all rows. last: {'sink_1' and 'sink_bias_slot' (Sink_*): percent of heads,
  'valid': nats}, the newest value of each.
  """

  def __init__(
    self,
    experiment: Experiment,
    model: ModelConfig,
    mesh: Mesh,
    data: Dataset,
    probe_tokens: np.ndarray,
    workdir: AnyPath,
  ):
    self._experiment, self._model = experiment, model
    config = as_dict(experiment) if experiment.wandb else None
    self.metrics = Metrics(workdir, experiment.wandb, config)
    self._workdir, self._probe_tokens, self.last = workdir, probe_tokens, {}
    self._validation_step = make_validation_step(model, mesh, loss_logits=experiment.loss_logits)
    # As many sequences at a time as in a training step, which fit the memory of a device.
    size, count = experiment.microbatch_size, experiment.validation.batches
    self._global_batches = GlobalBatches(mesh, size)
    self._sets = data.validation(size, count * experiment.microbatches, self._global_batches.rows)

  def __enter__(self) -> Evaluation:
    return self

  def __exit__(self, *error: object) -> None:
    self.metrics.close()

  def begin(self, step: int, graft: GraftReport | None = None) -> None:
    """Opens the files of a run that goes on from a step; graft: with which it began."""
    self.metrics.resume(step)
    if graft is not None:
      self.metrics.write('graft', step, dataclasses.asdict(graft))

  def due(self, step: int) -> list[str]:
    """Which of 'probe' and 'valid' are due at a step."""
    always = step in (0, self._experiment.steps)
    every = {'probe': self._experiment.probe.every, 'valid': self._experiment.validation.every}
    return [kind for kind, n in every.items() if always or n and step % n == 0]

  def __call__(
    self,
    step: int,
    params: Params,
    there: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Measures and writes what is due at a step, except for the rows in `there`, written already.

    Args:
      there: {kind: row}.
      stop: asked after every batch of the validation; all processes get the same answer.

    Returns:
      False if it was asked to stop before all was measured.

    Raises:
      Diverged: the probe or a validation loss is not finite.
    """
    for kind in self.due(step):
      values = (there or {}).get(kind)
      if values is None:
        values = self._probe(step, params) if kind == 'probe' else self._losses(step, params, stop)
        if values is None:
          return False
        self.metrics.write(kind, step, values)
      self.last |= {
        key: values[key]
        for key in ('sink_1', 'sink_bias_slot', 'valid')
        if values.get(key) is not None
      }
    return True

  def _probe(self, step: int, params: Params) -> dict[str, Any]:
    settings, run = self._experiment.probe, Run(self._model, params, '', step)
    try:
      report = probe(run, self._probe_tokens, dtype=settings.dtype)
    except NotFinite as error:  # the parameters are finite, but huge
      raise Diverged(step, math.nan, str(error)) from error
    if step in self._steps_with_maps:
      keep(self._workdir / 'maps', step, run, report, self._probe_tokens[:1])
    return report.summary(settings.epsilon)

  @functools.cached_property
  def _steps_with_maps(self) -> list[int]:
    """The steps whose probe keeps maps: the first, the last, and others at even distances."""
    probes = [step for step in range(self._experiment.steps + 1) if 'probe' in self.due(step)]
    chosen = np.linspace(0, len(probes) - 1, self._experiment.probe.maps).round().astype(int)
    return [probes[n] for n in chosen]

  def _losses(self, step: int, params: Params, stop: Callable[[], bool]) -> dict[str, float] | None:
    losses = {}
    for key, batches in self._sets.items():
      totals = []
      for batch in map(self._global_batches.make_global_batch, read_ahead(batches)):
        totals.append(self._validation_step(params, batch))
        jax.block_until_ready(totals[-2:-1])  # so that the device holds two batches at most
        if stop():
          return None
      weight = float(sum(t[1] for t in totals))
      if not weight:  # a set in which no token counts
        continue
      losses[key] = float(sum(t[0] for t in totals)) / weight
      if not math.isfinite(losses[key]):
        raise Diverged(step, losses[key], f'the validation loss {key!r} is {losses[key]:g}.')
    return losses
