"""Running a function on every device's share of a batch and of the heads.

The compiler's partitioner cannot split a kernel: it would gather the inputs on every device. It
would also sum over devices in every iteration of a loop. So both run inside a shard_map. The mesh
is the one in context, see `mesh_context`: its axis 'tensor' splits heads, all others split the
batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

_TENSOR = 'tensor'


@contextlib.contextmanager
def mesh_context(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
  """A context, or decorator, in which kernels find the mesh to split their inputs over."""
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else contextlib.nullcontext():
    yield


def mesh_of(arrays: Any) -> Mesh | AbstractMesh | None:
  """The mesh that a tree of arrays was laid out on, or None."""
  leaf = jax.tree.leaves(arrays)[0]
  # Inside a trace arrays have no layout yet: the mesh in context counts.
  sharding = None if isinstance(leaf, core.Tracer) else getattr(leaf, 'sharding', None)
  return sharding.mesh if isinstance(sharding, NamedSharding) else None


def sharding_constraint(layout: str, x: jax.Array) -> jax.Array:
  """Returns x with the sharding that the letters of its axes name, see `shard_map_batch_heads`.

  Without it the compiler may carry the layout of parameters or of the loss over to activations.
  """
  sizes = _axes()
  if math.prod(sizes.values()) == 1:
    return x
  over = _splits(sizes, [layout], [x])
  # If the batch does not divide, the compiler may choose.
  axes = {'b': over['b'] or PartitionSpec.UNCONSTRAINED, 'h': over['h'] or None}
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(axes.get, layout)))


def shard_map_batch_heads(
  layout: str, f: Callable[..., Sequence[jax.Array]], *arrays: jax.Array
) -> tuple:
  """Calls f(*arrays) on every device with the device's share of each array.

  A result without 'b' or 'h' is summed over the devices among which an array with that letter
  was split. If an axis does not divide, such as the batch of a small probe, every device
  computes all of it.

  Args:
    layout: the axes of arrays and results, a letter each, such as 'bthd bthd -> bht ht .'. 'b'
      is split over the axes of the mesh for batches, 'h' over 'tensor' (heads, or an axis that is
      split like heads). Other letters are not split; a dot stands for no axes.
    f: returns one array per result of the layout.
  """
  sizes = _axes()
  if math.prod(sizes.values()) == 1:
    return tuple(f(*arrays))
  inputs, outputs = ([part.strip('.') for part in side.split()] for side in layout.split('->'))
  over = _splits(sizes, inputs, arrays)
  spec = lambda axes: PartitionSpec(*(over.get(letter) or None for letter in axes))

  def total(axes: str, x: jax.Array) -> jax.Array:
    names = [
      name
      for letter in 'bh'
      if letter not in axes and letter in ''.join(inputs)
      for name in over[letter]
    ]
    return jax.lax.psum(x, tuple(names)) if names else x

  def share(*inputs: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(map(total, outputs, f(*inputs)))

  # check_vma=False: the check does not know what a Pallas call does with its operands.
  return jax.shard_map(
    share,
    in_specs=tuple(map(spec, inputs)),
    out_specs=tuple(map(spec, outputs)),
    axis_names=set(sizes),
    check_vma=False,
  )(*arrays)


def axis_size(name: str) -> int:
  """Number of devices along an axis of the mesh in context that may still be split, or 1."""
  return _axes().get(name, 1)


def sum_over_axis(name: str, f: Callable[[Any, Any], Any], whole: Any, batch: Any) -> Any:
  """Calls f(whole, batch) on every group of devices along an axis of the mesh, and sums up.

  Within f the other axes of the mesh split arrays as always, and nothing crosses the named axis:
  the results are summed over it once, at the end, in their dtype.

  Args:
    whole: a tree of arrays that all groups have.
    batch: a tree of arrays, of which each group has its share of the first axis.
  """
  # Kernels need every axis of the mesh to be manual, also an axis of a single device.
  names = {axis for axis, devices in _axes().items() if axis == name or devices == 1}
  sums = jax.shard_map(
    lambda *share: jax.tree.map(lambda x: x[None], f(*share)),
    axis_names=names,
    in_specs=(PartitionSpec(), PartitionSpec(name)),
    out_specs=PartitionSpec(name),
    check_vma=False,
  )(whole, batch)
  # Next to axes that the compiler splits, a psum of bfloat16 crashes XLA's compiler for CPUs; and
  # jnp.sum would send float32.
  return jax.tree.map(lambda x: jax.lax.reduce(x, x.dtype.type(0), jax.lax.add, (0,)), sums)


def _splits(
  sizes: dict[str, int],
  layouts: list[str],
  arrays: Sequence[jax.Array],
) -> dict[str, tuple[str, ...]]:
  """{letter: axes of the mesh that split it}, none if one of its lengths does not divide."""
  over = {
    'b': tuple(name for name in sizes if name != _TENSOR),
    'h': tuple(name for name in sizes if name == _TENSOR),
  }
  for letter, names in over.items():
    devices = math.prod(sizes[name] for name in names)
    if any(
      x.shape[axes.index(letter)] % devices for axes, x in zip(layouts, arrays) if letter in axes
    ):
      over[letter] = ()
  return over


def _axes() -> dict[str, int]:
  """{axis: devices} of the mesh in context, of the axes that may still be split.

  Inside a shard_map the axes that it splits are manual, and left out here.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if AxisType.Explicit in mesh.axis_types:
    raise NotImplementedError(
      'explicit mesh axes: make the mesh with axis_types Auto, as '
      'sink_jax.models.sharding.make_mesh does.'
    )
  return {
    name: mesh.shape[name]
    for name, kind in zip(mesh.axis_names, mesh.axis_types)
    if kind == AxisType.Auto
  }
