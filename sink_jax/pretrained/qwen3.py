"""Qwen3: LLaMA with normalised queries and keys, and a window in some layers if asked.

The gated models of Qiu et al. 2025 (arXiv 2505.06708) have the same model_type and two keys more,
which transformers does not read; their layout is that of their code (qiuzh20/gated_attention,
modeling_qwen3.py). The projection of queries also gives the gates: for each key head come the
queries of its group, and then their gates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sink_jax.attention.head import ElementGate, HeadGate, HeadOutput, PlainOutput
from sink_jax.attention.per_token import QKNorm
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor, block, vector

MODEL_TYPES = ('qwen3',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  masks = windows.masks_of_qwen(hf)
  spec = AttentionSpec(position=rope(hf), mask=masks[0],
                       qk_norm=QKNorm(eps=keys.number(hf, 'rms_norm_eps', 1e-6)), head=_head(hf))
  keys.only(hf, 'use_qk_norm', True)
  if spec.head != PlainOutput():
    for key in ('qkv_bias', 'attention_bias'):
      keys.only(hf, key, False, why='the gates would share it')
  return llama.llama_like(hf, kv_heads=32, head_dim=128, attention=spec,
                          pattern=windows.pattern(masks),
                          biases=llama.attention_biases(hf))  # `mlp_bias` is no key of Qwen3


def _head(hf: dict[str, Any]) -> HeadOutput:
  """The gate that config.json asks for."""
  gates = {'headwise_attn_output_gate': HeadGate(), 'elementwise_attn_output_gate': ElementGate()}
  given = [key for key in gates if keys.flag(hf, key, False)]
  if len(given) == 2:
    raise keys.refused(given[1], True, f'{given[0]} is true as well, and a head has one gate')
  return gates[given[0]] if given else PlainOutput()


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  tensors = llama.stored_tensors(hf, config)
  for layer in range(config.layers):
    path, i = block(config, layer)
    for ours, theirs in (('query', 'q'), ('key', 'k')):
      tensors[f'model.layers.{layer}.self_attn.{theirs}_norm.weight'] = vector(
          f'{path}/attention/qk_norm_{ours}_gain', (i,), config.dims.head_dim)
    if config.attention.head != PlainOutput():
      tensors[f'model.layers.{layer}.self_attn.q_proj.weight'] = _gated_queries(config, path, i)
  return tensors


def _gated_queries(config: ModelConfig, path: str, i: int) -> StoredTensor:
  """The matrix that gives queries and gates."""
  dims, width = config.dims, config.d_model
  group = dims.heads // dims.kv_heads * dims.head_dim  # rows of the queries of one key head
  gates = config.attention.head.products(dims)

  def rows(part: slice) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.reshape(dims.kv_heads, -1, width)[:, part].reshape(-1, width)

  return StoredTensor((dims.heads * dims.head_dim + gates, width), (
      LeafPart(f'{path}/attention/query/kernel', (i,), rows(slice(group)), transposed=True),
      LeafPart(f'{path}/attention/head_kernel', (i,), rows(slice(group, None)), transposed=True)))
