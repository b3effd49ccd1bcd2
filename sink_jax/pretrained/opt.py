"""OPT, whose smallest sizes differ: 350m is post-norm and has narrower embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from sink_jax.attention.position import Learned
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys
from sink_jax.pretrained.gpt2 import activation, layer_norm
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor, linear, tied, vector

MODEL_TYPES = ('opt',)
PREFIX = 'model.'
IGNORED = (r'.*decoder\.version',)
# The position of the first token is row 2 of the stored table; only padding reads the rows before.
_OFFSET = 2


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes; 350m alone is post-norm and projects embeddings.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  keys.not_quantized(hf)
  keys.only(hf, '_remove_final_layer_norm', False, why='pre-norm models have a final norm here')
  keys.only(hf, 'layer_norm_elementwise_affine', True)
  width = keys.size(hf, 'hidden_size')
  embedding = keys.optional_size(hf, 'word_embed_proj_dim', None)
  return ModelConfig(
      layers=keys.size(hf, 'num_hidden_layers'), d_model=width,
      heads=keys.size(hf, 'num_attention_heads'), ffn_hidden=keys.size(hf, 'ffn_dim'),
      vocab_size=keys.size(hf, 'vocab_size'),
      # transformers makes no projection where the two widths are equal.
      embedding_dim=None if embedding == width else embedding,
      attention=AttentionSpec(position=Learned(keys.size(hf, 'max_position_embeddings'))),
      ffn=activation(hf, 'activation_function', 'relu'), norm='layernorm', norm_eps=1e-5,
      norm_location='pre' if keys.flag(hf, 'do_layer_norm_before', True) else 'post',
      biases=('qkv', 'out', 'ffn') if keys.flag(hf, 'enable_bias', True) else (),
      tied=keys.flag(hf, 'tie_word_embeddings', True))


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  width, position = config.d_model, config.attention.position
  assert isinstance(position, Learned), 'the family has learned positions'
  table, name = (config.vocab_size, config.embedding_dim or width), 'model.decoder'
  tensors = {f'{name}.embed_tokens.weight': vector('embed', (), *table),
             f'{name}.embed_positions.weight': StoredTensor(
                 (position.max_length + _OFFSET, width),
                 (LeafPart('positions', (), _without_padding),)),
             'lm_head.weight': (tied(table, f'{name}.embed_tokens.weight') if config.tied
                                else linear('unembed/kernel', (), table))}
  # The post-norm model ends with the norm of its last block.
  if config.norm_location == 'pre':
    tensors |= layer_norm(f'{name}.final_layer_norm', 'final_norm', (), width)
  if config.embedding_dim:
    tensors |= {
        f'{name}.project_in.weight': linear('embed_in/kernel', (), (width, table[1])),
        f'{name}.project_out.weight': linear('embed_out/kernel', (), (table[1], width))}
  for layer in range(config.layers):
    tensors |= _block(config, layer)
  return tensors


def _block(config: ModelConfig, layer: int) -> dict[str, StoredTensor]:
  name, width, hidden = f'model.decoder.layers.{layer}', config.d_model, config.ffn_hidden
  tensors = (layer_norm(f'{name}.self_attn_layer_norm', 'blocks/norm1', (layer,), width)
             | layer_norm(f'{name}.final_layer_norm', 'blocks/norm2', (layer,), width))
  square = (width, width)
  for theirs, ours, shape in (('self_attn.q_proj', 'attention/query', square),
                              ('self_attn.k_proj', 'attention/key', square),
                              ('self_attn.v_proj', 'attention/value', square),
                              ('self_attn.out_proj', 'attention/out', square),
                              ('fc1', 'ffn/w1', (hidden, width)),
                              ('fc2', 'ffn/w_out', (width, hidden))):
    tensors[f'{name}.{theirs}.weight'] = linear(f'blocks/{ours}/kernel', (layer,), shape)
    if config.biases:
      tensors[f'{name}.{theirs}.bias'] = vector(f'blocks/{ours}/bias', (layer,), shape[0])
  return tensors


def _without_padding(table: np.ndarray) -> np.ndarray:
  return table[_OFFSET:]
