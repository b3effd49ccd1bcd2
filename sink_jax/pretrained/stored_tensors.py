"""The parts of the parameter tree that each tensor of a published checkpoint fills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from sink_jax.attention import Dims
from sink_jax.models.config import ModelConfig

Take = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class LeafPart:
  """A part of one parameter leaf, and which numbers of a stored tensor it consists of.

  path: of the leaf, such as 'blocks/attention/query/kernel'. Equal blocks are stacked: the first
  axis of a
    leaf is the layer, and for experts the second is the expert.
  index: which part of the leaf, along these axes: (), (layer,) or (layer, expert).
  take: the stored tensor -> that part, in NumPy; a view is enough.
  transposed: the last two axes are then swapped, which the device does.
  computed: whether `take` computes float32 numbers that the dtype of the file may not hold.
  """

  path: str
  index: tuple[int, ...] = ()
  take: Take = lambda x: x
  transposed: bool = False
  computed: bool = False


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a checkpoint.

  shape: in the file; checked.
  parts: of parameters that it fills; several if one tensor holds queries, keys and values;
    none if it is read together with another tensor, or is a copy of one.
  optional: a checkpoint may lack it; its part of a leaf then stays zero.
  quantized: it holds bytes instead of floating-point numbers.
  read_with: full names of tensors read together with it, which have entries, too.
  copy_of: full name of the tensor that it must equal, as a tied unembedding does.
  combine: (this tensor, *tensors of `read_with`) -> the one array that `parts` take from.
  instead_of: full names of the tensors that this one may replace; see `held`.
  """

  shape: tuple[int, ...]
  parts: tuple[LeafPart, ...] = ()
  optional: bool = False
  quantized: bool = False
  read_with: tuple[str, ...] = ()
  combine: Callable[..., np.ndarray] = lambda x: x
  copy_of: str = ''
  instead_of: tuple[str, ...] = ()


Table = dict[str, StoredTensor]  # by full name
UNEMBEDDING = 'unembed/kernel'  # the path of its leaf
FREQUENCIES = r'.*rotary_emb\.inv_freq'  # of rotary positions, which follow from config.json


class Family(NamedTuple):
  """How checkpoints of one `model_type` of config.json are read.

  model_config: config.json -> the model that it describes; a ValueError names a key that is missing
    or not supported.
  stored_tensors: (config.json, that model) -> every tensor of the checkpoint, by full name.
  prefix: of these names, which a checkpoint of the bare model, without its head, lacks.
  ignored: pattern of names of tensors that hold no parameters, such as causal masks.
  """

  model_config: Callable[[dict[str, Any]], ModelConfig]
  stored_tensors: Callable[[dict[str, Any], ModelConfig], Table]
  prefix: str = 'model.'
  ignored: str = FREQUENCIES


def linear(path: str, index: tuple[int, ...], shape: tuple[int, int]) -> StoredTensor:
  """A weight (out, in) as torch.nn.Linear has it, which becomes a kernel (in, out)."""
  return StoredTensor(shape, (LeafPart(path, index, transposed=True),))


def vector(path: str, index: tuple[int, ...], *shape: int, optional: bool = False) -> StoredTensor:
  """A bias, a gain or a table of any number of axes, which stays as it is."""
  return StoredTensor(shape, (LeafPart(path, index),), optional)


def linears(
  name: str,
  path: str,
  index: tuple[int, ...],
  rows: Iterable[tuple[str, str, tuple[int, int]]],
  biases: bool = False,
) -> Table:
  """Linear layers from rows (name in the file, our name, shape (out, in)), with biases if asked."""
  tensors = {}
  for theirs, ours, shape in rows:
    tensors[f'{name}.{theirs}.weight'] = linear(f'{path}/{ours}/kernel', index, shape)
    if biases:
      tensors[f'{name}.{theirs}.bias'] = vector(f'{path}/{ours}/bias', index, shape[0])
  return tensors


