"""Loads a checkpoint into a parameter tree, one tensor at a time, straight onto the devices.

The leaves are made on the devices first, as zeros, and every stored tensor is then written into
its part of them. The memory of the host holds one stored tensor, and the memory of the devices
the parameters and one part: a model as large as the devices can be loaded by a small host.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from sink_jax.devices import platform
from sink_jax.models.sharding import state_shardings
from sink_jax.pretrained.files import Checkpoint
from sink_jax.pretrained.stored_tensors import Family, LeafPart, Table, held

_FLOATS = ('F32', 'F16', 'BF16', 'F64')
_HELD = {'BF16': 'bfloat16', 'F16': 'float16'}
# The leaves that are most of a model, and whose uses convert them to the dtype of activations.
_LARGE = re.compile(r'embed|.*/(?!conv/)\w+/kernel|unembed/kernel')
Params = Mapping[str, Any]  # nested, with arrays or their shapes as leaves


def load_parameters(
  checkpoint: Checkpoint,
  family: Family,
  tensors: Table,
  shapes: Params,
  *,
  dtype: str = 'float32',
  mesh: Mesh | None = None,
  as_stored: bool = False,
) -> Params:
  """The parameter tree, of the dtype, on one device or laid out over a mesh.

  Args:
    tensors: the family's table. shapes: from `parameter_shapes`. dtype: 'float32' or 'bfloat16'.
    as_stored: with float32, matrices keep the bfloat16 or float16 of the files, half the memory;
      the model converts those of a block when it computes it, so results are the same. Not on a
      CPU, where XLA converts bfloat16 matrices of all blocks before the loop over them.
    mesh: with the axes data, fsdp and tensor, see `state_shardings`; None for a single device.

  Raises:
    ValueError: tensors are missing, unknown or of another shape or dtype, a file is damaged, or
      a value is not finite, as stored or in the dtype; names the tensor.
  """
  # Names, shapes and dtypes are compared first, from the headers: a wrong config.json is refused
  # before gigabytes are read.
  tensors, names = _match(checkpoint, family, tensors)
  by_path: dict[str, Any] = flatten_dict(shapes, sep='/')
  shardings: dict[str, Any] = flatten_dict(layout(shapes, mesh), sep='/')
  _check_covered(tensors, by_path)
  dtypes = {}
  if as_stored and dtype == 'float32' and platform() != 'cpu':
    dtypes = _stored_dtypes(checkpoint, tensors, names)
  leaves = {
    path: jnp.zeros(x.shape, dtypes.get(path, dtype), device=shardings[path])
    for path, x in by_path.items()
  }
  # In the order of the files, each of which is then read once from its beginning to its end.
  in_file = {full: name for name, full in names.items()}
  for name, full in names.items():
    tensor = tensors[full]
    if tensor.copy_of and not np.array_equal(
      checkpoint.read(name), checkpoint.read(in_file[tensor.copy_of]), equal_nan=True
    ):
      raise ValueError(
        f'{checkpoint.source} says that {full} is {tensor.copy_of} '
        '(tie_word_embeddings), but the two differ: set it to false there if the model '
        'was trained untied.'
      )
    if not tensor.parts:
      continue
    x = tensor.combine(*(checkpoint.read(in_file[n]) for n in (full, *tensor.read_with)))
    for part in tensor.parts:
      leaves[part.path], finite = _write_part(leaves[part.path], part, part.take(x))
      if not finite:
        where = f'{checkpoint.entries[name].file}: the tensor {name}'
        where += ''.join(f' with {n}' for n in tensor.read_with)
        raise ValueError(_not_finite(where, x, dtype))
    del x  # before the next tensor is read, which may be of several GB as well
  return unflatten_dict(leaves, sep='/')


def _stored_dtypes(
  checkpoint: Checkpoint, tensors: Table, names: Mapping[str, str]
) -> dict[str, str]:
  """{path: dtype} of large leaves whose numbers all lie in the files in one dtype of 16 bits."""
  found: dict[str, set[str]] = {}
  for name, full in names.items():
    stored = checkpoint.entries[name].dtype
    for part in tensors[full].parts:
      exact = not part.computed and _LARGE.fullmatch(part.path)
      found.setdefault(part.path, set()).add(stored if exact else 'F32')
  return {
    path: _HELD[next(iter(kinds))]
    for path, kinds in found.items()
    if len(kinds) == 1 and kinds <= _HELD.keys()
  }


def layout(shapes: Params, mesh: Mesh | None) -> Params:
  """The sharding of every leaf: over a mesh, or on one device."""
  device = SingleDeviceSharding(jax.local_devices()[0])
  return state_shardings(mesh, shapes) if mesh else jax.tree.map(lambda _: device, shapes)


def _match(checkpoint: Checkpoint, family: Family, tensors: Table) -> tuple[Table, dict[str, str]]:
  """The tensors that this checkpoint should have, and {name in the files: full name} of them."""
  # A checkpoint of the bare model lacks the prefix, one with its head has it.
  full = {name: name if name in tensors else family.prefix + name for name in checkpoint.entries}
  tensors = held(tensors, full.values())
  names = {name: full[name] for name in checkpoint.entries if full[name] in tensors}
  unknown = [
    name
    for name in checkpoint.entries
    if name not in names and not re.fullmatch(family.ignored, name)
  ]
  missing = [
    name for name, tensor in tensors.items() if not tensor.optional and name not in names.values()
  ]
  for word, wrong in (('lacks', missing), ('has unknown', unknown)):
    if wrong:
      raise ValueError(
        f'{checkpoint.path} {word} tensors: {", ".join(wrong[:5])}'
        f'{f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""}. Is '
        f'{checkpoint.source} that of another model?'
      )
  if len(set(names.values())) < len(names):
    raise ValueError(f'{checkpoint.path} has a tensor twice, with and without {family.prefix!r}.')
  for name, key in names.items():
    entry, wanted = checkpoint.entries[name], tensors[key]
    allowed = ('U8',) if wanted.quantized else _FLOATS
    if entry.shape != tuple(wanted.shape) or entry.dtype not in allowed:
      raise ValueError(
        f'{entry.file}: the tensor {name} is {entry.shape} {entry.dtype}, and not '
        f'{tuple(wanted.shape)} {" or ".join(allowed)} as {checkpoint.source} says.'
      )
  return tensors, names


def _not_finite(where: str, x: np.ndarray, dtype: str) -> str:
  """The message for a tensor that has values that are not finite, as stored or in the dtype."""
  bad = ~np.isfinite(x)
  if not bad.any():
    remedy = (
      'load the model in float32 (--dtype=float32)'
      if dtype == 'bfloat16'
      else 'such a model cannot be loaded'
    )
    return f'{where} holds {np.abs(x).max():g}, which {dtype} cannot hold: {remedy}.'
  index = np.unravel_index(bad.argmax(), bad.shape)
  return f'{where} holds {x[index]} at [{", ".join(map(str, index))}]: download the file again.'


def _check_covered(tensors: Table, shapes: dict[str, Any]) -> None:
  """Asserts that a family's table fills each leaf once; a missing part would silently stay zero."""
  indices: dict[str, list[tuple[int, ...]]] = {path: [] for path in shapes}
  for tensor in tensors.values():
    for part in tensor.parts:
      indices[part.path].append(part.index)
  for path, filled in indices.items():
    axes = shapes[path].shape[: len(filled[0]) if filled else 0]
    assert sorted(filled) == list(np.ndindex(axes)), f'the table does not fill {path} once'


