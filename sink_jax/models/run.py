"""A model with its parameters, ready to be called."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Integer

from sink_jax.kernels.shard import mesh_context, mesh_of
from sink_jax.models.arrays import AnyArray, ParamTree, checked_inputs, precise
from sink_jax.models.config import ModelConfig
from sink_jax.models.generate import TextModel
from sink_jax.models.layers import apply
from sink_jax.models.record import GraftReport, Record, RecordOptions
from sink_jax.models.transformer import Transformer

# Token ids, or the features of a model of continuous inputs.
ModelInputs = Integer[AnyArray, 'S T'] | Float[AnyArray, 'S T F'] | Sequence
_Tree = TypeVar('_Tree')


@dataclasses.dataclass(frozen=True, eq=False)
class Run(TextModel):
  """A trained or imported model with its parameters.

  If its activations are float32, its matrix products are too, also on GPUs and TPUs.

  Attributes:
    config, params: the model, and its parameters, nested dicts of arrays as `Transformer` makes them.
    name, folder: of the workdir or checkpoint that the model was loaded from.
    step: the number of training steps done; None if unknown.
    bos: how the inputs of a published model begin: 'tokenizer' if its tokenizer prepends a BOS,
      otherwise 'none', as for a run, which is trained on pieces of packed text.
    probe_tokens: the fixed probe inputs (S, T) of a training run; otherwise None.
    first_token: the id with which every training sequence began; None if they began differently.
    read_tokenizer, make_tokens: functions that read `tokenizer`, and make probe inputs (S, T) of
      plain text for a published model, set where the run is loaded.
    graft: what `sink_jax.graft` changed in the model; None if nothing was grafted.
  """

  config: ModelConfig
  params: ParamTree
  name: str = ''
  step: int | None = None
  bos: str = 'none'
  probe_tokens: AnyArray | None = None
  folder: str | None = None
  first_token: int | None = None
  read_tokenizer: Callable[[Run], Any] | None = dataclasses.field(default=None, repr=False)
  make_tokens: Callable[[Run], AnyArray] | None = dataclasses.field(default=None, repr=False)
  graft: GraftReport | None = None

  @functools.cached_property
  def tokenizer(self) -> Any:
    """The `data.tokenizer.TextTokenizer` of the model, read when it is first used."""
    if self.read_tokenizer is None:
      raise ValueError(f'{self.name or "the model"} was not loaded from a folder, so no tokenizer '
                       'is known: pass token ids.')
    return self.read_tokenizer(self)

  def logits(self, tokens: ModelInputs) -> Float[Array, 'S T V']:
    """Returns the next-token logits (S, T, V), float32, for tokens (S, T).

    A ValueError says that they are not ids of the vocabulary, or more than learned positions.
    """
    tokens = checked_inputs(self.config, tokens)
    return _logits(self.config, mesh_of(self.params), self.params, tokens)

  def record(self, tokens: ModelInputs, options: RecordOptions = RecordOptions()) -> Record:
    """Runs the model on ids (S, T), or continuous features (S, T, F), and returns what it recorded.

    options: what is recorded besides importance and norms. Errors are those of `logits`.
    """
    tokens = checked_inputs(self.config, tokens)
    return record(self.config, options, mesh_of(self.params), self.params, tokens)


# Equal configs and options share a compiled program.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(config: ModelConfig, mesh: Mesh | None, params: ParamTree, tokens: jax.Array,
            ) -> jax.Array:
  with mesh_context(mesh), precise(config.dtype):
    return _readable(mesh, apply(Transformer(config), params, tokens))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def record(config: ModelConfig, options: RecordOptions, mesh: Mesh | None, params: ParamTree,
           tokens: jax.Array) -> Record:
  """`Run.record` of parameters that lie on a mesh; mesh is None for those of one device."""
  with mesh_context(mesh), precise(config.dtype):
    return _readable(mesh, apply(Transformer(config), params, tokens, options)[1])


def _readable(mesh: Mesh | None, results: _Tree) -> _Tree:
  """Results replicated over the devices, where a process does not reach all of them."""
  if mesh is None or jax.process_count() == 1:
    return results
  return jax.lax.with_sharding_constraint(results, PartitionSpec())