def embeddings(config: ModelConfig, embedding: str, unembedding: str = 'lm_head.weight') -> Table:
  """The two tables of tokens; a checkpoint of a tied model may hold its one table twice."""
  shape = (config.vocab_size, config.embedding_dim or config.d_model)
  tensors = {embedding: vector('embed', (), *shape)}
  if config.tied:
    tensors[unembedding] = StoredTensor(shape, optional=True, copy_of=embedding)
  elif config.unembedding:
    tensors[unembedding] = linear(UNEMBEDDING, (), shape)
  return tensors


def beside(*tensors: StoredTensor) -> StoredTensor:
  """One tensor that holds the rows of several, as fused projections (out, in) do."""
  parts, first = [], 0
  for tensor in tensors:
    rows = slice(first, first := first + tensor.shape[0])
    parts += [dataclasses.replace(part, take=lambda x, rows=rows: x[rows]) for part in tensor.parts]
  return StoredTensor((first, *tensors[0].shape[1:]), tuple(parts))


def group_by_group(
  path: str, index: tuple[int, ...], leaf: str, dims: Dims, *inputs: int
) -> StoredTensor:
  """Queries, keys and values of all heads in one tensor, as GPT-NeoX and Falcon store them.

  For each key head come the queries of its group, then the key and the value. leaf: 'kernel', whose
  inputs are (D,), or 'bias', with ().
  """
  group = dims.heads // dims.kv_heads

  def rows(part: slice) -> Take:
    # Rows ((H + 2 Hkv) Dh, ...) as (Hkv, group + 2, Dh, ...); a bias has no further axes.
    return lambda x: x.reshape(dims.kv_heads, group + 2, dims.head_dim, *inputs)[:, part].reshape(
      -1, *inputs
    )

  parts = {'query': slice(group), 'key': slice(group, group + 1), 'value': slice(group + 1, None)}
  return StoredTensor(
    ((dims.heads + 2 * dims.kv_heads) * dims.head_dim, *inputs),
    tuple(
      # `take` sees a weight as it is stored, (out, in); the device transposes what it picked.
      LeafPart(f'{path}/{ours}/{leaf}', index, rows(part), transposed=leaf == 'kernel')
      for ours, part in parts.items()
    ),
  )


def folded(tensors: Table, factors: dict[str, float], plus: float = 0.0) -> Table:
  """Folds constants of config.json into the weights: x factor, for norms (x + plus) factor.

  factors: {part of a name, such as 'q_proj' or 'model.norm': factor}. plus: added to stored gains.
  """
  out = dict(tensors)
  for name, tensor in tensors.items():
    factor = np.float32(next((x for key, x in factors.items() if f'.{key}.' in f'.{name}'), 1))
    added = plus if 'norm' in name else 0
    if factor != 1 or added:
      (part,) = tensor.parts
      # In float32 for any dtype of the file, so that the product is rounded once.
      out[name] = dataclasses.replace(
        tensor,
        parts=(
          dataclasses.replace(
            part,
            take=lambda x, factor=factor, added=added: (np.asarray(x, np.float32) + added) * factor,
            computed=True,
          ),
        ),
      )
  return out


def held(tensors: Table, names: Iterable[str]) -> Table:
  """A family's table for a checkpoint with tensors of these full names.

  If it may hold one tensor instead of others, the table keeps either that one or the others.
  """
  names = set(names)
  missing = {name for name, tensor in tensors.items() if tensor.instead_of and name not in names}
  replaced = {
    other for name, tensor in tensors.items() if name not in missing for other in tensor.instead_of
  }
  return {name: tensor for name, tensor in tensors.items() if name not in missing | replaced}


def block(config: ModelConfig, layer: int) -> tuple[str, int]:
  """Path of the leaves of a layer's block, and the layer's index along their first axis.

  Each block of the pattern has a stack: in a pattern of two, layer 5 is entry 2 of 'blocks/layer1'.
  """
  period = len(config.pattern)
  if period == 1:
    return 'blocks', layer
  return f'blocks/layer{layer % period}', layer // period