def _write_part(leaf: jax.Array, part: LeafPart, x: np.ndarray) -> tuple[jax.Array, bool]:
  """The leaf with x written into its part, and whether it is finite there.

  The leaf is donated and written in the same memory, so that memory never holds it twice. A
  transposed part is sent as it is stored, and the device swaps its axes. The function returns when
  x is no longer needed: the copy to the devices may read x, which the next tensor is about to
  replace.
  """
  if x.dtype == np.float64:  # rounded here, since JAX may or may not have this dtype
    with np.errstate(over='ignore'):  # the result says that it is not finite
      x = x.astype(np.float32)
  shape = x.shape[:-2] + x.shape[:-3:-1] if part.transposed else x.shape
  assert shape == leaf.shape[len(part.index) :], f'the table fills {part.path} with {shape}'
  sharding = _part_sharding(leaf.sharding, leaf.ndim, len(part.index), part.transposed)
  on_devices = jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])
  leaf, finite = jax.block_until_ready(
    _writer(leaf.sharding, part.transposed)(leaf, on_devices, part.index)
  )
  return leaf, bool(finite)


def _part_sharding(sharding: Sharding, axes: int, depth: int, transposed: bool) -> Sharding:
  """The sharding of a part of a leaf with `axes` axes; the first `depth` of them index the part."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  # Axes that the spec leaves out are not split; the part lacks the axes of the index.
  spec = [*sharding.spec, *[None] * (axes - len(sharding.spec))][depth:]
  if transposed:
    # The part is sent untransposed, so the split of its last two axes is exchanged as well.
    spec[-2:] = spec[:-3:-1]
  return NamedSharding(sharding.mesh, PartitionSpec(*spec))


@functools.cache
def _writer(sharding: Sharding, transposed: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """A compiled (leaf, part, index) -> (leaf in the same memory, is the part finite?).

  The index is an argument, not a constant, so that all layers of a leaf share one program.
  """
  everywhere = (
    NamedSharding(sharding.mesh, PartitionSpec())
    if isinstance(sharding, NamedSharding)
    else sharding
  )

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(sharding, everywhere))
  def write(leaf, part, index):
    part = part.swapaxes(-1, -2) if transposed else part
    part = part.astype(leaf.dtype).reshape((1,) * len(index) + part.shape)
    # The part gets axes of length 1 for its index, as `dynamic_update_slice` wants equal ranks.
    start = (*index, *[0] * (leaf.ndim - len(index)))
    return jax.lax.dynamic_update_slice(leaf, part, start), jnp.isfinite(part).all()

  return write
