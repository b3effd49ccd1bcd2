"""Mistral: LLaMA with a sliding window."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama, windows
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
  window = keys.optional_size(hf, 'sliding_window', 4096)
  kind = 'full_attention' if window is None else 'sliding_attention'
  kinds = [kind] * keys.size(hf, 'num_hidden_layers')
  # Models with a list of other kinds carry this name, too; transformers would not read it.
  if hf.get('layer_types') not in (None, kinds):
    raise keys.refused('layer_types', hf['layer_types'], 'all layers of this family are alike, '
                       f'here {kind} by sliding_window')
  # All layers are alike, so the shortest period is one layer long.
  mask, = windows.masks(hf, kinds, window)
  return llama.llama_like(hf, kv_heads=8, attention=AttentionSpec(position=rope(hf), mask=mask))
