"""A checkpoint into a parameter tree, one tensor at a time, straight onto the devices.

The leaves are made on the devices first, as zeros, and every stored tensor is then written into
its part of them. The memory of the host holds one stored tensor, and that of the devices nothing
beside the parameters but one part: a model as large as the devices can be loaded by a small host.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from sink_jax.models.arrays import all_finite
from sink_jax.pretrained.files import Weights
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor, held
from sink_jax.train.sharding import state_shardings

_FLOATS = ('F32', 'F16', 'BF16')
DTYPES = ('float32', 'bfloat16')
Params = Mapping[str, Any]  # nested, with arrays or their shapes as leaves


def load_parameters(checkpoint: Weights, tensors: dict[str, StoredTensor], shapes: Params, *,
                    prefix: str = '', ignored: Sequence[str] = (), dtype: str = 'float32',
                    mesh: Mesh | None = None) -> Params:
  """The parameter tree, of the dtype, on one device or laid out over a mesh.

  At most one stored tensor (with those that are read together with it) is in memory beside
  the parameters.

  Args:
    tensors: a family's table, by full name.
    shapes: the tree of shapes, from `parameter_shapes`.
    prefix: names in the files may lack it, in a checkpoint of the bare model.
    ignored: full-match patterns of names of tensors that hold no parameters.
    mesh: with the axes data, fsdp and tensor, see `state_shardings`; None for a single device.

  Raises:
    ValueError: tensors are missing, unknown or of another shape or dtype, a file is damaged, or
      a value is not finite, as stored or in the dtype; names the tensor.
  """
  if dtype not in DTYPES:
    raise ValueError(f'dtype = {dtype!r}; choices: {", ".join(DTYPES)}.')
  # Names, shapes and dtypes are compared first, from the headers alone: a wrong config.json is
  # refused before gigabytes are read.
  tensors = held(tensors, [name if name in tensors else prefix + name
                           for name in checkpoint.entries])
  names = match(checkpoint, tensors, prefix, ignored)
  if mesh is None:
    device = SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: device, shapes)
  else:
    shardings = state_shardings(mesh, shapes)
  # Before anything is allocated: leaves that nothing fills would silently stay zero.
  _check_covered(tensors, _flat(shapes))
  leaves = {path: jnp.zeros(x.shape, dtype, device=sharding) for (path, x), sharding in
            zip(_flat(shapes).items(), jax.tree.leaves(shardings), strict=True)}
  by_name = {full: name for name, full in names.items()}
  # In the order of the files, each of which is then read once from its beginning to its end.
  for name in checkpoint.entries:
    wanted = tensors[names[name]] if name in names else None
    if wanted is not None and wanted.copy_of:
      _check_copy(checkpoint, name, by_name[wanted.copy_of])
    if wanted is None or not wanted.parts:
      continue
    x = wanted.combine(*map(checkpoint.read, [name, *(by_name[w] for w in wanted.read_with)]))
    # In the target dtype: a finite float32 number may be infinite in bfloat16.
    if not all_finite(x, dtype):
      raise _not_finite(checkpoint, name, [by_name[w] for w in wanted.read_with], x)
    for part in wanted.parts:
      leaves[part.path] = _write_part(leaves[part.path], part, part.take(x))
    del x  # before the next tensor is read, which may be of several GB as well
  treedef = jax.tree.structure(shapes)
  return jax.tree.unflatten(treedef, leaves.values())


def match(checkpoint: Weights, tensors: dict[str, StoredTensor], prefix: str,
          ignored: Sequence[str]) -> dict[str, str]:
  """Name in the files -> full name, for every tensor of the checkpoint that is of use.

  Raises:
    ValueError: tensors are missing, unknown or of another shape or dtype.
  """
  names: dict[str, str] = {}
  present, unknown = set(), []
  for name, entry in checkpoint.entries.items():
    # A checkpoint of the bare model lacks the prefix, one with its head has it.
    full = name if name in tensors else prefix + name
    if full not in tensors:
      if not any(re.fullmatch(pattern, name) for pattern in ignored):
        unknown.append(name)
      continue
    if full in present:
      raise ValueError(f'{checkpoint.folder} holds the tensor {full} twice, with and without the '
                       f'prefix {prefix!r}.')
    wanted, where = tensors[full], f'{checkpoint.folder / entry.file}: the tensor {name}'
    if entry.shape != tuple(wanted.shape):
      raise ValueError(f'{where} has the shape {entry.shape}, but '
                       f'{checkpoint.source} makes it {tuple(wanted.shape)}: the two do not belong '
                       'together.')
    allowed = ('U8',) if wanted.quantized else _FLOATS
    if entry.dtype not in allowed:
      raise ValueError(f'{where} is stored as {entry.dtype}, not as {" or ".join(allowed)}.')
    names[name] = full
    present.add(full)
  missing = [full for full, wanted in tensors.items()
             if not wanted.optional and full not in present]
  for what, list_ in (('lacks', missing), ('holds', unknown)):
    if list_:
      count = f'{len(list_)} tensors' if len(list_) > 1 else 'a tensor'
      more = ', ...' if len(list_) > 5 else ''
      raise ValueError(
          f'{checkpoint.folder} {what} {count} that '
          f'{"a model of this kind has" if what == "lacks" else "no model of this kind has"}: '
          f'{", ".join(list_[:5])}{more}. Is {checkpoint.source} that of another model?')
  return names


def _check_copy(checkpoint: Weights, name: str, original: str) -> None:
  """Raises a ValueError unless a tensor that config.json calls tied equals the original."""
  copy, first = checkpoint.read(name), checkpoint.read(original)
  if not np.array_equal(copy, first):
    for damaged, x in ((name, copy), (original, first)):
      if not all_finite(x):  # a NaN differs from itself
        raise _not_finite(checkpoint, damaged, (), x)
    raise ValueError(f'{checkpoint.folder}: config.json says that {name} is {original} '
                     '(tie_word_embeddings), but the two differ: set it to false there if the '
                     'model was trained untied.')


def _not_finite(checkpoint: Weights, name: str, read_with: Sequence[str],
                x: np.ndarray) -> ValueError:
  """The error for a tensor, with those read together with it, that holds no numbers."""
  where = f'{checkpoint.folder / checkpoint.entries[name].file}: the tensor {name}'
  if read_with:
    where += f', with {", ".join(read_with)},'
  bad = ~np.isfinite(x)
  if bad.any():
    index = np.unravel_index(bad.argmax(), bad.shape)
    return ValueError(f'{where} holds {x[index]} at [{", ".join(map(str, index))}], and no model '
                      'computes with that: download the file again, or use another model.')
  return ValueError(f'{where} holds {np.abs(x).max():g}, which bfloat16 cannot hold: load the '
                    'model in float32 (--dtype=float32).')


def _check_covered(tensors: dict[str, StoredTensor], shapes: dict[str, Any]) -> None:
  """Raises a ValueError unless the table fills every leaf once: an error of the importer."""
  indices: dict[str, list[tuple[int, ...]]] = {path: [] for path in shapes}
  for wanted in tensors.values():
    for part in wanted.parts:
      indices.setdefault(part.path, []).append(part.index)
  for path, filled in indices.items():
    axes = shapes[path].shape[:len(filled[0]) if filled else 0] if path in shapes else ()
    if path not in shapes or sorted(filled) != list(np.ndindex(axes)):
      raise ValueError(f'The table of this family does not fill the parameter {path} once: this '
                       'is an error of sink_jax, not of the checkpoint.')


def _flat(tree: Params) -> dict[str, Any]:
  """The leaves by their paths, such as 'blocks/norm1/gain'."""
  return {'/'.join(key.key for key in path): x
          for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _write_part(leaf: jax.Array, part: LeafPart, x: np.ndarray) -> jax.Array:
  """The leaf with x written into its part; returns when x is no longer needed.

  The leaf is donated: it is written in its own memory, so that no leaf is ever there twice. A
  transposed part is sent as it is stored, and the device swaps its axes.
  """
  shape = x.shape[:-2] + x.shape[:-3:-1] if part.transposed else x.shape
  if shape != leaf.shape[len(part.index):]:
    raise ValueError(f'The table of this family fills {part.path} {leaf.shape} at {part.index} '
                     f'with {shape}: this is an error of sink_jax, not of the checkpoint.')
  sharding = _part_sharding(leaf.sharding, leaf.ndim, len(part.index), part.transposed)
  on_devices = jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])
  write = _writer(leaf.sharding, part.transposed)
  # The copy to the devices may still read x, which the caller is about to drop and replace by the
  # next tensor: without waiting, two would be in memory at a time.
  return jax.block_until_ready(write(leaf, on_devices, part.index))


def _part_sharding(sharding: jax.sharding.Sharding, axes: int, depth: int,
                   transposed: bool) -> jax.sharding.Sharding:
  """The sharding of a part: every device gets what it keeps of the leaf, and no more.

  axes: of the leaf, of which the first `depth` are those of the part's index.
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  # Axes that the spec leaves out are not split; those of the index are gone in the part.
  spec = [*sharding.spec, *[None] * (axes - len(sharding.spec))][depth:]
  if transposed:
    # The part is sent untransposed, so the split of its last two axes is exchanged as well.
    spec[-2:] = spec[:-3:-1]
  return NamedSharding(sharding.mesh, PartitionSpec(*spec))


@functools.cache
def _writer(sharding: jax.sharding.Sharding, transposed: bool) -> Callable[..., jax.Array]:
  """A compiled (leaf, part, index) -> leaf in the leaf's own memory.

  The index is an argument, not a constant, so that all layers of a leaf share one program.
  """

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding)
  def write(leaf, part, index):
    part = part.swapaxes(-1, -2) if transposed else part
    part = part.astype(leaf.dtype).reshape((1,) * len(index) + part.shape)
    # The part gets axes of length 1 for its index, as `dynamic_update_slice` wants equal ranks.
    start = (*index, *[0] * (leaf.ndim - len(index)))
    return jax.lax.dynamic_update_slice(leaf, part, start)

  return write
