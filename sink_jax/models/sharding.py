"""Meshes and the rule that lays arrays out on them.

A batch is split over 'data' and 'fsdp'. Parameters, and what the optimizer keeps of each, are split
over 'tensor' by the table `_TENSOR`, and over 'fsdp' along the larger one of their last two axes,
or along the other one if 'tensor' has the larger. Over 'data' they are replicated: each device
has everything that an update on its sequences needs, and only gradients travel, once in a step.
Over 'fsdp' the state is split because it may not fit a device; XLA then gathers a block's
parameters before it computes the block, and scatters the sums of its gradients back (Rajbhandari
et al. 2020).

The devices of a tensor group have the same sequences and some of the heads and hidden units each;
they add up the outputs of `out` and of `w_out` (Shoeybi et al. 2019). An axis that is not divisible
is not split, and the axis of the layers never is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sink_jax.models.config import ModelConfig

Tree = TypeVar('Tree')  # of arrays or shapes; the result has shardings instead

# The end of a parameter's path, its number of axes with the axis of the layers (experts have one
# more), and the axis that 'tensor' splits: outputs of one product and inputs of the next, so that
# nothing travels between the two. Other parameters, such as embeddings and norms, are not split.
_TENSOR = (
  (r'attention/(query|key|value)/kernel', 3, 2),
  (r'attention/(query|key|value)/bias', 2, 1),
  (r'attention/out/kernel', 3, 1),
  (r'attention/kv_bias_(key|value)', 3, 1),
  (r'attention/kv_bias_logit', 2, 1),
  (r'attention/qk_norm_(query|key)_gain', 3, 1),
  (r'attention/(temperature|value)_scale', 2, 1),
  (r'attention/head_kernel', 3, 2),
  (r'attention/head_bias', 2, 1),
  (r'ffn/w[12]/kernel', 3, 2),
  (r'ffn/w[12]/bias', 2, 1),
  (r'ffn/w_out/kernel', 3, 1),
)


def make_mesh(
  data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence | None = None
) -> Mesh:
  """A (data, fsdp, tensor) mesh over all devices, or the given ones; -1 takes those that remain.

  Devices of a tensor group are in one process, or neighbours on a TPU: they add up activations
  twice in every block, for which only the fastest links suffice. With several slices of TPUs only
  'data' crosses the network between them.

  Args:
    devices: by default `jax.devices()`.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = mesh_sizes(data, fsdp, tensor, len(devices))
  # Of GPUs JAX calls the machines slices; any axis may cross the network between these.
  gpus = devices[0].platform in ('gpu', 'cuda')
  slices = 1 if gpus else len({getattr(device, 'slice_index', 0) for device in devices})
  if slices > 1 and sizes[0] % slices:
    raise ValueError(
      f'mesh.data = {sizes[0]} must be a multiple of the {slices} slices: only '
      'gradients can cross the network between them.'
    )
  # Not jax.make_mesh: it finds no mesh for some sizes on a TPU whose axes are larger than they are.
  if slices > 1:
    grid = mesh_utils.create_hybrid_device_mesh(
      (sizes[0] // slices, *sizes[1:]), (slices, 1, 1), devices, allow_split_physical_axes=True
    )
  else:
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return Mesh(grid, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)


def mesh_sizes(data: int, fsdp: int, tensor: int, count: int) -> tuple[int, int, int]:
  """The sizes of a mesh over `count` devices, without -1; raises as `make_mesh` does."""
  sizes = [data, fsdp, tensor]
  if -1 in sizes:  # the product is the negative product of the other sizes
    sizes[sizes.index(-1)] = count // max(1, -math.prod(sizes))
  if min(sizes) < 1 or math.prod(sizes) != count:
    raise ValueError(
      f'mesh.data = {data}, mesh.fsdp = {fsdp} and mesh.tensor = {tensor} do not '
      f'fit {count} devices: their product must be {count} (-1: the rest).'
    )
  data, fsdp, tensor = sizes
  return data, fsdp, tensor


def check_tensor(config: ModelConfig, tensor: int) -> None:
  """Raises a ValueError if a model cannot be split over a 'tensor' axis of this size."""
  sizes = {'heads': config.heads, 'kv_heads': config.dims.kv_heads}
  if config.ffn != 'none' and any(not layer.experts for layer in config.pattern):
    # Experts are not split, so a model of only experts has no hidden units to divide.
    sizes['ffn_hidden'] = config.ffn_hidden
  for name, size in sizes.items():
    if size % tensor:
      fitting = math.gcd(*sizes.values())
      raise ValueError(
        f'mesh.tensor = {tensor} does not divide model.{name} = {size}: this '
        f'model takes mesh.tensor = {fitting}, or a divisor of it.'
      )


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """The full array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Sequences are split over 'data' and 'fsdp', the same on all devices of a tensor group."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def state_shardings(mesh: Mesh, state: Tree) -> Tree:
  """Shardings of parameters and optimizer state, from only their paths and shapes.

  Small and odd arrays are replicated: splitting a vector saves little, and it is gathered in every
  step.
  """

  def sharding_of(path: tuple[Any, ...], x: Any) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    axes = [None] * x.ndim
    for pattern, ndim, axis in _TENSOR:
      # The optimizer's arrays end with the path of their parameter, and are laid out like it.
      if x.ndim == ndim and re.search(f'(^|/){pattern}$', name):
        if mesh.shape['tensor'] > 1 and x.shape[axis] % mesh.shape['tensor'] == 0:
          axes[axis] = 'tensor'
    # The axis of the layers is not split, since the loop over blocks takes one layer at a time.
    first = max(x.ndim - 2, 1 if 'tensor' in axes or '/blocks/' in f'/{name}' else 0)
    free = [a for a in range(first, x.ndim) if not axes[a] and x.shape[a] % mesh.shape['fsdp'] == 0]
    if x.ndim > 1 and free and mesh.shape['fsdp'] > 1:
      axes[max(free, key=lambda a: x.shape[a])] = 'fsdp'
    return NamedSharding(mesh, PartitionSpec(*axes) if any(axes) else PartitionSpec())

  return jax.tree_util.tree_map_with_path(sharding_of, state)


class GlobalBatches:
  """Puts batches of one size onto a mesh.

  rows: the rows of a global batch that the devices of this process hold, and that it therefore
  makes. Processes whose devices share rows make the same ones.
  """

  def __init__(self, mesh: Mesh, batch_size: int):
    self._sharding, self._batch_size = batch_sharding(mesh), batch_size
    indices = self._sharding.addressable_devices_indices_map((batch_size,)).values()
    # Unique: the devices of a tensor group all have the same rows.
    self.rows = np.unique([np.arange(batch_size)[index] for index in indices])

  def make_global_batch(self, batch: Tree) -> Tree:
    """This process's rows of a batch -> the global batch, spread over the mesh."""
    return jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(
        self._sharding, x, (self._batch_size, *x.shape[1:])
      ),
      batch,
    )
