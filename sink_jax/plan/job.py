"""A run on a slice: which programs are compiled for it, and the plan that is made of them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sink_jax.evaluate.probe import PROBE_OPTIONS, probed
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import record
from sink_jax.models.sizes import flops_per_token, parameter_count, parameter_shapes
from sink_jax.plan import compiler, hlo_cost, interconnect, roofline
from sink_jax.plan.chips import SHARE, Slice
from sink_jax.plan.compiler import Memory
from sink_jax.plan.records import Plan, StepCost, Traffic
from sink_jax.train.defaults import DeviceLoad, with_defaults
from sink_jax.train.config import ProbeConfig
from sink_jax.train.optimizer import OptimizerConfig, kept_arrays, peak_rates
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
      # The most micro-batches, up to those that were given, with which the batch divides; else the
      # nearest batch that divides with the given number.
      fitting = [n for n in range(self.microbatches, 0, -1)
                 if self.batch_size % (n * rows) == 0]
      choices = ([f'--microbatches={fitting[0]}'] if fitting else []) + [
          f'--batch_size={max(1, round(part / rows)) * rows * self.microbatches}']
      raise ValueError(
          f'--data={self.mesh[0]} --fsdp={self.mesh[1]} do not divide a micro-batch of {part} '
          f'sequences among their {rows} groups of devices: use {" or ".join(choices)}.')

  @property
  def tokens(self) -> int:
    """Tokens of a training step."""
    return self.batch_size * self.context

  def with_remat(self, remat: str | None, unroll: int | None = None) -> Job:
    """The same job with these values, or with those that a run chooses where they are None."""
    data, fsdp, tensor = self.mesh
    tokens = self.tokens / (self.microbatches * data * fsdp)
    # The defaults depend on what a device holds: tokens of its own micro-batch, and its part of a
    # state that 'fsdp' and 'tensor' split and 'data' repeats.
    load = DeviceLoad('tpu', self.where.chip.usable, tokens, fsdp * tensor, tensor,
                      self.microbatches, self.loss_logits,
                      kept_arrays(self.optimizer, parameter_shapes(self.model)))
    return dataclasses.replace(self, model=with_defaults(self.model, load, remat, unroll))


def plan(job: Job, share: float = SHARE, compute: float | None = None,
         keep_text: Callable[[str], None] = lambda text: None) -> Plan:
  """Compiles training, validation and the probe, and counts what a training step does.

  What follows a program that does not fit is not compiled.

  Args:
    share: of the peak that matrix products reach.
    compute: seconds that the computation of a device was measured to take, in place of share.
    keep_text: is called with the text of the compiled training step.

  Raises:
    CompilerMissing: see `compiler`.
    ValueError: the model does not fit the mesh, or the compiler has no such topology.
  """
  devices = compiler.topology_devices(job.where.compiler_name)
  mesh = make_mesh(*job.mesh, devices=devices)
  # Chosen for the devices that are planned for, not for those of this machine.
  with mesh_context(mesh):
    attention = training_implementation(job.model, job.context)
  began = time.monotonic()
  state = state_layout(job.model, job.optimizer, mesh)
  compiled, memory = _compile(*_training(job, mesh, state))
  peaks, cost = {'training': memory.total}, None
  if compiled is not None:
    text = compiled.as_text()
    assert text is not None, 'a program that was compiled here has its text'
    keep_text(text)
    cost = _cost(job, mesh, hlo_cost.read(text), compiled, share, compute)
    # Validation and the probe need the parameters alone, but the state of the optimizer stays.
    moments = _bytes(state) - _bytes(state.params)
    for name, lower in (('validation', _validation), ('probe', _probe)):
      # A run needs the most that any of the three needs: once one does not fit, compiling the
      # others cannot change the answer.
      if max(peaks.values()) <= job.where.chip.usable:
        peaks[name] = _compile(*lower(job, mesh, state.params))[1].total + moments
  chip = job.where.chip
  return Plan(
      name=job.name, topology=job.where.name, devices=job.where.devices,
      mesh=dict(zip(AXES, job.mesh)), batch_size=job.batch_size, microbatches=job.microbatches,
      context=job.context, remat=job.model.remat, unroll=job.model.unroll,
      vocab=job.model.vocab_size, parameters=parameter_count(job.model), tokens=job.tokens,
      usable=chip.usable, capacity=chip.memory,
      model_flops=job.tokens * flops_per_token(job.model, job.context) / job.where.devices,
      attention=attention, memory=memory, peaks=peaks,
      compile_seconds=time.monotonic() - began, cost=cost)


def _training(job, mesh, state):
  """The lowered program, and the bytes of its arguments on a device."""
  batch = batch_layout(job.model, job.batch_size, job.context, mesh)
  step = make_train_step(job.model, job.optimizer, mesh, job.microbatches,
                         loss_logits=job.loss_logits, gradient_reduction=job.gradient_reduction)
  return step.lower(state, batch, peak_rates(job.optimizer)), _bytes((state, batch))


def _validation(job, mesh, params):
  # Validation runs on as many sequences at a time as a micro-batch has.
  batch = batch_layout(job.model, job.batch_size // job.microbatches, job.context, mesh)
  step = make_validation_step(job.model, mesh, loss_logits=job.loss_logits)
  return step.lower(params, batch), _bytes((params, batch))


def _probe(job, mesh, params):
  # All sequences of the probe at once, as a run records them.
  tokens = jax.ShapeDtypeStruct((job.probe.sequences, job.probe.length), jnp.int32,
                                sharding=replicated(mesh))
  return (record.lower(probed(job.model, job.probe.dtype), PROBE_OPTIONS, mesh, params, tokens),
          _bytes((params, tokens)))


def _compile(lowered: jax.stages.Lowered,
             arguments: float) -> tuple[jax.stages.Compiled | None, Memory]:
  """The compiled program, None where it does not fit, and its memory on a device.

  arguments: bytes of them on a device, which the compiler does not name when it refuses.
  """
  try:
    compiled = compiler.compile_lowered(lowered)
  except compiler.OutOfMemory as error:
    needed = error.bytes_with(arguments)
    # The outputs are not known and count as nothing: those of the training step take the place of
    # its donated state.
    return None, Memory(arguments, needed - arguments, needed)
  return compiled, compiler.memory(compiled)


def _bytes(layout: Any) -> int:
  """Bytes on one device of a tree of shapes with shardings."""
  # Replicated leaves count whole, split ones by the part that a device holds.
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(layout))


def _traffic(job: Job, mesh: Mesh, collectives: Iterable[hlo_cost.Collective]) -> list[Traffic]:
  """The collectives of a step, alike ones added up, the slowest first."""
  total: dict[tuple[str, str, int, bool], Traffic] = {}
  for collective in collectives:
    if len(collective.group) < 2:
      continue
    key = (collective.kind, interconnect.axes_of(collective, mesh), len(collective.group),
           collective.overlapped)
    before = total.get(key, Traffic(*key, count=0, payload=0.0, moved=0.0, seconds=0.0))
    total[key] = dataclasses.replace(
        before, count=before.count + collective.count,
        payload=before.payload + collective.count * collective.payload,
        moved=before.moved + collective.count * collective.moved,
        seconds=before.seconds + interconnect.seconds(collective, mesh, job.where))
  return sorted(total.values(), key=lambda row: -row.seconds)


def _cost(job: Job, mesh: Mesh, counted: hlo_cost.HloCost, compiled: jax.stages.Compiled,
          share: float, compute: float | None) -> StepCost:
  rows = _traffic(job, mesh, counted.collectives)
  kernels = roofline.kernel_flops(job.model, job.context, job.tokens / job.where.devices,
                                  counted.kernel_calls, job.microbatches)
  # The text has every product but those inside of kernels.
  flops = counted.matmul_flops + kernels
  seconds = roofline.make(flops, counted.bytes,
                          sum(row.seconds for row in rows if row.overlapped),
                          sum(row.seconds for row in rows if not row.overlapped),
                          job.where.chip, share, compute)
  analysis: Any = compiled.cost_analysis()  # a list of one in some versions of JAX
  analysis = analysis[0] if isinstance(analysis, list) else analysis
  return StepCost(
      flops=flops, kernel_flops=kernels, bytes=counted.bytes,
      compiler_flops=analysis.get('flops'), compiler_bytes=analysis.get('bytes accessed'),
      unknown_loops=counted.unknown_loops, collectives=rows,
      share=share if compute is None else None, roofline=seconds,
      tokens_per_second=job.tokens / seconds.step,
      mfu=roofline.mfu(job.model, job.context, job.tokens, job.where.devices, job.where.chip,
                       seconds.step))
