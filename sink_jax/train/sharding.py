"""Meshes and the rule that lays arrays out on them."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh(data: int = -1, fsdp: int = 1) -> Mesh:
  """A (data, fsdp) mesh over all devices; -1 takes the devices that remain.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  count = jax.device_count()
  sizes = [data, fsdp]
  if sizes.count(-1) == 1:
    sizes[sizes.index(-1)] = count // max(1, -math.prod(sizes))
  if min(sizes) < 1 or math.prod(sizes) != count:
    raise ValueError(f'mesh.data = {data} and mesh.fsdp = {fsdp} do not fit {count} devices: '
                     'their product must be the number of devices (-1: the rest).')
  return jax.make_mesh(sizes, ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Sequences are split over all devices."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def state_shardings(mesh: Mesh, state):
  """Shardings of parameters and optimiser state, from their shapes alone.

  An array is split over 'fsdp' along its largest axis that divides evenly, looking at
  the last two axes (a layer axis stays whole); small and odd arrays are replicated.
  """
  parts = mesh.shape['fsdp']

  def rule(x):
    axes = [a for a in range(max(0, x.ndim - 2), x.ndim) if x.shape[a] % parts == 0]
    if parts == 1 or x.ndim < 2 or not axes:
      return replicated(mesh)
    split = max(axes, key=lambda a: x.shape[a])
    return NamedSharding(mesh, PartitionSpec(*(
        'fsdp' if a == split else None for a in range(x.ndim))))

  return jax.tree.map(rule, state)
