"""A model with its parameters, ready to be called."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sink_jax.kernels.shard import mesh_context, mesh_of
from sink_jax.models.config import ModelConfig
from sink_jax.models.generate import generate
from sink_jax.models.precision import precise
from sink_jax.models.record import Record, RecordOptions
from sink_jax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained or imported model.

  Where its activations are float32, so are its matrix products, on GPUs and TPUs too.
  name: where it came from. step: training steps done, None if unknown. bos: how its
  inputs begin: 'none', or 'tokenizer' where the tokenizer prepends a BOS.
  probe_tokens: the fixed probe inputs of a training run (S, T), None otherwise.
  folder: where it was loaded from. first_token: id that every sequence of its training began
  with, None where they differed. read_tokenizer: reads `tokenizer`; set by what loads the run.
  """

  config: ModelConfig
  params: Any
  name: str = ''
  step: int | None = None
  bos: str = 'none'
  probe_tokens: Any = None
  folder: str | None = None
  first_token: int | None = None
  read_tokenizer: Callable[[Run], Any] | None = dataclasses.field(default=None, repr=False)

  @functools.cached_property
  def tokenizer(self):
    """The `TextTokenizer` of its texts.

    Raises:
      ValueError: it has none, or none that can be read here; with the remedy.
    """
    if self.read_tokenizer is None:
      raise ValueError(f'{self.name or "the model"} was not loaded from a folder, so no tokenizer '
                       'is known: pass token ids.')
    return self.read_tokenizer(self)

  def logits(self, tokens):
    """Next-token logits (S, T, V) in float32 of tokens (S, T)."""
    return _logits(self.config, mesh_of(self.params), self.params, jnp.asarray(tokens))

  def record(self, tokens, options: RecordOptions = RecordOptions()) -> Record:
    """What the model records of its forward pass on tokens (S, T)."""
    return record(self.config, options, mesh_of(self.params), self.params, jnp.asarray(tokens))

  def generate(self, tokens, length: int, **options):
    """Continues texts (S, T) by `length` tokens (S, length).

    They begin with `first_token`, which is put before them where they do not. For the options
    see `sink_jax.models.generate.stream`.
    """
    return generate(self, tokens, length, **options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(config, mesh, params, tokens):
  with mesh_context(mesh), precise(config.dtype):
    return _readable(mesh, Transformer(config).apply({'params': params}, tokens))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def record(config, options, mesh, params, tokens):
  """`Run.record` of parameters that lie on a mesh, None for those of one device."""
  with mesh_context(mesh), precise(config.dtype):
    return _readable(mesh, Transformer(config).apply({'params': params}, tokens, options)[1])


def _readable(mesh, results):
  """Whole on every device, where a process does not reach all devices."""
  if mesh is None or jax.process_count() == 1:
    return results
  return jax.lax.with_sharding_constraint(results, PartitionSpec())
