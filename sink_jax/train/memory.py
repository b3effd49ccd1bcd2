"""The memory of a device: what a compiled program needs, and whether a training step fits."""

from __future__ import annotations

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


def memory_note(needed: int, limit: int) -> str:
  """Compares the bytes that a training step needs with those of a device, and names what helps."""
  note = f'the training step needs {needed / 2**30:.1f} of the {limit / 2**30:.1f} GiB of a device'
  return note if needed <= limit else f'{note}; if it fails, these help: {REMEDY}'
