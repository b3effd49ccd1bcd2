"""Gemma 2: LLaMA with soft caps, norms around its sub-layers, and windows in every second block.

Three constants are folded into the weights: embeddings times sqrt(D), gains that are stored minus
one, and scores over sqrt(query_pre_attn_scalar) instead of sqrt(Dh).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from sink_jax.attention.similarity import CappedExp, Exp, Similarity
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, block, vector

MODEL_TYPES = ('gemma2',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
_NORMS = {'input_layernorm': 'norm1', 'post_attention_layernorm': 'norm1_after',
          'pre_feedforward_layernorm': 'norm2', 'post_feedforward_layernorm': 'norm2_after'}


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  keys.only(hf, 'use_bidirectional_attention', False)
  # `hidden_act`, which older files have as well, is left unread, as transformers does.
  keys.only(hf, 'hidden_activation', 'gelu_pytorch_tanh')
  if not keys.number(hf, 'query_pre_attn_scalar', 256) > 0:
    raise keys.refused('query_pre_attn_scalar', hf['query_pre_attn_scalar'], 'it must be above 0')
  layers = keys.size(hf, 'num_hidden_layers')
  # The family's default, for a config.json without layer_types.
  kinds = ['full_attention' if i % 2 else 'sliding_attention' for i in range(layers)]
  masks = windows.masks(hf, kinds, keys.optional_size(hf, 'sliding_window', 4096))
  limit = cap(hf, 'attn_logit_softcapping', 50.0)
  similarity: Similarity = CappedExp(cap=limit) if limit else Exp()
  spec = AttentionSpec(similarity=similarity, position=rope(hf), mask=masks[0])
  hf = hf | {'hidden_act': None, 'tie_word_embeddings': keys.flag(hf, 'tie_word_embeddings', True)}
  return llama.llama_like(
      hf, kv_heads=4, head_dim=256, attention=spec, pattern=windows.pattern(masks),
      norm_location='sandwich', ffn='tanh_geglu', biases=llama.attention_biases(hf),
      logit_cap=cap(hf, 'final_logit_softcapping', 30.0))


def cap(hf: dict[str, Any], key: str, default: float | None) -> float:
  """A soft cap: the default where the key is missing, and 0 where it is null: there is none."""
  if hf.get(key, default) is None:
    return 0.0
  found = keys.number(hf, key, default or 0.0)
  if not found > 0:
    raise keys.refused(key, hf[key], 'a cap is above 0, and null stands for none')
  return found


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  table = scaled(llama.stored_tensors(hf, config), config)
  scores = math.sqrt(config.dims.head_dim / keys.number(hf, 'query_pre_attn_scalar', 256))
  return {name: changed(tensor, scores) if '.q_proj.' in name else tensor
          for name, tensor in table.items()}


def scaled(table: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
  """LLaMA's table with Gemma's four norms of a block, gains plus one, and scaled embeddings."""
  embedding = math.sqrt(config.d_model)
  for layer in range(config.layers):
    path, i = block(config, layer)
    table |= {f'model.layers.{layer}.{theirs}.weight': changed(
        vector(f'{path}/{ours}/gain', (i,), config.d_model), plus=1)
              for theirs, ours in _NORMS.items()}
  # A tied unembedding is the scaled embedding, and logits are not: the last gain undoes it.
  last = 1 / embedding if config.tied else 1.0
  return table | {
      'model.norm.weight': changed(table['model.norm.weight'], last, plus=1),
      'model.embed_tokens.weight': changed(table['model.embed_tokens.weight'], embedding)}


def changed(tensor: StoredTensor, factor: float = 1.0, plus: float = 0.0) -> StoredTensor:
  """The tensor as its part of a leaf, (x + plus) factor, in float32 whatever the file holds."""
  part, = tensor.parts
  return dataclasses.replace(tensor, parts=(dataclasses.replace(
      part, take=lambda x: (np.asarray(x, np.float32) + plus) * np.float32(factor)),))
