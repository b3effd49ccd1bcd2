"""GraniteSWA: Granite with sink logits, windows and rotary bases of their own in each block.

A base of 0 stands for a block without positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.position import Nope, Position, Rope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import granite, keys, llama, windows
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, block, vector

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
  mask, position, pattern = windows.patterned(layers, masks, _positions(hf, layers))
  spec = AttentionSpec(position=position, mask=mask, kv_bias=SinkLogit())
  hf = hf | {'tie_word_embeddings': keys.flag(hf, 'tie_word_embeddings', True)}
  granite.check_multipliers(hf)
  return llama.llama_like(hf, kv_heads=4, eps=1e-5, attention=spec, pattern=pattern,
                          biases=llama.biases(hf))


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
  return granite.scaled(hf, config, unscaled_tensors(config))


def unscaled_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
  """The tensors of a checkpoint all of whose multipliers change nothing."""
  table = llama.stored_tensors({}, config)
  for layer in range(config.layers):
    path, i = block(config, layer)
    table[f'model.layers.{layer}.self_attn.sinks'] = vector(
        f'{path}/attention/kv_bias_logit', (i,), config.heads)
  return table
