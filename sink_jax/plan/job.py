"""A run on slices of TPUs: its programs, compiled for them, and the memory that they need."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.evaluate.probe import PROBE_OPTIONS, probed
from sink_jax.io.terminal import say
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import record
from sink_jax.models.sharding import make_mesh, replicated
from sink_jax.plan import compiler
from sink_jax.plan.chips import Slices
from sink_jax.train.config import Experiment, changed, unrolled
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
    values = {
      'batch_size': self.experiment.batch_size,
      'microbatches': self.experiment.microbatches,
      'model.remat': self.model.remat,
      **{f'mesh.{name}': size for name, size in self.mesh.items() if name != 'data'},
    }
    return [f'--config.{key}={value}' for key, value in values.items()]


def plan(experiment: Experiment, where: Slices) -> Plan:
  """Compiles training, validation and the probe of a run.

  Empty `model.remat` means 'none' here. Programs after one that does not fit are not compiled.

  Raises:
    ValueError: libtpu is missing, or the config does not fit the devices or has no vocabulary.
  """
  experiment.check_devices(where.devices)
  gpu = where.chip.is_gpu
  devices = (
    compiler.gpu_devices(where.devices)
    if gpu
    else compiler.topology_devices(where.compiler_name, where.count)
  )
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh), devices=devices)
  _check_vocabulary(experiment)
  model = unrolled(experiment.model_config(), experiment, 'cuda' if gpu else 'tpu', mesh.shape)
  if gpu and not model.implementation:
    # cuDNN compiles its kernels where there is a GPU; both keep as little.
    model = dataclasses.replace(model, implementation='pallas')
  state = state_layout(model, experiment.optimizer, mesh)
  parameters, optimizer = _bytes(state.params), _bytes(state.opt_state)
  with compiler.tracing_for_gpus() if gpu else contextlib.nullcontext():
    programs = _programs(experiment, model, mesh, state)
    step, peaks, refused = _compiled(programs, where, optimizer)
  with mesh_context(mesh):  # of these devices, not of this machine
    attention = training_implementation(model, experiment.data.context)
  return Plan(
    experiment,
    where,
    model,
    dict(mesh.shape),
    attention,
    parameters,
    optimizer,
    step,
    peaks,
    refused,
  )


def _compiled(
  programs: Iterator[tuple[str, jax.stages.Lowered]], where: Slices, optimizer: int
) -> tuple[Memory | None, dict[str, int], str]:
  """`step`, `peaks` and `refused` of a Plan."""
  step, peaks = None, {}
  for name, lowered in programs:
    say(f'compiling {name} for {where.name}: a minute or more')
    try:
      needed = memory(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      return step, peaks, f'{name}: {" ".join(str(error).split())[:300]}'
    if name == 'training':
      step = needed
    # Validation and the probe read the parameters only, but the state of the optimizer stays.
    peaks[name] = needed.total + (0 if name == 'training' else optimizer)
    if peaks[name] > where.chip.usable:
      break
  return step, peaks, ''


def smaller(planned: Plan) -> Iterator[Experiment]:
  """The same training with options that need less memory, from the fastest to the smallest.

  They recompute the blocks in the backward pass, split the state over all of a slice, and then
  divide the batch into more and more micro-batches.
  """
  tensor = planned.mesh['tensor']
  remat = {'model.remat': 'blocks'}
  split = {'mesh.data': -1, 'mesh.fsdp': planned.where.devices // planned.where.count // tensor}
  experiment = planned.experiment
  sequences = experiment.batch_size * tensor // planned.where.devices
  numbers = range(experiment.microbatches + 1, sequences + 1)
  microbatches = [{'microbatches': n} for n in numbers if sequences % n == 0]
  seen = [experiment]
  for changes in (remat, split, *(remat | split | more for more in ({}, *microbatches))):
    other = changed(experiment, changes)
    if other not in seen:
      seen.append(other)
      yield other


def _check_vocabulary(experiment: Experiment) -> None:
  size = experiment.data.sizes.vocab_size
  if size == 0:
    raise ValueError('the config is of a task without tokens: there is nothing to plan.')
  if size is None and not experiment.model.vocab_size:
    raise ValueError(
      'the tokenizer is not opened for a plan: set --config.model.vocab_size, for '
      'GPT-NeoX to 50432.'
    )


def _programs(experiment, model, mesh, state) -> Iterator[tuple[str, jax.stages.Lowered]]:
  """The programs of a run by name, each lowered when the one before has been compiled."""
  logits, context = experiment.loss_logits, experiment.data.context
  step = make_train_step(
    model,
    experiment.optimizer,
    mesh,
    experiment.microbatches,
    loss_logits=logits,
    gradient_dtype=experiment.gradient_dtype,
  )
  yield (
    'training',
    step.lower(
      state,
      batch_layout(model, experiment.batch_size, context, mesh),
      experiment.optimizer.learning_rate,
    ),
  )
  # Validation runs on as many sequences at a time as a micro-batch has.
  yield (
    'validation',
    make_validation_step(model, mesh, loss_logits=logits).lower(
      state.params, batch_layout(model, experiment.microbatch_size, context, mesh)
    ),
  )
  probe = experiment.probe
  tokens = jax.ShapeDtypeStruct(
    (probe.sequences, probe.length), jnp.int32, sharding=replicated(mesh)
  )
  yield 'probe', record.lower(probed(model, probe.dtype), PROBE_OPTIONS, mesh, state.params, tokens)


def _bytes(layout: Any) -> int:
  """Bytes on one device of a tree of shapes with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(layout)
  )
