"""A run on a slice: what to compile, and what the compiled programs say."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.evaluate.probe import probed
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import record
from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.plan import compiler, hlo_cost, interconnect, roofline
from sink_jax.plan.chips import SHARE, Slice
from sink_jax.train.defaults import DeviceLoad, with_defaults
from sink_jax.train.experiment import ProbeConfig
from sink_jax.train.optimizer import OptimizerConfig, peak_rates
from sink_jax.train.sharding import make_mesh, mesh_sizes, replicated
from sink_jax.train.step import batch_layout, make_train_step, make_validation_step, state_layout

AXES = ('data', 'fsdp', 'tensor')


@dataclasses.dataclass(frozen=True)
class Job:
  """What a run computes on a slice.

  mesh: sizes of (data, fsdp, tensor), no -1. loss_logits: see `cross_entropy`.
  """

  name: str
  where: Slice
  model: ModelConfig
  optimizer: OptimizerConfig
  context: int
  batch_size: int
  microbatches: int
  mesh: tuple[int, int, int]
  probe: ProbeConfig = ProbeConfig()
  loss_logits: int | None = None
  gradient_reduction: str = 'step'

  def __post_init__(self):
    mesh_sizes(*self.mesh, self.where.devices)
    rows = self.mesh[0] * self.mesh[1]
    if self.batch_size % self.microbatches:
      raise ValueError(f'--microbatches={self.microbatches} must divide --batch_size='
                       f'{self.batch_size}.')
    part = self.batch_size // self.microbatches
    if part % rows:
      fitting = [n for n in range(self.microbatches, 0, -1)
                 if self.batch_size % (n * rows) == 0]
      choices = ([f'--microbatches={fitting[0]}'] if fitting else []) + [
          f'--batch_size={max(1, round(part / rows)) * rows * self.microbatches}']
      raise ValueError(
          f'--data={self.mesh[0]} --fsdp={self.mesh[1]} do not divide a micro-batch of {part} '
          f'sequences among their {rows} groups of devices: use {" or ".join(choices)}.')

  @property
  def tokens(self) -> int:
    return self.batch_size * self.context

  def with_remat(self, remat: str | None, unroll: int | None = None) -> Job:
    """The same with these values, or with those that a run chooses where they are empty."""
    data, fsdp, tensor = self.mesh
    tokens = self.tokens / (self.microbatches * data * fsdp)
    share = DeviceLoad('tpu', self.where.chip.usable, tokens, fsdp * tensor, tensor, self.microbatches,
                  self.loss_logits)
    return dataclasses.replace(self, model=with_defaults(self.model, share, remat, unroll))


def plan(job: Job, share: float = SHARE, compute: float | None = None,
         keep_text=lambda text: None) -> dict[str, Any]:
  """Compiles training, validation and the probe, and counts what a training step does.

  Everything in bytes, FLOPs and seconds, ready for JSON. 'memory' is that of the training step,
  'peaks' what a device holds during each of the three: validation and the probe leave the
  state of the optimizer where it is. What follows a program that does not fit is not compiled.

  Args:
    share: of the peak that matrix products reach.
    compute: seconds that the computation of a device was measured to take, in its place.
    keep_text: is called with the text of the compiled training step.

  Raises:
    CompilerMissing: see `compiler`.
    ValueError: the model does not fit the mesh, or the compiler has no such topology.
  """
  devices = compiler.topology_devices(job.where.compiler_name)
  mesh = make_mesh(*job.mesh, devices=devices)
  with mesh_context(mesh):
    attention = training_implementation(job.model, job.context)
  result = _described(job) | {'attention': attention}
  began = time.monotonic()
  state = state_layout(job.model, job.optimizer, mesh)
  compiled, memory = _compiled(*_training(job, mesh, state))
  result |= {'memory': memory, 'peaks': {'training': memory['total']},
             'fits': memory['total'] <= job.where.chip.usable,
             'compile_seconds': time.monotonic() - began}
  if compiled is None:
    return result
  text = compiled.as_text()
  keep_text(text)
  result |= _counted(job, mesh, hlo_cost.read(text), compiled, share, compute)
  beside = _bytes(state) - _bytes(state.params)
  for name, lower in (('validation', _validation), ('probe', _probe)):
    if result['fits']:
      _, memory = _compiled(*lower(job, mesh, state.params))
      result['peaks'][name] = memory['total'] + beside
      result['fits'] = result['peaks'][name] <= job.where.chip.usable
  return result | {'compile_seconds': time.monotonic() - began}


def _described(job):
  chip = job.where.chip
  return {
      'name': job.name, 'topology': job.where.name, 'devices': job.where.devices,
      'mesh': dict(zip(AXES, job.mesh)), 'batch_size': job.batch_size,
      'microbatches': job.microbatches, 'context': job.context, 'remat': job.model.remat,
      'unroll': job.model.unroll,
      'vocab': job.model.vocab_size, 'parameters': parameter_count(job.model),
      'tokens': job.tokens, 'usable': chip.usable, 'capacity': chip.memory,
      'model_flops': job.tokens * flops_per_token(job.model, job.context) / job.where.devices}


def _training(job, mesh, state):
  """The lowered program, and the bytes of its arguments on a device."""
  batch = batch_layout(job.model, job.batch_size, job.context, mesh)
  step = make_train_step(job.model, job.optimizer, mesh, job.microbatches,
                         loss_logits=job.loss_logits, gradient_reduction=job.gradient_reduction)
  return step.lower(state, batch, peak_rates(job.optimizer)), _bytes((state, batch))


def _validation(job, mesh, params):
  batch = batch_layout(job.model, job.batch_size // job.microbatches, job.context, mesh)
  step = make_validation_step(job.model, mesh, loss_logits=job.loss_logits)
  return step.lower(params, batch), _bytes((params, batch))


def _probe(job, mesh, params):
  tokens = jax.ShapeDtypeStruct((job.probe.sequences, job.probe.length), jnp.int32,
                                sharding=replicated(mesh))
  return (record.lower(probed(job.model, job.probe.dtype), RecordOptions(), mesh, params, tokens),
          _bytes((params, tokens)))


def _compiled(lowered, arguments):
  """The compiled program, None where it does not fit, and its memory on a device in bytes."""
  try:
    compiled = compiler.compile_lowered(lowered)
  except compiler.OutOfMemory as error:
    needed = error.bytes_with(arguments)
    return None, {'arguments': arguments, 'temporaries': needed - arguments, 'total': needed}
  memory = compiler.memory(compiled)
  return compiled, memory._asdict() | {
      'outputs': memory.total - memory.arguments - memory.temporaries}


def _bytes(layout):
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(layout))


def _counted(job, mesh, counted, compiled, share, compute):
  traffic: dict[tuple, dict[str, Any]] = {}
  for one in counted.collectives:
    if len(one.group) < 2:
      continue
    key = one.kind, interconnect.axes_of(one, mesh), len(one.group), one.overlapped
    row = traffic.setdefault(key, dict(
        zip(('kind', 'axes', 'group', 'overlapped'), key), count=0, payload=0.0, moved=0.0,
        seconds=0.0))
    row['count'] += one.count
    row['payload'] += one.count * one.payload
    row['moved'] += one.count * one.moved
    row['seconds'] += interconnect.seconds(one, mesh, job.where)
  rows = sorted(traffic.values(), key=lambda row: -row['seconds'])
  kernels = roofline.kernel_flops(
      job.model, job.context, job.tokens / job.where.devices, counted.kernels, job.microbatches)
  flops = counted.products + kernels
  line = roofline.make(flops, counted.bytes,
                       sum(row['seconds'] for row in rows if row['overlapped']),
                       sum(row['seconds'] for row in rows if not row['overlapped']),
                       job.where.chip, share, compute)
  told = compiled.cost_analysis()
  told = told[0] if isinstance(told, list) else told
  return {
      'flops': flops, 'kernel_flops': kernels, 'bytes': counted.bytes,
      'compiler_flops': told.get('flops'), 'compiler_bytes': told.get('bytes accessed'),
      'unknown_loops': counted.unknown, 'collectives': rows,
      'share': share if compute is None else None,
      'seconds': dataclasses.asdict(line) | {
          'step': line.step, 'floor': line.floor, 'bound': line.bound},
      'tokens_per_second': job.tokens / line.step,
      'mfu': roofline.mfu(job.model, job.context, job.tokens, job.where.devices, job.where.chip,
                          line.step)}
