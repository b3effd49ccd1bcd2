"""A training step on a slice: what to compile, and what the compiled program says."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.data.batches import Batch
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.plan import compiler, links, program, roofline
from sink_jax.plan.chips import Slice
from sink_jax.train.optimizer import OptimizerConfig, make_optimizer
from sink_jax.train.sharding import batch_sharding, make_mesh, mesh_sizes
from sink_jax.train.step import make_train_step, state_layout

AXES = ('data', 'fsdp', 'tensor')


@dataclasses.dataclass(frozen=True)
class Job:
  """One training step of a run.

  mesh: sizes of (data, fsdp, tensor), no -1. steps: of the run, which its learning rate knows.
  """

  name: str
  where: Slice
  model: ModelConfig
  optimizer: OptimizerConfig
  steps: int
  context: int
  batch_size: int
  microbatches: int
  mesh: tuple[int, int, int]

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


def plan(job: Job, share: float = roofline.SHARE, compute: float | None = None,
         keep_text=lambda text: None) -> dict[str, Any]:
  """Compiles the step and counts; everything in bytes, FLOPs and seconds, ready for JSON.

  Args:
    share: of the peak that matrix products reach.
    compute: seconds that the computation of a device was measured to take, in its place.
    keep_text: is called with the text of the compiled program.

  Raises:
    CompilerMissing: see `compiler`.
    ValueError: the model does not fit the mesh, or the compiler has no such topology.
  """
  devices = compiler.topology_devices(job.where.compiler_name)
  mesh = make_mesh(*job.mesh, devices=devices)
  result = _described(job)
  began = time.monotonic()
  lowered, arguments = _lowered(job, mesh)
  try:
    compiled = compiler.compile_lowered(lowered)
  except compiler.OutOfMemory as error:
    needed = error.bytes_with(arguments)
    return result | {
        'fits': False, 'compile_seconds': time.monotonic() - began,
        'memory': {'arguments': arguments, 'temporaries': needed - arguments, 'total': needed}}
  text = compiled.as_text()
  keep_text(text)
  counted = program.read(text)
  memory = compiler.memory(compiled)
  result |= {
      'compile_seconds': time.monotonic() - began,
      'memory': memory._asdict() | {
          'outputs': memory.total - memory.arguments - memory.temporaries},
      'fits': memory.total <= job.where.chip.usable}
  return result | _counted(job, mesh, counted, compiled, share, compute)


def _described(job):
  chip = job.where.chip
  return {
      'name': job.name, 'topology': job.where.name, 'devices': job.where.devices,
      'mesh': dict(zip(AXES, job.mesh)), 'batch_size': job.batch_size,
      'microbatches': job.microbatches, 'context': job.context, 'remat': job.model.remat,
      'vocab': job.model.vocab_size, 'parameters': parameter_count(job.model),
      'tokens': job.tokens, 'usable': chip.usable, 'capacity': chip.memory,
      'model_flops': job.tokens * flops_per_token(job.model, job.context) / job.where.devices}


def _lowered(job, mesh):
  """And the bytes of its arguments on a device."""
  optimizer = make_optimizer(job.optimizer, job.steps)
  one = lambda dtype: jax.ShapeDtypeStruct((job.batch_size, job.context), dtype,
                                           sharding=batch_sharding(mesh))
  arguments = (state_layout(job.model, optimizer, mesh),
               Batch(one(jnp.int32), one(jnp.int32), one(jnp.float32)))
  step = make_train_step(job.model, optimizer, mesh, job.microbatches)
  bytes_ = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
               for x in jax.tree.leaves(arguments))
  return step.lower(*arguments), bytes_


def _counted(job, mesh, counted, compiled, share, compute):
  traffic: dict[tuple, dict[str, Any]] = {}
  for one in counted.collectives:
    if len(one.group) < 2:
      continue
    key = one.kind, links.axes_of(one, mesh), len(one.group), one.overlapped
    row = traffic.setdefault(key, dict(
        zip(('kind', 'axes', 'group', 'overlapped'), key), count=0, payload=0.0, moved=0.0,
        seconds=0.0))
    row['count'] += one.count
    row['payload'] += one.count * one.payload
    row['moved'] += one.count * one.moved
    row['seconds'] += links.seconds(one, mesh, job.where)
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
