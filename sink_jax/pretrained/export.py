"""A training run as a checkpoint that transformers loads, where it has a counterpart there.

The tensors to write are those that the importer of LLaMA reads, in the same table, so an exported
run comes back as it was; tests hold that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from sink_jax.attention.extra_key_value import NoBias
from sink_jax.attention.feature_map import Identity
from sink_jax.attention.head import PlainOutput
from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.position import Rope
from sink_jax.attention.qk_norm import NoQKNorm
from sink_jax.attention.similarity import Exp
from sink_jax.attention.temperature import Fixed
from sink_jax.attention.value import PlainValue
from sink_jax.io.paths import to_local_path, to_path
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.run import Run
from sink_jax.pretrained import llama
from sink_jax.pretrained.files import INDEX, WEIGHTS, write_object
from sink_jax.pretrained.load import load_run, run_encoder
from sink_jax.pretrained.stored_tensors import StoredTensor
from sink_jax.pretrained.tokenizer_files import write_tokenizer
from sink_jax.train.experiment import from_dict
from sink_jax.train.run_dir import read_config

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


def hf_config(config: ModelConfig, *, dtype: str = 'float32',
              context: int = 2048) -> dict[str, Any]:
  """The config.json of the same model in transformers: LLaMA, or Mistral with a window.

  Raises:
    ValueError: an option of the model has no counterpart there; names it.
  """
  _check(config)
  spec, dims, position = config.attention, config.dims, config.attention.position
  assert isinstance(position, Rope), 'anything else was refused'
  windowed = spec.mask.window is not None
  # Both names of the type: of new versions of transformers, and of old ones.
  scaling = None if position.factor == 1 else {'rope_type': 'linear', 'type': 'linear',
                                               'factor': position.factor}
  hf = {
      'architectures': ['MistralForCausalLM' if windowed else 'LlamaForCausalLM'],
      'model_type': 'mistral' if windowed else 'llama', 'torch_dtype': dtype,
      'vocab_size': config.vocab_size, 'hidden_size': config.d_model,
      'intermediate_size': config.ffn_hidden, 'num_hidden_layers': config.layers,
      'num_attention_heads': dims.heads, 'num_key_value_heads': dims.kv_heads,
      'head_dim': dims.head_dim, 'hidden_act': 'silu', 'rms_norm_eps': config.norm_eps,
      'rope_theta': position.base, 'rope_scaling': scaling,
      'max_position_embeddings': context, 'tie_word_embeddings': config.tied,
      'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
  if windowed:
    return hf | {'sliding_window': spec.mask.window}
  return hf | {'attention_bias': 'qkv' in config.biases, 'mlp_bias': 'ffn' in config.biases}


def _check(config: ModelConfig) -> None:
  """Raises a ValueError for the first option that LLaMA and Mistral do not have."""
  spec = config.attention
  for name, value, wanted in (
      ('model.combine_heads', config.combine_heads, 'concat'), ('model.ffn', config.ffn, 'swiglu'),
      ('model.norm', config.norm, 'rmsnorm'), ('model.norm_location', config.norm_location, 'pre'),
      ('model.linear', config.linear, 'plain'), ('model.sink_tokens', config.sink_tokens, 0),
      ('model.parallel_residual', config.parallel_residual, False),
      ('model.embedding_dim', config.embedding_dim, None),
      ('model.pattern', config.pattern, (Layer(),)),
      ('attention.similarity', spec.similarity, Exp()),
      ('attention.normalizer', spec.normalizer, RowSum()),
      ('attention.feature_map', spec.feature_map, Identity()),
      ('attention.kv_bias', spec.kv_bias, NoBias()),
      ('attention.qk_norm', spec.qk_norm, NoQKNorm()),
      ('attention.temperature', spec.temperature, Fixed()),
      ('attention.value', spec.value, PlainValue()),
      ('attention.head', spec.head, PlainOutput())):
    if value != wanted:
      raise _refused(name, value, f'only {wanted!r} has one')
  if not config.vocab_size:
    raise _refused('model.input_features', config.input_features, 'only models of tokens have one')
  # `type`, since Llama3Rope and YarnRope are Ropes with other frequencies.
  if type(spec.position) is not Rope or spec.position.fraction != 1:
    raise _refused('attention.position', spec.position, 'only Rope() of all channels has one')
  if type(spec.mask) not in (Causal, Window):  # the two that the families define
    raise _refused('attention.mask', spec.mask, 'only Causal() and Window() have one')
  windowed, biases = spec.mask.window is not None, set(config.biases)
  # `attention_bias` of LLaMA's config.json stands for q, k, v and the output together.
  if biases - {'qkv', 'out', 'ffn'} or len(biases & {'qkv', 'out'}) == 1 or windowed and biases:
    raise _refused('model.biases', config.biases, 'Mistral has no biases' if windowed else
                   "those of 'qkv' and 'out' together, and those of 'ffn', have one")


def _refused(name: str, value: Any, reason: str) -> ValueError:
  return ValueError(f'{name} = {value!r} has no counterpart in LLaMA or Mistral, so this run '
                    f'cannot be exported: {reason}.')


def export_checkpoint(run: Run, folder: str | os.PathLike, *, dtype: str = 'float32',
                      context: int = 2048, shard_bytes: int = 5 * 10**9) -> dict[str, Any]:
  """Writes config.json and the weights of a model; returns config.json.

  Args:
    folder: it is made where it does not exist, and must hold neither a checkpoint nor a run.
    dtype: of the weights, 'float32' or 'bfloat16'.
    context: the max_position_embeddings of config.json.
    shard_bytes: weights above this size go into several files of at most this size (a
      larger tensor into a file of its own), with an index.

  Raises:
    ValueError: an option of the model has no counterpart in transformers, or the folder
      holds something already.
  """
  if dtype not in DTYPES:
    raise ValueError(f'dtype = {dtype!r}; choices: {", ".join(DTYPES)}.')
  # Every option is checked before the first file is written.
  hf = hf_config(run.config, dtype=dtype, context=context) | {'bos_token_id': run.first_token}
  folder = Path(folder)
  # The folder of the run itself has a config.json, too, which must not be lost.
  if present := [p.name for kind in ('config.json', '*.safetensors*') for p in folder.glob(kind)]:
    raise ValueError(f'{folder} already holds {present[0]}: choose another folder, or empty it.')
  folder.mkdir(parents=True, exist_ok=True)
  shards, total = _shards(run, DTYPES[dtype].itemsize, shard_bytes)
  index = {}
  for number, names in enumerate(shards, 1):
    # The names that transformers gives its shards; a checkpoint of one file has no index.
    file = f'model-{number:05}-of-{len(shards):05}.safetensors' if len(shards) > 1 else WEIGHTS
    save_file(dict(_tensors(run, names, DTYPES[dtype])), folder / file, {'format': 'pt'})
    index |= dict.fromkeys(names, file)
  if len(shards) > 1:
    write_object(folder / INDEX, {'metadata': {'total_size': total}, 'weight_map': index})
  # Last: a folder without it is not taken for a checkpoint, so an export that is killed is none.
  write_object(folder / 'config.json', hf)
  return hf


def _table(config: ModelConfig) -> dict[str, StoredTensor]:
  """Tensors to write: the importer's table without what it only tolerates."""
  # A tied unembedding is the one tensor without parts: the files hold the embedding alone.
  return {name: tensor for name, tensor in llama.stored_tensors({}, config).items() if tensor.parts}


