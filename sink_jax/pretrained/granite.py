"""Granite: LLaMA with four multipliers.

They are folded into the weights, so that the model is one without them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama
from sink_jax.pretrained.stored_tensors import StoredTensor

MODEL_TYPES = ('granite',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
_MULTIPLIERS = ('embedding_multiplier', 'attention_multiplier', 'residual_multiplier',
                'logits_scaling')


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  check_multipliers(hf)
  return llama.model_config(hf)


def check_multipliers(hf: dict[str, Any]) -> None:
  """Raises a ValueError where a multiplier is no number above 0."""
  for key in _MULTIPLIERS:
    if not keys.number(hf, key, 1.0) > 0:
      raise keys.refused(key, hf[key], 'it must be above 0')


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  return scaled(hf, config, llama.stored_tensors(hf, config))


def scaled(hf: dict[str, Any], config: ModelConfig,
           tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
  """The tensors of a model that is LLaMA outside of its attention, with the multipliers in them."""
  embedding, scores, residual, logits = (keys.number(hf, key, 1.0) for key in _MULTIPLIERS)
  factors = {
      'embed_tokens': embedding, 'o_proj': residual, 'down_proj': residual,
      # Scores are multiplied by it in place of 1/sqrt(Dh), which the model has.
      'q_proj': scores * math.sqrt(config.dims.head_dim),
      # Logits are divided by it; a tied unembedding is the scaled embedding, which is undone, too.
      'model.norm': 1 / (logits * embedding) if config.tied else 1 / logits}
  tensors = dict(tensors)
  for name, tensor in tensors.items():
    for key, factor in factors.items():
      if f'.{key}.' in f'.{name}':
        tensors[name] = _scaled(tensor, factor)
  return tensors


def _scaled(tensor: StoredTensor, factor: float) -> StoredTensor:
  """The tensor whose part of a leaf is multiplied, in float32 whatever the file holds."""
  if np.float32(factor) == 1:
    return tensor
  part, = tensor.parts
  return dataclasses.replace(tensor, parts=(dataclasses.replace(
      part, take=lambda x: np.asarray(x, np.float32) * np.float32(factor)),))
