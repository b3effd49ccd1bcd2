"""Runs with plain softmax as LLaMA."""

from __future__ import annotations

from typing import Any

from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import llama, target
from sink_jax.pretrained.target import Refusal, WrittenTensor

NAME = 'llama'
ARCHITECTURE = 'LlamaForCausalLM'


def refusals(config: ModelConfig) -> list[Refusal]:
  """What keeps a model from being a LLaMA."""
  return target.refusals(config, masks='causal', biases=('attention', 'ffn'))


def keys(config: ModelConfig, context: int) -> dict[str, Any]:
  """The keys of config.json that are LLaMA's own."""
  return target.rotary_keys(config) | {'attention_bias': 'qkv' in config.biases,
                                       'mlp_bias': 'ffn' in config.biases}


def tensors(config: ModelConfig) -> dict[str, WrittenTensor]:
  """Every tensor of the checkpoint, by name."""
  return target.written(llama.stored_tensors({}, config))
