"""A training run as a checkpoint that transformers loads, if it has a counterpart there.

config.json is written for a class of transformers and read back by our importer of this class: a
difference from the run is something that the class cannot express. The tensors are those of the
importer's table, so an exported run comes back as it was.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.pretrained import llama
from sink_jax.pretrained.config_keys import FULL, SLIDING
from sink_jax.pretrained.files import WEIGHTS, write_json
from sink_jax.pretrained.stored_tensors import StoredTensor, Table

# Initialisation and execution do not change the function; attention and pattern are read by layer.
_UNREAD = ('init', 'dtype', 'implementation', 'remat', 'unroll', 'attention', 'pattern')


# In the order in which they are tried: first those that most programs support.
TARGETS = {
  'llama': 'LlamaForCausalLM',
  'mistral': 'MistralForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'granite_swa': 'GraniteSWAForCausalLM',
}


def export_checkpoint(
  run: Run,
  folder: str | os.PathLike,
  *,
  dtype: str = 'float32',
  context: int = 2048,
  target: str | None = None,
) -> dict[str, Any]:
  """Writes config.json and the weights of a model; returns config.json.

  Args:
    folder: made if it does not exist; must be empty.
    dtype: of the weights, 'float32' or 'bfloat16'.
    context: the max_position_embeddings of config.json.
    target: the class to write, a key of `TARGETS`; None for the first that can express the model.

  Raises:
    ValueError: a part of the model has no counterpart in these classes, or the folder holds
      something already.
  """
  folder = Path(folder)
  # The folder of the run itself has a config.json, too, which must not be lost.
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f'{folder} already holds files: choose another folder, or empty it.')
  hf = _config(run.config, target, context) | {
    'torch_dtype': dtype,
    'bos_token_id': run.first_token,
  }
  folder.mkdir(parents=True, exist_ok=True)
  # A tied unembedding has no parts: the files hold the embedding once.
  tensors = {
    name: _stored(run, tensor, dtype)
    for name, tensor in llama.table({}, run.config).items()
    if tensor.parts
  }
  save_file(tensors, folder / WEIGHTS, {'format': 'pt'})
  # Last: a folder without it is not a checkpoint, so a killed export is not taken for one.
  write_json(folder / 'config.json', hf)
  return hf


def exported_tensors(config: ModelConfig) -> Table:
  """The tensors of `export_checkpoint`; raises a ValueError as it does."""
  _config(config, None, context=2048)
  return llama.table({}, config)


def _config(config: ModelConfig, target: str | None, context: int) -> dict[str, Any]:
  """config.json of the first class that can express the model, or of the named class."""
  if not config.vocab_size:
    raise ValueError(
      'model.input_features: a model of continuous inputs has no class in transformers.'
    )
  if target and target not in TARGETS:
    raise ValueError(f'--as={target}: no such class; choices: {", ".join(TARGETS)}.')
  lacks: dict[str, list[str]] = {}  # {class: the parts that it cannot express}
  for name in [target] if target else TARGETS:
    read = _parts(llama.FAMILIES[name].model_config(_keys(config, name, context)))
    lacks[name] = [
      f'{part} = {value!r} (but {read[part]!r})'
      for part, value in _parts(config).items()
      if value != read[part]
    ]
  least = min(map(len, lacks.values()))
  nearest = {name: parts for name, parts in lacks.items() if len(parts) == least}
  if least:
    raise ValueError(
      'This run cannot be written for transformers: '
      + '; '.join(f'{name} has no {", no ".join(parts)}' for name, parts in nearest.items())
    )
  return _keys(config, next(iter(nearest)), context)


def _keys(config: ModelConfig, name: str, context: int) -> dict[str, Any]:
  """config.json of a class, as close to the model as the class allows."""
  specs = [config.attention_of(layer) for layer in config.blocks]
  window = next((spec.mask.window for spec in specs if spec.mask.window), None)
  kinds = [SLIDING if spec.mask.window else FULL for spec in specs]
  bases = [getattr(spec.position, 'base', 0) for spec in specs]
  factor = getattr(specs[0].position, 'factor', 1)
  hf: dict[str, Any] = {
    'architectures': [TARGETS[name]],
    'model_type': name,
    'vocab_size': config.vocab_size,
    'hidden_size': config.d_model,
    'intermediate_size': config.ffn_hidden,
    'num_hidden_layers': config.layers,
    'num_attention_heads': config.heads,
    'num_key_value_heads': config.dims.kv_heads,
    'head_dim': config.dims.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_eps,
    'max_position_embeddings': context,
    'attention_bias': 'qkv' in config.biases,
    'tie_word_embeddings': config.tied,
    'bos_token_id': None,
    'eos_token_id': None,
    'pad_token_id': None,
  }
  if name == 'granite_swa':
    # All keys that matter, since the defaults of the class are another model's.
    return hf | {
      'rope_parameters': {'rope_type': 'default', 'rope_theta': max(bases) or 10000.0},
      'layer_rope_theta': bases,  # 0: a block without positions
      # A number also if no block has a window: the class makes the mask of one in any case.
      'sliding_window': window or context,
      'layer_types': kinds,
      'mlp_bias': 'ffn' in config.biases,
      'attention_multiplier': 1 / math.sqrt(config.dims.head_dim),
      'embedding_multiplier': 1.0,
      'residual_multiplier': 1.0,
      'logits_scaling': 1.0,
    }
  # Both names of the type, for new and for old versions of transformers.
  hf |= {
    'rope_theta': bases[0] or 10000.0,
    'rope_scaling': None
    if factor == 1
    else {'rope_type': 'linear', 'type': 'linear', 'factor': factor},
  }
  if name == 'llama':
    return hf | {'mlp_bias': 'ffn' in config.biases}
  if name == 'mistral':
    return hf | {'sliding_window': window}
  return hf | {  # `layer_types` decides; older versions use `max_window_layers`
    'use_sliding_window': window is not None,
    'sliding_window': window,
    'layer_types': kinds,
    'max_window_layers': kinds.index(SLIDING) if window else config.layers,
  }


def _parts(config: ModelConfig) -> dict[str, Any]:
  """All that decides the function of a model, by config key; by layer where layers differ."""
  layers = config.blocks
  parts = {
    f'model.{field.name}': getattr(config, field.name)
    for field in dataclasses.fields(config)
    if field.name not in _UNREAD
  }
  parts |= {
    'model.biases': set(config.biases),
    'model.kv_heads': config.dims.kv_heads,
    'model.head_dim': config.dims.head_dim,
  }
  of_layers: dict[str, list[Any]] = {
    f'attention.{field.name}': [getattr(config.attention_of(layer), field.name) for layer in layers]
    for field in dataclasses.fields(config.attention)
  }
  of_layers['model.pattern'] = [(layer.mamba, layer.experts) for layer in layers]
  return parts | {
    name: values if len(set(values)) > 1 else values[0] for name, values in of_layers.items()
  }


def _stored(run: Run, tensor: StoredTensor, dtype: str) -> np.ndarray:
  """The tensor in its stored form; each fills one part unchanged, so no `take` has to be undone."""
  (part,) = tensor.parts
  leaf: Any = run.params
  for key in part.path.split('/'):
    leaf = leaf[key]
  # One layer of the stacked leaf comes to the host.
  x = np.asarray(leaf[part.index], np.dtype(dtype))
  return np.ascontiguousarray(x.swapaxes(-1, -2) if part.transposed else x)


def write_tokenizer(
  tokenizer: TextTokenizer, folder: str | os.PathLike, context: int
) -> dict[str, int]:
  """Writes the tokenizer of a run for transformers; returns the ids for config.json.

  Args:
    context: the longest sequence in tokens.
  """
  if tokenizer.pad_id in tokenizer.prefix:  # padding is masked out, and the first token must not be
    tokenizer = dataclasses.replace(tokenizer, pad_id=tokenizer.eos_id)
  tokenizer.save(folder, model_max_length=context)
  ids = {
    'bos_token_id': tokenizer.bos_id,
    'eos_token_id': tokenizer.eos_id,
    'pad_token_id': tokenizer.pad_id,
  }
  return {key: i for key, i in ids.items() if i is not None}
