"""GraniteSWA: LLaMA with sink logits, windows and rotary bases of their own in each block.

Its four multipliers are folded into the weights, so that the model is one without them. A base of
0 stands for a block without positions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.position import Nope, Position, Rope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, block, shortest_period, vector

MODEL_TYPES = ('granite_swa',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  layers = keys.size(hf, 'num_hidden_layers')
  # The family's default, for a config.json without layer_types.
  kinds = ['sliding_attention' if i % 4 else 'full_attention' for i in range(layers)]
  masks = windows.masks(hf, kinds, keys.optional_size(hf, 'sliding_window', 128))
  masks *= layers // len(masks)
  period = shortest_period(list(zip(masks, _positions(hf, layers), strict=True)))
  mask, position = period[0]
  pattern = tuple(Layer(mask=None if own == mask else own, position=None if at == position else at)
                  for own, at in period)
  spec = AttentionSpec(position=position, mask=mask, kv_bias=SinkLogit())
  hf = hf | {'tie_word_embeddings': keys.flag(hf, 'tie_word_embeddings', True)}
  for key in _MULTIPLIERS:
    if not keys.number(hf, key, 1.0) > 0:
      raise keys.refused(key, hf[key], 'it must be above 0')
  return llama.llama_like(hf, kv_heads=4, eps=1e-5, attention=spec, pattern=pattern,
                          biases=llama.biases(hf))


_MULTIPLIERS = ('embedding_multiplier', 'attention_multiplier', 'residual_multiplier',
                'logits_scaling')


def _positions(hf: dict[str, Any], layers: int) -> list[Position]:
  """The encoding of every block."""
  common = rope(hf)
  assert isinstance(common, Rope), 'what else `rope` returns are kinds of Rope'
  bases = hf.get('layer_rope_theta')
  if bases is None:
    return [common] * layers
  if not isinstance(bases, list) or len(bases) != layers:
    raise ValueError(f'config.json: layer_rope_theta = {str(bases)[:50]} must be a list of '
                     f'num_hidden_layers = {layers} numbers.')
  bases = [keys.number({'layer_rope_theta': base}, 'layer_rope_theta', 0)
           for base in bases]
  if min(bases) < 0:
    raise keys.refused('layer_rope_theta', bases, 'a base is above 0, and 0 stands for none')
  return [dataclasses.replace(common, base=base) if base else Nope() for base in bases]


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  embedding, scores, residual, logits = (keys.number(hf, key, 1.0) for key in _MULTIPLIERS)
  factors = {
      'embed_tokens': embedding, 'o_proj': residual, 'down_proj': residual,
      # Scores are multiplied by it in place of 1/sqrt(Dh), which the model has.
      'q_proj': scores * math.sqrt(config.dims.head_dim),
      # Logits are divided by it; a tied unembedding is the scaled embedding, which is undone, too.
      'model.norm': 1 / (logits * embedding) if config.tied else 1 / logits}
  table = unscaled_tensors(config)
  for name, tensor in table.items():
    for key, factor in factors.items():
      if f'.{key}.' in f'.{name}':
        table[name] = _scaled(tensor, factor)
  return table


def unscaled_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
  """The tensors of a checkpoint all of whose multipliers change nothing."""
  table = llama.stored_tensors({}, config)
  for layer in range(config.layers):
    path, i = block(config, layer)
    table[f'model.layers.{layer}.self_attn.sinks'] = vector(
        f'{path}/attention/kv_bias_logit', (i,), config.heads)
  return table


def _scaled(tensor: StoredTensor, factor: float) -> StoredTensor:
  """The tensor whose part of a leaf is multiplied, in float32 whatever the file holds."""
  if np.float32(factor) == 1:
    return tensor
  part, = tensor.parts
  return dataclasses.replace(tensor, parts=(dataclasses.replace(
      part, take=lambda x: np.asarray(x, np.float32) * np.float32(factor)),))
