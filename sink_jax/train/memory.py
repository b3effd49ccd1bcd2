"""The memory of a device: what a compiled program needs, and whether a training step fits."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

REMEDY = (
  'a smaller batch_size or more microbatches, model.remat=blocks, mesh.fsdp over several devices.'
)


class Memory(NamedTuple):
  """Bytes that a program needs on one device.

  outputs: results that do not take the place of a donated argument.
  """

  arguments: int
  temporaries: int
  outputs: int

  @property
  def total(self) -> int:
    """The sum, which has to fit, except for the program's code."""
    return sum(self)


def memory(compiled: jax.stages.Compiled) -> Memory:
  """The memory of a device that a compiled program needs."""
  m = compiled.memory_analysis()
  assert m is not None, 'compilers for TPUs, GPUs and CPUs have one'
  # An output that takes the place of a donated argument is in both sizes; the training step donates
  # its state, which would otherwise count twice.
  return Memory(
    m.argument_size_in_bytes, m.temp_size_in_bytes, m.output_size_in_bytes - m.alias_size_in_bytes
  )


def device_memory() -> int | None:
  """The bytes that JAX may use on a device of this process; None for a CPU, which does not tell."""
  return (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')


class DoesNotFit(ValueError):
  """The compiled step needs more memory than a device has, in all processes of a job."""


def check_fits(needed: Memory, limit: int, microbatches: int, sequences: int) -> str:
  """Says how much of a device's memory the training step takes.

  Args:
    limit: bytes that JAX may use on a device.
    microbatches: of the step that was compiled. sequences: of a batch on one device, which bounds
      their number.

  Raises:
    DoesNotFit: names the micro-batches with which it may fit.
  """
  gib = lambda size: f'{size / 2**30:.1f}'
  note = f'the training step needs {gib(needed.total)} of the {gib(limit)} GiB of a device'
  if needed.total <= limit:
    return note
  fixed = needed.arguments + needed.outputs
  number = fitting_microbatches(needed, limit, microbatches, sequences)
  if number is not None:
    remedy = f'--config.microbatches={number} takes the place of {microbatches}'
  elif fixed >= limit:
    remedy = f'the state takes {gib(fixed)}: mesh.fsdp over several devices, or more of them'
  else:
    remedy = REMEDY
  raise DoesNotFit(f'{note}, which is too much: {remedy}')


def fitting_microbatches(
  needed: Memory, limit: int, microbatches: int, sequences: int
) -> int | None:
  """The fewest micro-batches with which a step fits, if activations shrink with their size.

  The arguments are those of `check_fits`. None if not even single sequences fit.
  """
  room = limit - needed.arguments - needed.outputs
  if room <= 0:
    return None
  least = microbatches * math.ceil(needed.temporaries / room)
  return next((n for n in range(least, sequences + 1) if sequences % n == 0), None)
