"""A GGUF file as a checkpoint: its metadata as a config, its tensors as transformers lays them out.

The families that read config.json and safetensors then read it too. Facts about the architectures
are in llama.cpp: conversion/ writes these files, src/llama-model.cpp and src/models/ read them.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from typing import Any

import gguf
import numpy as np

from sink_jax.io.files import refused
from sink_jax.io.gguf import GgufFile
from sink_jax.pretrained.config_keys import FULL, SLIDING, take, unsupported
from sink_jax.pretrained.files import Checkpoint, TensorHeader
from sink_jax.pretrained.stored_tensors import Table

_OUTSIDE = {'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output'}
_INSIDE = {
  'input_layernorm': 'attn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
_LLAMA = _INSIDE | {'post_attention_layernorm': 'ffn_norm'}
_QK_NORM = {'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm'}
# The tensors of a block in each architecture, by their names in transformers.
_NAMES = {
  'llama': _LLAMA,
  'qwen2': _LLAMA,
  'qwen3': _LLAMA | _QK_NORM,
  'gemma3': _INSIDE
  | _QK_NORM
  | {
    'post_attention_layernorm': 'post_attention_norm',
    'pre_feedforward_layernorm': 'ffn_norm',
    'post_feedforward_layernorm': 'post_ffw_norm',
  },
}
# Frequencies of rotary positions over those of the base: LLaMA 3 stretches the slow ones.
_ROPE_FACTORS = 'rope_freqs.weight'
# Keys that define the model, after the name of the architecture.
_READ = (
  'embedding_length',
  'block_count',
  'feed_forward_length',
  'attention.head_count',
  'attention.head_count_kv',
  'attention.key_length',
  'attention.value_length',
  'attention.layer_norm_rms_epsilon',
  'rope.dimension_count',
  'rope.freq_base',
  'rope.scaling.type',
  'rope.scaling.factor',
  'rope.scale_linear',
  'attention.key_length_swa',
  'attention.value_length_swa',
  'rope.dimension_count_swa',
)
_PATTERN = 'attention.sliding_window_pattern'
_OF_GEMMA3 = ('attention.sliding_window', _PATTERN, 'rope.freq_base_swa', 'final_logit_softcapping')
# Keys that change no result: sizes, a label, and what only YaRN uses.
_UNREAD = (
  'context_length',
  'vocab_size',
  'tensor_data_layout',
  'rope.scaling.original_context_length',
  'rope.scaling.finetuned',
)
# Keys that would change the model, with the values that change nothing: the defaults of llama.cpp
# (src/llama-hparams.h), and factors of 1. Some writers spell them out.
_DEFAULTS: dict[str, tuple] = {
  'attention.causal': (True,),
  'attention.clamp_kqv': (0,),
  'attention.kv_lora_rank': (0,),
  'attention.max_alibi_bias': (0,),
  'attention.q_lora_rank': (0,),
  'attention.relative_buckets_count': (0,),
  'attention.scale': (0,),
  'attention.sliding_window': (0,),
  'attn_logit_softcapping': (0,),
  'embedding_scale': (0, 1),
  'expert_count': (0,),
  'expert_feed_forward_length': (0,),
  'expert_gating_func': (0,),
  'expert_group_count': (0,),
  'expert_group_used_count': (0,),
  'expert_shared_count': (0,),
  'expert_shared_feed_forward_length': (0,),
  'expert_used_count': (0,),
  'expert_weights_norm': (False,),
  'expert_weights_scale': (0, 1),
  'final_logit_softcapping': (0,),
  'leading_dense_block_count': (0,),
  'logit_scale': (0, 1),
  'nextn_predict_layers': (0,),
  'pooling_type': (0,),
  'residual_scale': (0, 1),
  'rope.scaling.alpha': (0,),
  'rope.scaling.attn_factor': (1,),
  'rope.scaling.yarn_log_multiplier': (0,),
  'use_parallel_residual': (False,),
}


class GgufCheckpoint(Checkpoint):
  """A GGUF file instead of a `Checkpoint` folder; only its header has been read.

  config: as config.json would have it. entries: by their names in the file. quantization: the name
  that llama.cpp gives to its mixture of types, such as 'Q4_K_M'; '' if it is not quantised.

  Raises:
    ValueError: the file is damaged, of another architecture, or has metadata that would change a
      result and are not supported; names the file and the key.
  """

  def __init__(self, path: str | os.PathLike):
    self._file = file = GgufFile(path)
    self.path, self.source = file.path, f'the metadata of {file.path}'
    with refused(f'{file.path} is not supported'):
      _check_whole_model(file.metadata)
      self._architecture = take(
        file.metadata,
        'general.architecture',
        tuple(_NAMES),
        why='for another one give its safetensors',
      )
      self.config = _config(self._architecture, file)
      self.quantization = _quantization(file)
    self.entries = {
      name: TensorHeader(file.path, tensor.shape, 'F32')
      for name, tensor in file.tensors.items()
      if (self._architecture, name) != ('llama', _ROPE_FACTORS)
    }

  def table(self, tensors: Table) -> Table:
    """A family's table, with the names that the tensors have in the file."""
    names = {name: name_in_file(self._architecture, name) for name in tensors}
    return {
      names[name]: dataclasses.replace(tensor, copy_of=names.get(tensor.copy_of, ''))
      for name, tensor in tensors.items()
    }

  def read(self, name: str) -> np.ndarray:
    """One tensor, float32, dequantised, as transformers lays it out."""
    x = self._file.read(name)
    if self._architecture == 'gemma3' and 'norm' in name:
      return x - 1  # the file has the gain 1 + w, and the checkpoint of transformers w
    part = re.fullmatch(r'blk\.\d+\.attn_([qk])\.(?:weight|bias)', name)
    if self._architecture == 'llama' and part:
      # llama.cpp rotates pairs of neighbouring rows of a head, transformers pairs of its halves.
      heads = self.config['num_attention_heads' if part[1] == 'q' else 'num_key_value_heads']
      pairs = x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:])
      return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(x.shape)
    return x


