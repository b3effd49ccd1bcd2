"""Loads published models."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.evaluate import inputs
from sink_jax.foreign import standard_promotion
from sink_jax.io.paths import is_workdir
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.export import exported_tensors
from sink_jax.pretrained.families import family_for
from sink_jax.pretrained.files import Checkpoint
from sink_jax.pretrained.gguf import GgufCheckpoint
from sink_jax.pretrained.hub import resolve
from sink_jax.pretrained.parameters import load_parameters
from sink_jax.pretrained.stored_tensors import UNEMBEDDING, Table

_log = logging.getLogger('sink_jax')


@standard_promotion()
def load_pretrained(
  path_or_name: str | os.PathLike,
  *,
  dtype: str = 'float32',
  mesh: Mesh | None = None,
  implementation: str | None = None,
) -> Run:
  """Loads a published model from a folder, a GGUF file, or the Hugging Face hub.

      run = sj.load_pretrained('SmolLM2-135M-Instruct')
      run.logits(tokens)

  A GGUF file of the architecture llama, qwen2, qwen3 or gemma3 is dequantised; its name ends with
  its quantisation, as in 'SmolLM2-135M-Instruct (Q4_1)'. A checkpoint without an unembedding is
  loaded with a remark: probes and records need none, and logits, generated texts and losses are
  refused.

  Besides the parameters, memory holds one stored tensor at a time, or two that belong together
  (MXFP4 values and their scales, a tied unembedding that is stored as well).

  Args:
    path_or_name: a folder with config.json and safetensors files, a GGUF file, a name of the
      catalogue (SmolLM2-135M-Instruct, Gemma3-270M, or one from the paper's Table 8), or
      'owner/name' on the hub.
    dtype: the dtype of activations and products, 'float32' or 'bfloat16', for any dtype of the
      files. Parameters have it too; with float32, on a GPU or TPU, matrices that the files hold in
      16 bits stay so, and are converted, exactly, where a block is computed. Quantised files are
      held as float32.
    mesh: a (data, fsdp) mesh over whose devices the parameters are split, see
      `sink_jax.models.sharding.make_mesh`; None for one device.
    implementation: the implementation of attention, see `attend`.

  Raises:
    ValueError: there is no such model, it is not supported, its files are damaged, or a tensor
      holds a value that is not finite or that bfloat16 cannot hold. The message names the remedy.
  """
  published = open_published(path_or_name)
  checkpoint, name, model = published
  # Before the parameters: it refuses unknown names.
  config = dataclasses.replace(model, dtype=dtype, implementation=implementation)
  params = published.parameters(dtype, mesh, as_stored=True)
  if not model.unembedding:
    _log.warning(
      '%s has no unembedding (such as lm_head.weight), and config.json does not tie it '
      'to the embedding: sinks can be measured; logits, generated texts and losses are '
      'refused.',
      checkpoint.path,
    )
  return Run(
    config,
    params,
    name,
    bos=_bos(checkpoint),
    folder=str(checkpoint.path),
    read_tokenizer=_tokenizer,
    make_tokens=_probe_tokens,
  )


class Published(NamedTuple):
  """A published model of which only the headers have been read.

  name: of results. model: what the checkpoint describes, in the dtype of ModelConfig.
  """

  checkpoint: Checkpoint
  name: str
  model: ModelConfig

  def parameters(self, dtype: str, mesh: Mesh | None, as_stored: bool = False) -> ParamTree:
    """The parameters, on one device or laid out over a mesh, see `load_parameters`."""
    return load_parameters(
      self.checkpoint,
      family_for(self.checkpoint.config),
      _table(self.checkpoint, self.model),
      parameter_shapes(self.model),
      dtype=dtype,
      mesh=mesh,
      as_stored=as_stored,
    )


def open_published(path_or_name: str | os.PathLike) -> Published:
  """Opens what `load_pretrained` takes; raises as it does."""
  path, name = resolve(path_or_name)
  checkpoint = _opened(path)
  # Results name the model, and a quantised model is a different one.
  if checkpoint.quantization.casefold() not in name.casefold():
    name = f'{name} ({checkpoint.quantization})'
  return Published(checkpoint, name, _model(checkpoint))


def _model(checkpoint: Checkpoint) -> ModelConfig:
  try:
    model = family_for(checkpoint.config).model_config(checkpoint.config)
  except ValueError as error:
    raise ValueError(f'{checkpoint.source}: {error}') from None
  names = [
    name
    for name, tensor in _table(checkpoint, model).items()
    if any(part.path == UNEMBEDDING for part in tensor.parts)
  ]
  stored = model.tied or any(name in checkpoint.entries for name in names)
  return dataclasses.replace(model, unembedding=stored)


def _table(checkpoint: Checkpoint, model: ModelConfig) -> Table:
  """The tensors that the files of a model have, by their names there."""
  family = family_for(checkpoint.config)
  return checkpoint.table(family.stored_tensors(checkpoint.config, model))


def _bos(checkpoint: Checkpoint) -> str:
  """The default of `Run.bos`; 'none' without a tokenizer, which only texts need."""
  try:
    return 'tokenizer' if TextTokenizer.from_path(checkpoint.path).prefix else 'none'
  except ValueError:
    return 'none'


def model_type(run: Run) -> str | None:
  """The family of a published model by its config, such as 'llama'; None for other models."""
  if run.folder is None or run.graft is not None or is_workdir(run.folder):
    return None
  return _opened(Path(run.folder)).config['model_type']


def names_in_transformers(run: Run) -> dict[tuple[str, int], str]:
  """{(path of a leaf of the blocks, its entry): name of its module in transformers}.

  It is {} for a model that is not published and that transformers cannot express. One module of
  transformers may hold several leaves, such as queries, keys and values.
  """
  if model_type(run):
    assert run.folder
    config = _opened(Path(run.folder)).config
    tensors = family_for(config).stored_tensors(config, run.config)
  else:
    try:
      tensors = exported_tensors(run.config)
    except ValueError:
      return {}
  return {
    (part.path, part.index[0]): name.removesuffix('.weight')
    for name, tensor in tensors.items()
    for part in tensor.parts
    if part.index
  }


def _opened(path: Path) -> Checkpoint:
  return GgufCheckpoint(path) if path.suffix.casefold() == '.gguf' else Checkpoint(path)


def tokenize(
  run: Run,
  texts: str | Sequence[str],
  *,
  length: int | None = None,
  bos: str = 'tokenizer',
  special: bool = False,
) -> list[Int32[np.ndarray, 'T']] | Int32[np.ndarray, 'S T']:
  """Returns texts as the int32 token ids for a model of `load_run` or `load_pretrained`.

      tokens = sj.tokenize(run, ['The first text.', 'A second one.'], length=4)

  By default each text begins as the training texts did: with the tokenizer's BOS, if it prepends
  one, or with the first token of a run that was trained with one. No text begins with it twice.

  Args:
    run: the model.
    texts: one text or several.
    length: how many tokens of each text are returned, from its first on; by default all.
    bos: 'tokenizer', as above; 'none', without that token; 'force', with a BOS in any case.
    special: how a text is read that spells special tokens, such as the '<|im_start|>' of a chat. By
      default, False, their names are text like all other text, as in the documents of probes and
      training; with True they are these tokens, as transformers reads a text. Plain text has the
      same ids in both cases.

  Returns:
    The ids (S, length), or without a length a list of S arrays (T,).

  Raises:
    ValueError: there is no text, or one is shorter than `length`; length is below 1; `bos` is
      unknown, or 'force' if the tokenizer has no BOS; or the model has no tokenizer.
  """
  return run.tokenizer.tokens(texts, length, bos, special)


def _tokenizer(run: Run) -> TextTokenizer:
  """See `Run.tokenizer`."""
  assert run.folder, '`load_pretrained` sets it'
  return TextTokenizer.from_path(run.folder)


def _probe_tokens(run: Run) -> np.ndarray:
  """Probe inputs of a published model (32, 64): the text that commands take by default."""
  return inputs.natural(_tokenizer(run), inputs.open_source(), sequences=32).tokens
