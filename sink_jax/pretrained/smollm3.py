"""SmolLM3: LLaMA without positions in every fourth block."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.position import Nope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.rope import rope

MODEL_TYPES = ('smollm3',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
stored_tensors = llama.stored_tensors


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  layers = keys.size(hf, 'num_hidden_layers')
  rotated = _rotated(hf, layers)
  window = keys.optional_size(hf, 'sliding_window', None)
  if not keys.flag(hf, 'use_sliding_window', False):
    window = None
  kinds = ['full_attention' if rotary or window is None else 'sliding_attention'
           for rotary in rotated]
  masks = windows.masks(hf, kinds, window)
  position = rope(hf, base=2e6)
  mask, first, pattern = windows.patterned(
      layers, masks, [position if rotary else Nope() for rotary in rotated])
  hf = hf | {'tie_word_embeddings': keys.flag(hf, 'tie_word_embeddings', True)}
  return llama.llama_like(hf, kv_heads=4, attention=AttentionSpec(position=first, mask=mask),
                          pattern=pattern, biases=llama.biases(hf))


def _rotated(hf: dict[str, Any], layers: int) -> list[bool]:
  """Which blocks rotate queries and keys; the list of config.json has a 1 for each of them."""
  listed = hf.get('no_rope_layers')
  if listed is None:
    every = 4 if hf.get('no_rope_layer_interval') is None else keys.size(
        hf, 'no_rope_layer_interval')
    return [(i + 1) % every != 0 for i in range(layers)]
  if not isinstance(listed, list) or len(listed) != layers or not set(listed) <= {0, 1}:
    raise keys.refused('no_rope_layers', listed,
                       f'it must be a list of num_hidden_layers = {layers} times 0 or 1')
  return [bool(rotary) for rotary in listed]
