"""Loads trained runs and published models, as callable models or to begin a training run with."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from sink_jax.data.sources import DocumentSource
from sink_jax.data.token_edits import first_token
from sink_jax.data.tokenizer import Bytes, TextTokenizer
from sink_jax.evaluate import inputs
from sink_jax.foreign import standard_promotion
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.arrays import ParamTree, first_not_finite
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.families import family_for
from sink_jax.pretrained.files import Checkpoint
from sink_jax.pretrained.gguf import GgufCheckpoint
from sink_jax.pretrained.hub import resolve
from sink_jax.pretrained.parameters import layout, load_parameters
from sink_jax.pretrained.stored_tensors import UNEMBEDDING, Table
from sink_jax.train.checkpoint import restore_params
from sink_jax.train.config import Experiment
from sink_jax.train.start import Source
from sink_jax.train.workdir import is_workdir, read_experiment, read_probe_tokens

_log = logging.getLogger('sink_jax')


@standard_promotion()
def load_run(workdir: str | os.PathLike, *, plugins: str | os.PathLike = '') -> Run:
  """Loads the model of a training run from its newest good checkpoint.

  Neither the data nor the devices of the training are needed, and nothing is written. Attention
  runs with the default implementation of this platform, not the one of the training. The run may be
  somebody else's: only what lies in its folder is opened, and none of it is executed.

  Args:
    workdir: the workdir of the run.
    plugins: Python files with components of the run, with commas between them, which are imported;
      not needed for files with which the same person has trained on this machine, unchanged since.

  Raises:
    ValueError: it is not the workdir of a run, a link leads out of it, it needs a component that is
      not imported, or a parameter is not finite; the message names it.
    CheckpointError: it has no usable checkpoint.
  """
  folder = to_path(workdir)
  experiment, config = _saved_model(folder, plugins)
  step, params = _restored(folder, config)
  if parameter := first_not_finite(params):
    raise ValueError(f'{folder}: at step {step} the parameter {parameter} is not finite: remove '
                     f'checkpoints/{step} there to use the checkpoint before it, or train again.')
  return Run(config, params, folder.name, step, probe_tokens=read_probe_tokens(folder),
             folder=str(folder), first_token=first_token(experiment.data.interventions),
             read_tokenizer=_tokenizer)


def _saved_model(folder: AnyPath,
                 plugins: str | os.PathLike = '') -> tuple[Experiment, ModelConfig]:
  """The experiment of a workdir and the model that it trains; reads no checkpoint."""
  if (folder / 'config.json').exists() and not is_workdir(folder):
    raise ValueError(f'{folder} holds a config.json but no run trained with sink_jax: a published '
                     'model is named by --checkpoint, or loaded by load_pretrained.')
  experiment = read_experiment(folder, plugins)
  try:
    config = experiment.model_config()
  except ValueError as error:
    raise ValueError(f'{folder}: config.json cannot be read ({error}).') from None
  # Training chose them for its devices: neither is a property of the model.
  return experiment, dataclasses.replace(config, implementation=None, unroll=1)


def _restored(folder: AnyPath, config: ModelConfig, mesh: Mesh | None = None) -> tuple[int, ParamTree]:
  """(step, parameters) of a run on one device, or laid out over a mesh."""
  shapes = parameter_shapes(config)
  # The checkpoint may come from a mesh of many devices: without these shardings Orbax would
  # look for those.
  return restore_params(folder, jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding), shapes, layout(shapes, mesh)))


@standard_promotion()
def load_pretrained(path_or_name: str | os.PathLike, *, dtype: str = 'float32',
                    mesh: Mesh | None = None, implementation: str | None = None) -> Run:
  """Loads a published model from a folder, a GGUF file, or the Hugging Face hub.

      run = sj.load_pretrained('SmolLM2-135M-Instruct')
      run.logits(tokens)

  A GGUF file of the architecture llama, qwen2, qwen3 or gemma3 is dequantised; its name ends with its
  quantisation, as in 'SmolLM2-135M-Instruct (Q4_1)'. A checkpoint without an unembedding is loaded
  with a remark: probes and records need none, and logits, generated texts and losses are refused.

  Besides the parameters, memory holds one stored tensor at a time, or two that belong together
  (MXFP4 values and their scales, a tied unembedding that is stored as well).

  Args:
    path_or_name: a folder with config.json and safetensors files, a GGUF file, a name of the
      catalogue (SmolLM2-135M-Instruct, Gemma3-270M, or one from the paper's Table 8), or
      'owner/name' on the hub.
    dtype: the dtype of parameters and activations, 'float32' or 'bfloat16', for any dtype of the files.
    mesh: a (data, fsdp) mesh over whose devices the parameters are split, see
      `sink_jax.train.sharding.make_mesh`; None for one device.
    implementation: the implementation of attention, see `attend`.

  Raises:
    ValueError: there is no such model, it is not supported, its files are damaged, or a tensor
      holds a value that is not finite or that bfloat16 cannot hold. The message names the remedy.
  """
  checkpoint, name = _open_published(path_or_name)
  model = _published_model(checkpoint)
  config = dataclasses.replace(model, dtype=dtype, implementation=implementation)  # refuses unknown names
  params = _published_parameters(checkpoint, model, dtype, mesh)
  if not model.unembedding:
    _log.warning('%s has no unembedding (such as lm_head.weight), and config.json does not tie it '
                 'to the embedding: sinks can be measured; logits, generated texts and losses are '
                 'refused.', checkpoint.path)
  return Run(config, params, name, bos=_bos(checkpoint), folder=str(checkpoint.path),
             read_tokenizer=_tokenizer, make_tokens=_probe_tokens)


def _open_published(path_or_name: str | os.PathLike) -> tuple[Checkpoint, str]:
  """(checkpoint, name) of a published model; reads only headers."""
  path, name = resolve(path_or_name)
  checkpoint = GgufCheckpoint(path) if path.suffix.casefold() == '.gguf' else Checkpoint(path)
  # Results name the model, and a quantised model is a different one.
  if checkpoint.quantization.casefold() not in name.casefold():
    name = f'{name} ({checkpoint.quantization})'
  return checkpoint, name


def _published_model(checkpoint: Checkpoint) -> ModelConfig:
  """The model that a checkpoint describes, in the dtype of ModelConfig."""
  try:
    model = family_for(checkpoint.config).model_config(checkpoint.config)
  except ValueError as error:
    raise ValueError(f'{checkpoint.source}: {error}') from None
  names = [name for name, tensor in _table(checkpoint, model).items()
           if any(part.path == UNEMBEDDING for part in tensor.parts)]
  stored = model.tied or any(name in checkpoint.entries for name in names)
  return dataclasses.replace(model, unembedding=stored)


def _published_parameters(checkpoint: Checkpoint, model: ModelConfig, dtype: str,
                          mesh: Mesh | None) -> ParamTree:
  return load_parameters(checkpoint, family_for(checkpoint.config), _table(checkpoint, model),
                         parameter_shapes(model), dtype=dtype, mesh=mesh)


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


def tokenize(run: Run, texts: str | Sequence[str], *, length: int | None = None,
             bos: str = 'tokenizer', special: bool = False,
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
    ValueError: there is no text, or one is shorter than `length`; length is below 1; `bos` is unknown, or
      'force' if the tokenizer has no BOS; or the model has no tokenizer.
  """
  return run.tokenizer.tokens(texts, length, bos, special)


def _tokenizer(run: Run) -> TextTokenizer:
  """The tokenizer of a run or a published model, read from its folder; see `Run.tokenizer`."""
  assert run.folder, 'both functions that load a run set its folder'
  if not is_workdir(run.folder):
    return TextTokenizer.from_path(run.folder)
  data = read_experiment(run.folder).data
  if not isinstance(data.source, DocumentSource):
    raise ValueError(f'{data.source!r} makes its own tokens: such a run has no text.')
  tokenizer = TextTokenizer.from_path(to_path(run.folder) / 'tokenizer')
  if run.first_token is not None:
    return tokenizer.beginning_with(run.first_token)
  return dataclasses.replace(tokenizer, prefix=(tokenizer.bos_id,) if data.bos else ())


def _probe_tokens(run: Run) -> np.ndarray:
  """Probe inputs of a published model (32, 64): the text that commands take by default."""
  return inputs.natural(_tokenizer(run), inputs.open_source(), sequences=32).tokens


def open_source(name: str) -> Source:
  """Opens a model that a training run begins with: reads its configs, but no parameters.

  Args:
    name: the workdir of a run, for its newest good checkpoint, or a folder or name as
      `load_pretrained` takes it.

  Raises:
    ValueError: there is no such model, or it cannot be read; with the remedy.
  """
  workdir = to_path(name)
  if is_workdir(workdir):
    _, model = _saved_model(workdir)
    name, path, params = str(workdir), workdir / 'tokenizer', lambda mesh: _restored(workdir, model, mesh)[1]
  else:
    checkpoint, _ = _open_published(name)
    model, path = _published_model(checkpoint), checkpoint.path
    if not model.unembedding:
      raise ValueError(f'{path} has no unembedding (such as lm_head.weight), which training needs: '
                       'begin with a checkpoint of the whole model.')
    params = lambda mesh: _published_parameters(checkpoint, model, 'float32', mesh)
  try:
    tokenizer = TextTokenizer.from_path(path)
  except ValueError:  # a synthetic task, or an unknown format: the data bring another
    return Source(name, model, params)
  letters = ''.join(map(chr, range(32, 127)))
  bytes_too = tokenizer.encode(letters) == Bytes().open().encode(letters)
  return Source(name, model, params, tokenizer, '' if bytes_too else f'HuggingFace(path={str(path)!r})')
