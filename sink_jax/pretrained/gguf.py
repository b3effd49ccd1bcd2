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

from sink_jax.io.gguf import GgufFile
from sink_jax.pretrained.files import TensorHeader
from sink_jax.pretrained.stored_tensors import StoredTensor

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
                     r'\w+\.(context_length|vocab_size|block_count)')
_READ: dict[str, tuple[str, ...]] = {
    'llama': ('embedding_length', 'feed_forward_length', 'attention.head_count',
              'attention.head_count_kv', 'attention.layer_norm_rms_epsilon', 'attention.key_length',
              'attention.value_length', 'rope.dimension_count', 'rope.freq_base',
              'rope.scaling.type', 'rope.scaling.factor')}
_READ['gemma3'] = _READ['llama'] + (
    'attention.sliding_window', 'rope.freq_base_swa', 'final_logit_softcapping')


class GgufCheckpoint:
  """A GGUF file with its header read and no tensor; stands where a `Checkpoint` does.

  path, folder, files: the file, and its folder. config: what config.json would say.
  entries: the headers of all tensors by their names in the file. quantization: the name that
  llama.cpp gives to its mixture of types, such as 'Q4_K_M'; '' where it is not quantised.

  Raises:
    ValueError: the file is damaged, of another architecture, or has metadata that would change a
      result and are not supported; names the file and the key.
  """

  def __init__(self, path: str | os.PathLike):
    self._file = file = GgufFile(path)
    self.path, self.folder, self.files = file.path, file.path.parent, [file.path]
    self.source = f'the metadata of {file.path.name}'
    values = _Values(file)
    values.check_known()
    self._architecture = values.architecture
    self.config = _llama(values, file) if values.architecture == 'llama' else _gemma3(values, file)
    self.entries = {name: TensorHeader(file.path.name, tensor.shape, 'F32')
                    for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
    self.quantization = self._quantization()

  def table(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
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

  def _quantization(self) -> str:
    types = Counter[str]()
    for tensor in self._file.tensors.values():
      types[tensor.type] += math.prod(tensor.shape)
    if not (quantized := [t for t, _ in types.most_common() if t not in ('F32', 'F16', 'BF16')]):
      return ''
    try:
      mixture = gguf.LlamaFileType(self._file.metadata.get('general.file_type', -1))
    except ValueError:
      return quantized[0]
    return mixture.name.removeprefix('MOSTLY_')


def name_in_file(architecture: str, name: str) -> str:
  """The name in a GGUF file of the tensor that has this name in transformers."""
  stem, _, kind = name.rpartition('.')
  if stem in _OUTSIDE:
    return f'{_OUTSIDE[stem]}.{kind}'
  _, _, layer, part = stem.split('.', 3)
  return f'blk.{layer}.{_NAMES[architecture][part]}.{kind}'


class _Values:
  """The metadata about the model, checked where they are read."""

  def __init__(self, file: GgufFile):
    self.path, self._all = file.path, file.metadata
    self.architecture = str(self._all.get('general.architecture'))
    if self.architecture not in _NAMES:
      raise ValueError(f'{self.path}: general.architecture = {self.architecture[:50]!r} is not '
                       f'supported. Supported: {", ".join(_NAMES)}. Models of other architectures '
                       'can be read from config.json and safetensors.')
    if self._all.get('general.type', 'model') != 'model':
      raise ValueError(f'{self.path}: general.type = {str(self._all["general.type"])[:50]!r} is not '
                       'supported: it must be "model".')

  def check_known(self) -> None:
    read = [f'{self.architecture}.{key}' for key in _READ[self.architecture]]
    for key, value in self._all.items():
      if key == 'split.count' and value in (0, 1):
        continue
      if not (_UNREAD.fullmatch(key) or key in read):
        raise ValueError(f'{self.path}: the key {key} = {str(value)[:50]} is not supported: it '
                         'could change the result.')

  def number(self, key: str, *default: Any) -> Any:
    """A number of the architecture; an error where it is missing and there is no default."""
    name = f'{self.architecture}.{key}'
    value = self._all.get(name, *default)
    if name not in self._all and not default:
      raise ValueError(f'{self.path} has no {name}, without which the model is not defined.')
    if value is not None and type(value) not in (int, float):
      raise self.refused(key, 'it must be one number')
    return value

  def refused(self, key: str, reason: str) -> ValueError:
    name = f'{self.architecture}.{key}'
    return ValueError(f'{self.path}: {name} = {str(self._all.get(name))[:50]} is not supported: '
                      f'{reason}.')

  def scaling(self) -> dict[str, Any] | None:
    """The scaling of rotary positions, as config.json has it."""
    kind = self._all.get(f'{self.architecture}.rope.scaling.type', 'none')
    if kind == 'none':
      return None
    if kind != 'linear':
      raise self.refused('rope.scaling.type', 'supported: none, linear')
    return {'rope_type': 'linear', 'factor': self.number('rope.scaling.factor')}


def _common(values: _Values, file: GgufFile) -> dict[str, Any]:
  """What both architectures have."""
  if 'token_embd.weight' not in file.tensors:
    raise ValueError(f'{file.path} lacks the tensor token_embd.weight: download it again.')
  heads = values.number('attention.head_count')
  size = values.number('attention.key_length', None)
  if values.number('attention.value_length', size) != size:
    raise values.refused('attention.value_length', f'keys have {size} channels')
  layers = values.number('block_count')
  config = {
      'hidden_size': values.number('embedding_length'), 'num_hidden_layers': layers,
      'num_attention_heads': heads, 'head_dim': size,
      'num_key_value_heads': values.number('attention.head_count_kv', heads),
      'intermediate_size': values.number('feed_forward_length'),
      'vocab_size': file.tensors['token_embd.weight'].shape[0],
      'rms_norm_eps': values.number('attention.layer_norm_rms_epsilon'),
      'rope_theta': values.number('rope.freq_base', 10000.0),
      'tie_word_embeddings': 'output.weight' not in file.tensors}
  for key in ('hidden_size', 'num_attention_heads', 'num_key_value_heads'):
    if type(config[key]) is not int or config[key] < 1:
      raise ValueError(f'{file.path}: {key} = {config[key]} must be a positive integer.')
  rotated = values.number('rope.dimension_count', None)
  if rotated not in (None, size or config['hidden_size'] // heads):
    raise values.refused('rope.dimension_count', 'all channels of a head must be rotated')
  return config


def _llama(values: _Values, file: GgufFile) -> dict[str, Any]:
  config = _common(values, file)
  stretched = _ROPE_FACTORS in file.tensors
  scaling = _llama3_scaling(file, config) if stretched else values.scaling()
  return config | {'model_type': 'llama', 'rope_scaling': scaling,
                   'attention_bias': 'blk.0.attn_q.bias' in file.tensors,
                   'mlp_bias': 'blk.0.ffn_down.bias' in file.tensors}


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
  """The scaling of LLaMA 3 whose factors the file has; every published one differs in one number.

  Raises:
    ValueError: the factors are others.
  """
  factors = file.read(_ROPE_FACTORS)
  size = config['head_dim'] or config['hidden_size'] // config['num_attention_heads']
  low, high, length, most = 1.0, 4.0, 8192, float(factors.max())
  wavelengths = 2 * math.pi * config['rope_theta'] ** (np.arange(0, size, 2) / size)
  share = np.clip((length / wavelengths - low) / (high - low), 0, 1)  # of the rotation as it was
  expected = 1 / ((1 - share) / most + share)
  if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
    raise ValueError(f'{file.path}: the tensor {_ROPE_FACTORS} is not supported: it must hold '
                     'the factors of LLaMA 3.')
  return {'rope_type': 'llama3', 'factor': most, 'low_freq_factor': low, 'high_freq_factor': high,
          'original_max_position_embeddings': length}


def _gemma3(values: _Values, file: GgufFile) -> dict[str, Any]:
  """Gemma 3, of which the file lacks the pattern of windows and the scale of the scores.

  Both are the same in all published models, but for the scale of the one with 62 layers.
  """
  config = _common(values, file)
  scale = config['head_dim']
  if config['num_hidden_layers'] == 62:
    scale = config['hidden_size'] // config['num_attention_heads']
  return config | {'model_type': 'gemma3_text', 'query_pre_attn_scalar': scale,
                   'sliding_window': values.number('attention.sliding_window'),
                   'sliding_window_pattern': 6, 'rope_scaling': values.scaling(),
                   'rope_local_base_freq': values.number('rope.freq_base_swa', 10000.0),
                   'final_logit_softcapping': values.number('final_logit_softcapping', None)}
