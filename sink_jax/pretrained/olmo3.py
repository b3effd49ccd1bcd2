"""OLMo 3: OLMo 2 with windows in three of four blocks, where rotary positions are not scaled."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.position import Position
from sink_jax.attention.per_token import ProjectionQKNorm
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama, olmo2, windows
from sink_jax.pretrained.rope import rope

MODEL_TYPES = ('olmo3',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
stored_tensors = olmo2.stored_tensors


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  keys.only(hf, 'clip_qkv', None)
  layers = keys.size(hf, 'num_hidden_layers')
  kinds = ['sliding_attention' if (i + 1) % 4 else 'full_attention' for i in range(layers)]
  masks = windows.masks(hf, kinds, keys.optional_size(hf, 'sliding_window', 4096))
  mask, position, pattern = windows.patterned(layers, masks, _positions(hf))
  norm = ProjectionQKNorm(eps=keys.number(hf, 'rms_norm_eps', 1e-5))
  return llama.llama_like(
      hf, eps=1e-5, norm_location='after', biases=llama.attention_biases(hf), pattern=pattern,
      attention=AttentionSpec(position=position, mask=mask, qk_norm=norm))


def _positions(hf: dict[str, Any]) -> windows.PositionOf:
  # Of another base in the old form transformers gives blocks with a window the default one.
  base = float(keys.only(hf, 'rope_theta', 500000, 500000.0))
  if hf.get('rope_parameters') is not None:
    return windows.positions_by_kind(hf, base, base)
  by_kind: dict[bool, Position] = {False: rope(hf, base=base), True: rope({'rope_theta': base})}
  return lambda slides: by_kind[slides]
