"""A model with its parameters, ready to be called: logits, records and generated texts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Integer

from sink_jax.attention import AnyArray
from sink_jax.foreign import Tensor, TokenMask, standard_promotion, texts_in
from sink_jax.kernels.shard import mesh_context, mesh_of
from sink_jax.models.arrays import ArrayTree, ParamTree, checked_inputs, precise
from sink_jax.models.config import ModelConfig
from sink_jax.models.generate import Tokens, end_ids, stream_texts
from sink_jax.models.layers import apply
from sink_jax.models.record import GraftReport, Record, RecordOptions
from sink_jax.models.transformer import Transformer

# Token ids, or the features of a model of continuous inputs.
ModelInputs = Integer[AnyArray, 'S T'] | Float[AnyArray, 'S T F'] | Sequence | Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """A trained or imported model with its parameters.

  If its activations are float32, its matrix products are too, also on GPUs and TPUs.

  Attributes:
    config, params: the model, and its parameters, nested dicts of arrays as `Transformer` makes
      them.
    name, folder: of the workdir or checkpoint that the model was loaded from.
    step: the number of training steps done; None if unknown.
    bos: how the inputs of a published model begin: 'tokenizer' if its tokenizer prepends a BOS,
      otherwise 'none', as for a run, which is trained on pieces of packed text.
    probe_tokens: the fixed probe inputs (S, T) of a training run; otherwise None.
    first_token: the id with which every training sequence began; None if they began differently.
    read_tokenizer, make_tokens: functions that read `tokenizer`, and make probe inputs (S, T) of
      plain text for a published model, set by the function that loads the run.
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
      raise ValueError(
        f'{self.name or "the model"} was not loaded from a folder, so no '
        'tokenizer is known: pass token ids.'
      )
    return self.read_tokenizer(self)

  @standard_promotion()
  def logits(self, tokens: ModelInputs) -> Float[Array, 'S T V']:
    """Returns the next-token logits (S, T, V), float32, for tokens (S, T).

    Raises a ValueError for ids outside the vocabulary, more tokens than learned positions, or a
    checkpoint without an unembedding.
    """
    tokens = checked_inputs(self.config, tokens)
    return logits(self.config, mesh_of(self.params), self.params, tokens)

  @standard_promotion()
  def record(self, tokens: ModelInputs, options: RecordOptions = RecordOptions()) -> Record:
    """Runs the model on ids (S, T), or continuous features (S, T, F), and returns what it recorded.

    options: what is recorded besides importance and norms. Raises the errors of `logits`.
    """
    tokens = checked_inputs(self.config, tokens)
    return record(self.config, options, mesh_of(self.params), self.params, tokens)

  @standard_promotion()
  def generate(
    self,
    tokens: Tokens,
    length: int,
    *,
    mask: TokenMask | None = None,
    **options,
  ) -> Integer[np.ndarray, 'S n']:
    """Continues texts (S, T) by `length` tokens (S, length), or by fewer if all texts end earlier.

    If the run has a first token, texts that do not begin with it get it in front;
    `dataclasses.replace(run, first_token=None)` reads them as they are. Errors and options are
    those of `models.generate.stream_texts`: policy, temperature, top_k, top_p, seed and
    eos_token_id. If a text ends early, the first eos_token_id fills its row.

    Args:
      mask: (S, T), 1 for the tokens of a text and 0 for padding on its left or its right, as
        transformers' attention_mask. It changes neither what follows a text nor what a seed draws.
    """
    tokens = np.asarray(checked_inputs(self.config, tokens))
    padded = texts_in(mask, *tokens.shape)
    texts = self.begun(tokens if padded is None else padded.rows(tokens))
    rows = self._continued(texts, length, options)
    width, fill = max(map(len, rows)), [*end_ids(options.get('eos_token_id')), 0][0]
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=fill) for row in rows])

  @standard_promotion()
  def generate_texts(
    self,
    texts: Sequence[str],
    length: int,
    *,
    bos: str = 'tokenizer',
    special: bool = False,
    **options,
  ) -> list[str]:
    """Continues texts by `length` tokens or up to their end, and returns what follows each.

    Options are those of `generate`; `eos_token_id` is the tokenizer's by default, None for no end.
    bos, special: how a text begins, and whether names of special tokens in it are these tokens, see
      `sink_jax.tokenize`.
    """
    if isinstance(texts, str):
      raise ValueError('texts must be several, such as [text].')
    tokenizer = self.tokenizer
    settings: dict[str, Any] = {'eos_token_id': tokenizer.eos_ids or None} | options
    ids = [tokenizer.with_prefix(tokenizer.encode(text, special=special), bos) for text in texts]
    rows = self._continued(ids if bos == 'none' else self.begun(ids), length, settings)
    ends = end_ids(settings['eos_token_id'])
    return [tokenizer.decode(row[~np.isin(row, ends)].tolist()) for row in rows]

  def _continued(
    self,
    texts: Sequence[Sequence[int] | np.ndarray],
    length: int,
    options: Mapping[str, Any],
  ) -> list[np.ndarray]:
    """The new tokens of each text."""
    pieces = stream_texts(self.config, self.params, texts, length, **options)
    return [np.concatenate(pieces_of_text) for pieces_of_text in zip(*pieces)]

  def begun(self, texts: Sequence | np.ndarray) -> list[np.ndarray]:
    """Texts with the first token of the run in front, unless they begin with it."""
    first = [] if self.first_token is None else [self.first_token]
    return [
      np.asarray(text) if list(text[:1]) == first or not first else np.concatenate([first, text])
      for text in texts
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits(
  config: ModelConfig,
  mesh: Mesh | None,
  params: ParamTree,
  inputs: AnyArray,
) -> jax.Array:
  """`Run.logits` of parameters that lie on a mesh, None for one device.

  Equal configs share a compiled program.
  """
  with mesh_context(mesh), precise(config.dtype):
    return _readable(mesh, apply(Transformer(config), params, inputs))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def record(
  config: ModelConfig,
  options: RecordOptions,
  mesh: Mesh | None,
  params: ParamTree,
  inputs: AnyArray,
) -> Record:
  """`Run.record` of parameters that lie on a mesh, None for one device.

  Equal configs and options share a compiled program. Nothing of it needs the unembedding, which a
  checkpoint may lack.
  """
  with mesh_context(mesh), precise(config.dtype):
    _, recorded, _ = apply(Transformer(config), params, inputs, options, method='hidden')
    return _readable(mesh, recorded)


def _readable(mesh: Mesh | None, results: ArrayTree) -> Any:
  """Replicates results over the devices, since a process can read only its devices."""
  if mesh is None or jax.process_count() == 1:
    return results
  return jax.lax.with_sharding_constraint(results, PartitionSpec())
