"""OLMo 2: LLaMA with norms behind the sub-layers, and QK-norm over all heads of a token."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.per_token import ProjectionQKNorm
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor, block, vector

MODEL_TYPES = ('olmo2',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  # Keys of the first OLMo, whose config.json of today has another model_type.
  keys.only(hf, 'clip_qkv', None)
  norm = ProjectionQKNorm(eps=keys.number(hf, 'rms_norm_eps', 1e-5))
  return llama.llama_like(
      hf, eps=1e-5, norm_location='after', biases=llama.attention_biases(hf),
      attention=AttentionSpec(position=rope(hf), qk_norm=norm))


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  tensors, dims = llama.stored_tensors(hf, config), config.dims
  for layer in range(config.layers):
    (path, i), name = block(config, layer), f'model.layers.{layer}'
    del tensors[f'{name}.input_layernorm.weight']
    for theirs, ours in (('post_attention_layernorm', 'norm1_after'),
                         ('post_feedforward_layernorm', 'norm2_after')):
      tensors[f'{name}.{theirs}.weight'] = vector(f'{path}/{ours}/gain', (i,), config.d_model)
    for theirs, ours, heads in (('q', 'query', dims.heads), ('k', 'key', dims.kv_heads)):
      # One vector in the file: the channels of one head after those of another.
      tensors[f'{name}.self_attn.{theirs}_norm.weight'] = StoredTensor(
          (heads * dims.head_dim,), (LeafPart(
              f'{path}/attention/qk_norm_{ours}_gain', (i,),
              lambda x: x.reshape(-1, dims.head_dim)),))
  return tensors
