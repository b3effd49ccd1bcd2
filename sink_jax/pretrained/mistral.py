"""Mistral: LLaMA with a sliding window."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import llama, windows
from sink_jax.pretrained.rope import rope

# The same tensors as LLaMA: a family is a module, which may take what another one has.
MODEL_TYPES = ('mistral',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
stored_tensors = llama.stored_tensors


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  spec = AttentionSpec(position=rope(hf), mask=windows.one_mask(hf, 4096))
  return llama.llama_like(hf, kv_heads=8, attention=spec)
