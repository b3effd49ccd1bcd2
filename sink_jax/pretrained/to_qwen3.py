"""Runs with QK-norm as Qwen3, with or without windows in some of the blocks."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.per_token import QKNorm
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import qwen3, target
from sink_jax.pretrained.target import Refusal, WrittenTensor

NAME = 'qwen3'
ARCHITECTURE = 'Qwen3ForCausalLM'


def refusals(config: ModelConfig) -> list[Refusal]:
  """What keeps a model from being a Qwen3, all of whose norms share one eps."""
  return target.refusals(config, masks='any', biases=('attention',),
                         qk_norm=QKNorm(eps=config.norm_eps))


def keys(config: ModelConfig, context: int) -> dict[str, Any]:
  """The keys of config.json that are Qwen3's own."""
  window = target.window_of(config)
  # `layer_types` says it all; versions without it take the blocks from `max_window_layers` on.
  kinds = target.layer_types(config)
  first = kinds.index('sliding_attention') if window else config.layers
  return target.rotary_keys(config) | {
      'attention_bias': 'qkv' in config.biases, 'use_sliding_window': window is not None,
      'sliding_window': window, 'max_window_layers': first, 'layer_types': kinds}


def tensors(config: ModelConfig) -> dict[str, WrittenTensor]:
  """Every tensor of the checkpoint, by name."""
  return target.written(qwen3.stored_tensors({}, config))