def _shards(run: Run, itemsize: int, limit: int) -> tuple[list[list[str]], int]:
  """Names of the tensors of every file, and the bytes of all."""
  # Greedily, in the order of the table, as transformers does: no shard is opened again.
  shards: list[list[str]] = [[]]
  room, total = limit, 0
  for name, stored in _table(run.config).items():
    size = int(np.prod(stored.shape)) * itemsize
    if size > room and shards[-1]:
      shards.append([])
      room = limit
    shards[-1].append(name)
    room, total = room - size, total + size
  return shards, total


def _tensors(run: Run, names: list[str], dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors as they are stored: parts of leaves, transposed where the importer does."""
  table = _table(run.config)
  for name in names:
    # LLaMA's tensors fill one part each, as a whole: no `take` has to be undone.
    part, = table[name].parts
    leaf: Any = run.params
    for key in part.path.split('/'):
      leaf = leaf[key]
    # One layer of the stacked leaf at a time comes to the host.
    x = np.asarray(leaf[part.index], dtype)
    yield name, np.ascontiguousarray(x.swapaxes(-1, -2) if part.transposed else x)


def export_workdir(workdir: str | os.PathLike, out: str | os.PathLike, *,
                   dtype: str = 'float32') -> list[str]:
  """Writes the model of a run and, where possible, its tokenizer; returns lines to print.

  Raises:
    ValueError: there is no run, or it has no counterpart in transformers.
    CheckpointError: it has no usable checkpoint.
  """
  folder = to_local_path(out, '--out', 'transformers reads no other; copy it from there')
  data = from_dict(read_config(to_path(workdir))).data
  run = load_run(workdir)
  hf = export_checkpoint(run, folder, dtype=dtype, context=data.context)
  lines = [f'{folder / "config.json"}: {hf["model_type"]}, step {run.step}, {dtype}']
  try:
    encoder = run_encoder(workdir, data)
    ids = write_tokenizer(encoder, folder, context=data.context, bos=data.bos,
                          first_token=run.first_token)
  except (ValueError, OSError) as error:  # the weights are of use without it
    return [*lines, f'No tokenizer written: {" ".join(str(error).split())}']
  write_object(folder / 'config.json', hf | ids)
  return [*lines, f'{folder / "tokenizer.json"}: {encoder.vocab_size} tokens']
