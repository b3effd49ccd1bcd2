"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys
from sink_jax.pretrained.gpt2 import activation, layer_norm
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, group_by_group, linear, tied, vector

MODEL_TYPES = ('gpt_neox',)
PREFIX = 'gpt_neox.'
# Causal masks, what they put on scores, and frequencies that follow from config.json.
IGNORED = (r'.*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)',)


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  keys.not_quantized(hf)
  # `attention_bias` concerns attention alone: the feed-forward layers always have biases.
  attention = ('qkv', 'out') if keys.flag(hf, 'attention_bias', True) else ()
  # Other families have these two keys under other names, which `rope` reads.
  angles = hf | {'rope_theta': hf.get('rotary_emb_base'),
                 'partial_rotary_factor': hf.get('rotary_pct')}
  return ModelConfig(
      layers=keys.size(hf, 'num_hidden_layers'), d_model=keys.size(hf, 'hidden_size'),
      heads=keys.size(hf, 'num_attention_heads'), ffn_hidden=keys.size(hf, 'intermediate_size'),
      vocab_size=keys.size(hf, 'vocab_size'),
      attention=AttentionSpec(position=rope(angles, fraction=0.25)),
      ffn=activation(hf, 'hidden_act', 'gelu'), norm='layernorm',
      norm_eps=keys.number(hf, 'layer_norm_eps', 1e-5),
      parallel_residual=keys.flag(hf, 'use_parallel_residual', True),
      biases=(*attention, 'ffn'), tied=keys.flag(hf, 'tie_word_embeddings', False))


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  table = (config.vocab_size, config.d_model)
  tensors = {'gpt_neox.embed_in.weight': vector('embed', (), *table),
             **layer_norm('gpt_neox.final_layer_norm', 'final_norm', (), config.d_model),
             'embed_out.weight': (tied(table, 'gpt_neox.embed_in.weight') if config.tied
                                  else linear('unembed/kernel', (), table))}
  for layer in range(config.layers):
    tensors |= _block(config, layer)
  return tensors


def _block(config: ModelConfig, layer: int) -> dict[str, StoredTensor]:
  name, width, hidden = f'gpt_neox.layers.{layer}', config.d_model, config.ffn_hidden
  tensors = (layer_norm(f'{name}.input_layernorm', 'blocks/norm1', (layer,), width)
             | layer_norm(f'{name}.post_attention_layernorm', 'blocks/norm2', (layer,), width))
  for theirs, ours, shape, group in (
      ('attention.dense', 'attention/out', (width, width), 'out'),
      ('mlp.dense_h_to_4h', 'ffn/w1', (hidden, width), 'ffn'),
      ('mlp.dense_4h_to_h', 'ffn/w_out', (width, hidden), 'ffn')):
    tensors[f'{name}.{theirs}.weight'] = linear(f'blocks/{ours}/kernel', (layer,), shape)
    if group in config.biases:
      tensors[f'{name}.{theirs}.bias'] = vector(f'blocks/{ours}/bias', (layer,), shape[0])

  name = f'{name}.attention.query_key_value'
  path = 'blocks/attention'
  tensors[f'{name}.weight'] = group_by_group(path, (layer,), 'kernel', config.dims, width)
  if 'qkv' in config.biases:
    tensors[f'{name}.bias'] = group_by_group(path, (layer,), 'bias', config.dims)
  return tensors