def name_in_file(architecture: str, name: str) -> str:
  """The name in a GGUF file of the tensor that has this name in transformers."""
  stem, _, kind = name.rpartition('.')
  if stem in _OUTSIDE:
    return f'{_OUTSIDE[stem]}.{kind}'
  _, _, layer, part = stem.split('.', 3)
  return f'blk.{layer}.{_NAMES[architecture][part]}.{kind}'


def _quantization(file: GgufFile) -> str:
  types = Counter[str]()
  for tensor in file.tensors.values():
    types[tensor.type] += math.prod(tensor.shape)
  if not (quantized := [t for t, _ in types.most_common() if t not in ('F32', 'F16', 'BF16')]):
    return ''
  mixture = file.metadata.get('general.file_type')
  names = (kind.name for kind in gguf.LlamaFileType if kind == mixture)
  return next(names, quantized[0]).removeprefix('MOSTLY_')


def _check_whole_model(metadata: dict[str, Any]) -> None:
  if (parts := metadata.get('split.count', 1)) not in (0, 1):
    raise unsupported(
      'split.count',
      parts,
      'this file is one part of a model, merge the parts '
      'with llama-gguf-split --merge FIRST_PART MERGED.gguf',
    )
  take(metadata, 'general.type', ('model',))


def _values(architecture: str, metadata: dict[str, Any]) -> dict[str, Any]:
  """The metadata that llama.cpp reads for this architecture: the keys that begin with its name.

  Raises:
    ValueError: a key that is not read could change a result.
  """
  prefix = f'{architecture}.'
  layers = take(metadata, f'{prefix}block_count', int)
  values = {
    key: _of_all_layers(value, layers) for key, value in metadata.items() if key.startswith(prefix)
  }
  read = _READ + (_OF_GEMMA3 if architecture == 'gemma3' else ())
  for key, value in values.items():
    name = key.removeprefix(prefix)
    if name in read or name in _UNREAD:
      continue
    if name not in _DEFAULTS:
      raise unsupported(key, value, 'it could change the result')
    take(values, key, _DEFAULTS[name])
  return values


def _of_all_layers(value: Any, layers: int) -> Any:
  """One number for an array that has it for every layer; other arrays as lists."""
  numbers = value.tolist() if isinstance(value, np.ndarray) else value
  if isinstance(numbers, list) and len(numbers) == layers and len(set(numbers)) == 1:
    return numbers[0]
  return numbers


