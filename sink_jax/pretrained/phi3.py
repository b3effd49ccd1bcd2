"""Phi-3 and Phi-4: LLaMA with fused projections, windows and a partial rotation where asked for."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.rope import rope, rotary_parameters
from sink_jax.pretrained.stored_tensors import StoredTensor, beside

MODEL_TYPES = ('phi3',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
_FUSED = {'self_attn.qkv_proj': ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
          'mlp.gate_up_proj': ('mlp.gate_proj', 'mlp.up_proj')}


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes: one of its short contexts, not the 128k ones.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  rotary = rotary_parameters(hf)
  for key in ('rope_type', 'type'):
    # The family calls LongRoPE 'su' or 'yarn', too, in its older files.
    keys.only(rotary, key, 'default', why='LongRoPE has angles that depend on the length of the '
              'input; models with a context of 4k or 8k have none of it')
  spec = AttentionSpec(position=rope(hf, fraction=1.0), mask=windows.one_mask(hf, None))
  return llama.llama_like(hf, eps=1e-5, attention=spec)


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  tensors = llama.stored_tensors(hf, config)
  for layer in range(config.layers):
    name = f'model.layers.{layer}'
    for fused, parts in _FUSED.items():
      tensors[f'{name}.{fused}.weight'] = beside(*(tensors.pop(f'{name}.{part}.weight')
                                                   for part in parts))
  return tensors
