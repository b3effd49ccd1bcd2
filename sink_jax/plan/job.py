"""A run on slices of TPUs: its programs, compiled for them, and the memory that they need."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.evaluate.probe import PROBE_OPTIONS, probed
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import record
from sink_jax.models.sharding import make_mesh, replicated
from sink_jax.plan import compiler
from sink_jax.plan.chips import Slices
from sink_jax.train.config import Experiment, from_dict, unrolled
from sink_jax.train.memory import Memory, memory
from sink_jax.train.step import batch_layout, make_train_step, make_validation_step, state_layout


@dataclasses.dataclass(frozen=True)
class Plan:
  """The needs of a run on each of its devices.

  mesh: the sizes of 'data', 'fsdp' and 'tensor'. attention: the implementation.
  parameters, optimizer: bytes of the state. step: of the training step, None where it does not fit.
  peaks: bytes of all that a device holds during training, validation and the probe, up to the first
  that does not fit. refused: the compiler's message about that one.
  """

  experiment: Experiment
  where: Slices
  model: ModelConfig
  mesh: Mapping[str, int]
  attention: str
  parameters: int
  optimizer: int
  step: Memory | None
  peaks: Mapping[str, int]
  refused: str = ''

  @property
  def fits(self) -> bool:
    """True if a device has the memory for all three programs."""
    return not self.refused and max(self.peaks.values()) <= self.where.chip.usable

  @property
  def options(self) -> list[str]:
    """The options of the command line that decide whether it fits."""
    values = {'batch_size': self.experiment.batch_size,
              'microbatches': self.experiment.microbatches, 'model.remat': self.model.remat,
              **{f'mesh.{name}': size for name, size in self.mesh.items() if name != 'data'}}
    return [f'--config.{key}={value}' for key, value in values.items()]


def plan(config: Mapping[str, Any], where: Slices) -> Plan:
  """Compiles training, validation and the probe of a config.

  Empty `model.remat` means 'none' here. Programs after one that does not fit are not compiled.

  Raises:
    ValueError: libtpu is missing, or the config does not fit the devices or has no vocabulary.
  """
  experiment = from_dict(config)
  experiment.check_devices(where.devices)
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh),
                   devices=compiler.topology_devices(where.compiler_name, where.count))
  model = unrolled(experiment.model_config(_vocabulary(experiment)), experiment, 'tpu', mesh.shape)
  state = state_layout(model, experiment.optimizer, mesh)
  parameters, optimizer = _bytes(state.params), _bytes(state.opt_state)
  step, peaks, refused = None, {}, ''
  for name, lowered in _programs(experiment, model, mesh, state):
    try:
      needed = memory(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      refused = f'{name}: {" ".join(str(error).split())[:300]}'
      break
    if name == 'training':
      step = needed
    # Validation and the probe read the parameters only, but the state of the optimizer stays.
    peaks[name] = needed.total + (0 if name == 'training' else optimizer)
    if peaks[name] > where.chip.usable:
      break
  with mesh_context(mesh):  # of these devices, not of this machine
    attention = training_implementation(model, experiment.data.context)
  return Plan(experiment, where, model, dict(mesh.shape), attention, parameters, optimizer, step,
              peaks, refused)


def smaller(config: Mapping[str, Any], planned: Plan) -> Iterator[dict[str, Any]]:
  """Configs of the same training that need less memory, from the fastest to the smallest.

  They recompute the blocks in the backward pass, split the state over all of a slice, and then divide the
  batch into more and more micro-batches.
  """
  tensor = planned.mesh['tensor']
  remat = {'model.remat': 'blocks'}
  split = {'mesh.data': -1, 'mesh.fsdp': planned.where.devices // planned.where.count // tensor}
  sequences = planned.experiment.batch_size * tensor // planned.where.devices
  seen = [config]
  for changes in (remat, split, remat | split, *(
      remat | split | {'microbatches': n}
      for n in range(planned.experiment.microbatches + 1, sequences + 1) if sequences % n == 0)):
    other = copy.deepcopy(dict(config))
    for key, value in changes.items():
      section, _, last = key.rpartition('.')
      (other[section] if section else other)[last] = value
    if other not in seen:
      seen.append(other)
      yield other


def _vocabulary(experiment: Experiment) -> int:
  source = getattr(experiment.data.source, 'vocab_size', None)
  if source == 0:
    raise ValueError('the config is of a task without tokens: there is nothing to plan.')
  known = (experiment.model.vocab_size or source
           or getattr(experiment.data.tokenizer, 'vocab_size', None))
  if not known:
    raise ValueError('the tokenizer is not opened for a plan: set --config.model.vocab_size, for '
                     'GPT-NeoX to 50432.')
  return known


def _programs(experiment, model, mesh, state) -> Iterator[tuple[str, jax.stages.Lowered]]:
  """The programs of a run by name, each lowered when the one before has been compiled."""
  logits, context = experiment.loss_logits, experiment.data.context
  step = make_train_step(model, experiment.optimizer, mesh, experiment.microbatches,
                         loss_logits=logits, gradient_dtype=experiment.gradient_dtype)
  yield 'training', step.lower(state, batch_layout(model, experiment.batch_size, context, mesh),
                               experiment.optimizer.learning_rate)
  # Validation runs on as many sequences at a time as a micro-batch has.
  yield 'validation', make_validation_step(model, mesh, loss_logits=logits).lower(
      state.params, batch_layout(model, experiment.microbatch_size, context, mesh))
  probe = experiment.probe
  tokens = jax.ShapeDtypeStruct((probe.sequences, probe.length), jnp.int32,
                                sharding=replicated(mesh))
  yield 'probe', record.lower(probed(model, probe.dtype), PROBE_OPTIONS, mesh, state.params, tokens)


def _bytes(layout: Any) -> int:
  """Bytes on one device of a tree of shapes with shardings."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(layout))