def _config(architecture: str, file: GgufFile) -> dict[str, Any]:
  """The metadata as a config.json; keys that could change a result and are not read are refused."""
  values = _values(architecture, file.metadata)
  of = lambda key, kind, *default: take(values, f'{architecture}.{key}', kind, *default)
  width, heads = of('embedding_length', int), of('attention.head_count', int)
  size = of('attention.key_length', int, width // heads)
  # Values are as wide as keys, all channels of which are rotated, with and without a window.
  for key in (
    'attention.value_length',
    'rope.dimension_count',
    'attention.key_length_swa',
    'attention.value_length_swa',
    'rope.dimension_count_swa',
  ):
    of(key, (size,))
  config = {
    'model_type': architecture,
    'hidden_size': width,
    'num_attention_heads': heads,
    'head_dim': size,
    'num_hidden_layers': of('block_count', int),
    'intermediate_size': of('feed_forward_length', int),
    'num_key_value_heads': of('attention.head_count_kv', int, heads),
    'rms_norm_eps': of('attention.layer_norm_rms_epsilon', float),
    'rope_theta': of('rope.freq_base', float, 10000.0),
    'vocab_size': file.tensors['token_embd.weight'].shape[0],
    'tie_word_embeddings': 'output.weight' not in file.tensors,
  }
  factor = of('rope.scaling.factor', float, of('rope.scale_linear', float, 0.0))
  # Without a type the scaling is linear, and a factor of 0 is none.
  if of('rope.scaling.type', ('linear', 'none')) == 'linear' and factor not in (0, 1):
    config['rope_scaling'] = {'rope_type': 'linear', 'factor': factor}
  if architecture == 'gemma3':
    return config | _gemma3(values, file.metadata, config)
  if architecture == 'llama':
    return config | _llama(file, config)
  return config


def _llama(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
  """The keys of config.json that LLaMA has; the tensors show whether there are biases."""
  keys: dict[str, Any] = {
    'attention_bias': 'blk.0.attn_q.bias' in file.tensors,
    'mlp_bias': 'blk.0.ffn_down.bias' in file.tensors,
  }
  if _ROPE_FACTORS in file.tensors:
    if 'rope_scaling' in config:
      raise unsupported(
        'llama.rope.scaling.factor',
        config['rope_scaling']['factor'],
        f'{_ROPE_FACTORS} scales the positions as well',
      )
    keys['rope_scaling'] = _llama3_scaling(file, config)
  return keys


def _gemma3(
  values: dict[str, Any], metadata: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
  """The keys of config.json that Gemma 3 has.

  The file lacks the scale of the scores, which is the same in all published models, except the one
  with 62 layers.
  """
  of = lambda key, kind, *default: take(values, f'gemma3.{key}', kind, *default)
  layers, heads = config['num_hidden_layers'], config['num_attention_heads']
  window = None
  if values.get('gemma3.attention.sliding_window'):  # 0 is none
    window = of('attention.sliding_window', int)
  slides = _slides(metadata.get(f'gemma3.{_PATTERN}', 6), layers)
  return {
    'model_type': 'gemma3_text',
    'sliding_window': window,
    'layer_types': [SLIDING if window and each else FULL for each in slides],
    'query_pre_attn_scalar': (
      config['hidden_size'] // heads if layers == 62 else config['head_dim']
    ),
    'rope_local_base_freq': of('rope.freq_base_swa', float, 10000.0),
    'final_logit_softcapping': of('final_logit_softcapping', float, 0.0) or None,
  }


def _slides(pattern: Any, layers: int) -> list[bool]:
  """True for each layer of Gemma 3 that has a window.

  pattern: every so many layers one has none; 0 if all have one. llama.cpp reads no array here, and
  computes with its default of 6: an array must say the same.
  """
  is_period = type(pattern) is int and pattern >= 0
  period = pattern if is_period else 6
  slides = [period == 0 or layer % period < period - 1 for layer in range(layers)]
  if not is_period and (given := np.asarray(pattern).tolist()) != slides:
    raise unsupported(f'gemma3.{_PATTERN}', given, 'it must be a period, or the list for 6')
  return slides


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
  """The scaling of LLaMA 3 with the factors of the file; published ones differ in one number."""
  factors, size = file.read(_ROPE_FACTORS), config['head_dim']
  low, high, length, most = 1.0, 4.0, 8192, float(factors.max())
  wavelengths = 2 * math.pi * config['rope_theta'] ** (np.arange(0, size, 2) / size)
  share = np.clip((length / wavelengths - low) / (high - low), 0, 1)  # of the unscaled rotation
  expected = 1 / ((1 - share) / most + share)
  if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
    raise ValueError(f'the tensor {_ROPE_FACTORS} must hold the factors of LLaMA 3')
  return {
    'rope_type': 'llama3',
    'factor': most,
    'low_freq_factor': low,
    'high_freq_factor': high,
    'original_max_position_embeddings': length,
  }
