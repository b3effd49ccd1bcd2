"""Running a function on every device's share of a batch.

Kernels are opaque to the compiler's partitioner, which would gather their inputs on every
device, and sums in a loop would cross the devices at every turn. The mesh is the one in
context, `in_mesh`.
"""

from __future__ import annotations

import contextlib
import math

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


@contextlib.contextmanager
def in_mesh(mesh):
  """A context, or decorator, in which kernels find the mesh to split their batch over."""
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else contextlib.nullcontext():
    yield


def mesh_of(arrays):
  """The mesh that a tree of arrays was laid out on, or None."""
  leaf = jax.tree.leaves(arrays)[0]
  sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, 'sharding', None)
  return sharding.mesh if isinstance(sharding, NamedSharding) else None


def on_batch(x):
  """x, split over the devices by its first axis where that divides: says it to the compiler.

  Without a word it may carry the layout of sharded parameters over to activations.
  """
  axes, devices = _mesh()
  if devices == 1 or x.shape[0] % devices:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def over_batch(f, *arrays, whole=()):
  """Calls f(*arrays, *whole), each device with its share of the first axis of `arrays`.

  f returns (results with the batch as first axis, totals); totals are summed over devices.
  A batch that does not divide among the devices, such as that of a small probe, is
  computed by every device as a whole.
  """
  axes, devices = _mesh()
  if devices == 1:
    return f(*arrays, *whole)
  split = arrays[0].shape[0] % devices == 0
  batch = PartitionSpec(axes) if split else PartitionSpec()

  def share(*inputs):
    results, totals = f(*inputs)
    return results, jax.lax.psum(totals, axes) if split else totals

  return jax.shard_map(
      share, in_specs=(batch,) * len(arrays) + (PartitionSpec(),) * len(whole),
      out_specs=(batch, PartitionSpec()), axis_names=set(axes), check_vma=False)(*arrays, *whole)


def _mesh():
  """Axes of the mesh in context that may still be split, and their number of devices."""
  mesh = jax.sharding.get_abstract_mesh()
  if AxisType.Explicit in mesh.axis_types:
    raise NotImplementedError('explicit mesh axes: make the mesh with axis_types Auto, as '
                              'sink_jax.train.sharding.make_mesh does.')
  axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types)
               if kind == AxisType.Auto)
  return axes, math.prod(mesh.shape[name] for name in axes)
