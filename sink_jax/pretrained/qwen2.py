"""Qwen2 and Qwen2.5: LLaMA with biases of queries, keys and values, and a window if asked."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import llama, windows
from sink_jax.pretrained.rope import rope

MODEL_TYPES = ('qwen2',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
stored_tensors = llama.stored_tensors


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  masks = windows.masks_of_qwen(hf)
  spec = AttentionSpec(position=rope(hf), mask=masks[0])
  # The biases are no option of this family, and the output of its attention never has one.
  return llama.llama_like(hf, kv_heads=32, attention=spec, pattern=windows.pattern(masks),
                          biases=('qkv',))
