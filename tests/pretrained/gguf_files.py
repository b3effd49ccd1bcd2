"""Small GGUF files for tests, written by the package gguf as llama.cpp's converters write them."""

import gguf
import numpy as np

from sink_jax.pretrained.families import family_for
from sink_jax.pretrained.gguf import name_in_file
from tests.pretrained import tiny

# The same model as tiny.LLAMA, but with two key heads: permuting only one would prove little.
LLAMA = tiny.LLAMA | dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
GEMMA3 = dict(
  model_type='gemma3_text',
  vocab_size=16,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=7,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  rms_norm_eps=1e-5,
  rope_theta=1e6,
  rope_local_base_freq=1e4,
  sliding_window=4,
  query_pre_attn_scalar=16,
  tie_word_embeddings=True,
)
TOKENIZER = {
  'tokenizer.ggml.model': 'gpt2',
  'tokenizer.ggml.pre': 'smollm',
  'tokenizer.ggml.tokens': ['<s>', '</s>', *'abcdefghi01', 'ab', 'abc', 'Ġ'],
  'tokenizer.ggml.token_type': [3, 3, *[1] * 14],
  'tokenizer.ggml.merges': ['a b', 'ab c'],
  'tokenizer.ggml.bos_token_id': 0,
  'tokenizer.ggml.eos_token_id': 1,
}


def metadata(hf):
  """The metadata that a converter writes for the model of a config.json."""
  name = hf['model_type'].removesuffix('_text')
  values = {
    'embedding_length': hf['hidden_size'],
    'block_count': hf['num_hidden_layers'],
    'feed_forward_length': hf['intermediate_size'],
    'context_length': 64,
    'attention.head_count': hf['num_attention_heads'],
    'attention.head_count_kv': hf['num_key_value_heads'],
    'attention.layer_norm_rms_epsilon': hf['rms_norm_eps'],
    'rope.freq_base': hf['rope_theta'],
  }
  if 'head_dim' in hf:
    values |= {'attention.key_length': hf['head_dim'], 'attention.value_length': hf['head_dim']}
  if name == 'gemma3':
    values |= {'attention.sliding_window': hf['sliding_window']}
  return {
    'general.architecture': name,
    **{f'{name}.{k}': v for k, v in values.items()},
    **TOKENIZER,
  }


def tensors(hf, arrays):
  """The tensors of a checkpoint by their names in the file, in a converter's layout."""
  name = metadata(hf)['general.architecture']
  config = family_for(hf).model_config(hf)
  out = {}
  for theirs in family_for(hf).stored_tensors(hf, config):
    if theirs not in arrays:
      continue
    x, ours = np.asarray(arrays[theirs], np.float32), name_in_file(name, theirs)
    part = theirs.split('.')[-2]
    if name == 'gemma3' and part.endswith('norm'):
      x = x + 1
    if name == 'llama' and part in ('q_proj', 'k_proj'):
      heads = hf['num_attention_heads' if part == 'q_proj' else 'num_key_value_heads']
      x = x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    out[ours] = x
  return out


def write(path, values, arrays, types=None):
  """Writes a file; types: {tensor: name of its type}, F32 unless given."""
  writer = gguf.GGUFWriter(str(path), values['general.architecture'])
  for key, value in values.items():
    add = {
      bool: writer.add_bool,
      int: writer.add_uint32,
      float: writer.add_float32,
      str: writer.add_string,
      list: writer.add_array,
    }[type(value)]
    if key != 'general.architecture':
      add(key, value)
  for name, x in arrays.items():
    kind = (types or {}).get(name)
    if kind is None:
      writer.add_tensor(name, x)
    else:
      kind = gguf.GGMLQuantizationType[kind]
      data = x if x.dtype == np.uint8 else gguf.quants.quantize(x, kind)
      writer.add_tensor(name, data, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path
