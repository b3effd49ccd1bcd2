"""Falcon: parallel residuals, and queries, keys and values of all heads in one tensor.

Of the ALiBi models (falcon-rw) none is read: they divide the bias of distances by sqrt(Dh), in
bfloat16, and no position encoding here does.
"""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys
from sink_jax.pretrained.gpt2 import activation, layer_norm
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, group_by_group, linear, tied, vector

MODEL_TYPES = ('falcon',)
PREFIX = 'transformer.'
IGNORED = (r'.*rotary_emb\.inv_freq',)


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  A model with one norm in front of both parts of a block gets two that are equal; training it
  further moves them apart.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  keys.not_quantized(hf)
  keys.only(hf, 'alibi', False, why='the bias of distances is divided by sqrt(Dh) in this family')
  heads, width = keys.size(hf, 'num_attention_heads'), keys.size(hf, 'hidden_size')
  if keys.head_dim(hf) is not None:
    raise keys.refused('head_dim', hf['head_dim'], 'a head of this family has hidden_size / '
                       'num_attention_heads channels')
  parallel = keys.flag(hf, 'parallel_attn', True)
  if _is_new(hf):  # 40B, 180B and 11B; 7B is of the older kind
    kv_heads = keys.optional_size(hf, 'num_kv_heads', None) or heads
    keys.only(hf, 'parallel_attn', True, why='new_decoder_architecture is true')
    _norms(hf)
  else:
    kv_heads = 1 if keys.flag(hf, 'multi_query', True) else heads
    keys.only(hf, 'num_ln_in_parallel_attn', 1, why='new_decoder_architecture is false')
  return ModelConfig(
      layers=keys.size(hf, 'num_hidden_layers'), d_model=width, heads=heads,
      kv_heads=None if kv_heads == heads else kv_heads,
      ffn_hidden=keys.optional_size(hf, 'ffn_hidden_size', None) or 4 * width,
      vocab_size=keys.size(hf, 'vocab_size'), attention=AttentionSpec(position=rope(hf)),
      ffn=activation(hf, 'activation', 'gelu'), norm='layernorm',
      norm_eps=keys.number(hf, 'layer_norm_epsilon', 1e-5), parallel_residual=parallel,
      biases=('qkv', 'out', 'ffn') if keys.flag(hf, 'bias', False) else (),
      tied=keys.flag(hf, 'tie_word_embeddings', True))


def _is_new(hf: dict[str, Any]) -> bool:
  return keys.flag(hf, 'new_decoder_architecture', False)


def _norms(hf: dict[str, Any]) -> int:
  """The norms in front of a block of the newer kind."""
  return keys.only(hf, 'num_ln_in_parallel_attn', 2, 1)


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  table = (config.vocab_size, config.d_model)
  tensors = {'transformer.word_embeddings.weight': vector('embed', (), *table),
             **layer_norm('transformer.ln_f', 'final_norm', (), config.d_model),
             'lm_head.weight': (tied(table, 'transformer.word_embeddings.weight') if config.tied
                                else linear('unembed/kernel', (), table))}
  if not config.parallel_residual:
    norms = ('input_layernorm', 'post_attention_layernorm')
  elif _is_new(hf) and _norms(hf) == 2:
    norms = ('ln_attn', 'ln_mlp')
  else:
    norms = ('input_layernorm', 'input_layernorm')
  for layer in range(config.layers):
    tensors |= _block(config, layer, *norms)
  return tensors


def _block(config: ModelConfig, layer: int, first: str, second: str) -> dict[str, StoredTensor]:
  name, width, hidden = f'transformer.h.{layer}', config.d_model, config.ffn_hidden
  tensors = layer_norm(f'{name}.{first}', 'blocks/norm1', (layer,), width)
  for key, tensor in layer_norm(f'{name}.{second}', 'blocks/norm2', (layer,), width).items():
    # One stored norm that is both fills both.
    known = tensors[key].parts if key in tensors else ()
    tensors[key] = StoredTensor(tensor.shape, (*known, *tensor.parts))
  for theirs, ours, shape in (('self_attention.dense', 'attention/out', (width, width)),
                              ('mlp.dense_h_to_4h', 'ffn/w1', (hidden, width)),
                              ('mlp.dense_4h_to_h', 'ffn/w_out', (width, hidden))):
    tensors[f'{name}.{theirs}.weight'] = linear(f'blocks/{ours}/kernel', (layer,), shape)
    if config.biases:
      tensors[f'{name}.{theirs}.bias'] = vector(f'blocks/{ours}/bias', (layer,), shape[0])
  name, path = f'{name}.self_attention.query_key_value', 'blocks/attention'
  tensors[f'{name}.weight'] = group_by_group(path, (layer,), 'kernel', config.dims, width)
  if config.biases:
    tensors[f'{name}.bias'] = group_by_group(path, (layer,), 'bias', config.dims)
  return tensors
