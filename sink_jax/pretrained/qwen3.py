"""Qwen3: LLaMA with normalised queries and keys, and a window in some layers if asked."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.qk_norm import QKNorm
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, block, vector

MODEL_TYPES = ('qwen3',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  layers, window = keys.size(hf, 'num_hidden_layers'), None
  if keys.flag(hf, 'use_sliding_window', False):
    window = keys.optional_size(hf, 'sliding_window', 4096)
  # The layers before this one see everything; without a window all of them do.
  first = keys.number(hf, 'max_window_layers', 28) if window else layers
  kinds = ['sliding_attention' if i >= first else 'full_attention' for i in range(layers)]
  masks = windows.masks(hf, kinds, window)
  spec = AttentionSpec(position=rope(hf), mask=masks[0],
                       qk_norm=QKNorm(eps=keys.number(hf, 'rms_norm_eps', 1e-6)))
  pattern = (Layer(),) if len(masks) == 1 else tuple(Layer(mask=mask) for mask in masks)
  return llama.llama_like(hf, kv_heads=32, head_dim=128, attention=spec, pattern=pattern,
                          biases=llama.attention_biases(hf))  # `mlp_bias` is no key of Qwen3


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  tensors = llama.stored_tensors(hf, config)
  for layer in range(config.layers):
    path, i = block(config, layer)
    for ours, theirs in (('query', 'q'), ('key', 'k')):
      tensors[f'model.layers.{layer}.self_attn.{theirs}_norm.weight'] = vector(
          f'{path}/attention/qk_norm_{ours}_gain', (i,), config.dims.head_dim)
  return tensors
