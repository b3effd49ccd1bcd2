"""A GGUF file as a checkpoint: its metadata as a config, its tensors as transformers lays them out.

The families that read config.json and safetensors then read it too. Facts about both architectures
are in conversion/ of llama.cpp, which writes these files.
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
from sink_jax.pretrained.config_keys import take, unsupported
from sink_jax.pretrained.files import Checkpoint, TensorHeader
from sink_jax.pretrained.stored_tensors import Table

_OUTSIDE = {'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output'}
_INSIDE = {'input_layernorm': 'attn_norm', 'self_attn.q_proj': 'attn_q',
           'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
           'self_attn.o_proj': 'attn_output', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
           'mlp.down_proj': 'ffn_down'}
# The tensors in which the architectures differ, by their names in transformers.
_NAMES = {
    'llama': _INSIDE | {'post_attention_layernorm': 'ffn_norm'},
    'gemma3': _INSIDE | {'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm',
                         'post_attention_layernorm': 'post_attention_norm',
                         'pre_feedforward_layernorm': 'ffn_norm',
                         'post_feedforward_layernorm': 'post_ffw_norm'}}
# Frequencies of rotary positions over those of the base: LLaMA 3 stretches the slow ones.
_ROPE_FACTORS = 'rope_freqs.weight'
# Metadata that change no result: descriptions, the tokenizer's (read apart), how it was quantised.
_UNREAD = re.compile(r'general\..*|tokenizer\..*|quantize\..*|split\.(no|tensors\.count)|'
                     r'\w+\.(context_length|vocab_size)')
_READ = ('embedding_length', 'block_count', 'feed_forward_length', 'attention.head_count',
         'attention.head_count_kv', 'attention.key_length', 'attention.value_length',
         'attention.layer_norm_rms_epsilon', 'rope.dimension_count', 'rope.freq_base',
         'rope.scaling.type', 'rope.scaling.factor')
_OF_GEMMA3 = ('attention.sliding_window', 'rope.freq_base_swa', 'final_logit_softcapping')


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
      self._architecture = take(file.metadata, 'general.architecture', tuple(_NAMES))
      self.config = _config(self._architecture, file)
      self.quantization = _quantization(file)
    self.entries = {name: TensorHeader(file.path, tensor.shape, 'F32')
                    for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}

  def table(self, tensors: Table) -> Table:
    """A family's table, with the names that the tensors have in the file."""
    names = {name: name_in_file(self._architecture, name) for name in tensors}
    return {names[name]: dataclasses.replace(
        tensor, copy_of=names.get(tensor.copy_of, '')) for name, tensor in tensors.items()}

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
  return quantized[0] if mixture is None else gguf.LlamaFileType(mixture).name.removeprefix('MOSTLY_')


def _config(architecture: str, file: GgufFile) -> dict[str, Any]:
  """The metadata as a config.json; unknown keys that could change a result are refused."""
  known = [f'{architecture}.{key}' for key in _READ + (_OF_GEMMA3 if architecture == 'gemma3' else ())]
  for key, value in file.metadata.items():
    if not (_UNREAD.fullmatch(key) or key in known or key == 'split.count' and value in (0, 1)):
      raise unsupported(key, value, 'it could change the result')
  take(file.metadata, 'general.type', ('model',))
  of = lambda key, kind, *default: take(file.metadata, f'{architecture}.{key}', kind, *default)
  width, heads = of('embedding_length', int), of('attention.head_count', int)
  size = of('attention.key_length', int, width // heads)
  for key in ('attention.value_length', 'rope.dimension_count'):
    of(key, (size,))  # values are as wide as keys, all channels of which are rotated
  config = {
      'model_type': 'llama', 'hidden_size': width, 'num_attention_heads': heads, 'head_dim': size,
      'num_hidden_layers': of('block_count', int), 'intermediate_size': of('feed_forward_length', int),
      'num_key_value_heads': of('attention.head_count_kv', int, heads),
      'rms_norm_eps': of('attention.layer_norm_rms_epsilon', float),
      'rope_theta': of('rope.freq_base', float, 10000.0),
      'vocab_size': file.tensors['token_embd.weight'].shape[0],
      'tie_word_embeddings': 'output.weight' not in file.tensors}
  factor = of('rope.scaling.factor', float, 1.0)
  if of('rope.scaling.type', ('linear', 'none')) == 'linear' and factor != 1:  # llama.cpp's default
    config['rope_scaling'] = {'rope_type': 'linear', 'factor': factor}
  if architecture == 'llama':
    if _ROPE_FACTORS in file.tensors:
      config['rope_scaling'] = _llama3_scaling(file, config)
    return config | {'attention_bias': 'blk.0.attn_q.bias' in file.tensors,
                     'mlp_bias': 'blk.0.ffn_down.bias' in file.tensors}
  # The file lacks the pattern of windows and the scale of the scores. Both are the same in all
  # published models, except the scale of the one with 62 layers.
  return config | {
      'model_type': 'gemma3_text', 'sliding_window_pattern': 6,
      'query_pre_attn_scalar': width // heads if config['num_hidden_layers'] == 62 else size,
      'sliding_window': of('attention.sliding_window', int),
      'rope_local_base_freq': of('rope.freq_base_swa', float, 10000.0),
      'final_logit_softcapping': of('final_logit_softcapping', float, None)}


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
  """The scaling of LLaMA 3 with the factors in the file; published scalings differ in one number."""
  factors, size = file.read(_ROPE_FACTORS), config['head_dim']
  low, high, length, most = 1.0, 4.0, 8192, float(factors.max())
  wavelengths = 2 * math.pi * config['rope_theta'] ** (np.arange(0, size, 2) / size)
  share = np.clip((length / wavelengths - low) / (high - low), 0, 1)  # of the unscaled rotation
  expected = 1 / ((1 - share) / most + share)
  if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
    raise ValueError(f'the tensor {_ROPE_FACTORS} must hold the factors of LLaMA 3')
  return {'rope_type': 'llama3', 'factor': most, 'low_freq_factor': low, 'high_freq_factor': high,
          'original_max_position_embeddings': length}
