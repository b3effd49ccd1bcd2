"""Runs with plain softmax in windows of one size as Mistral."""

from __future__ import annotations

from typing import Any

from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import llama, target
from sink_jax.pretrained.target import Refusal, WrittenTensor

NAME = 'mistral'
ARCHITECTURE = 'MistralForCausalLM'


def refusals(config: ModelConfig) -> list[Refusal]:
  """What keeps a model from being a Mistral, which has no biases."""
  return target.refusals(config, masks='window')


def keys(config: ModelConfig, context: int) -> dict[str, Any]:
  """The keys of config.json that are Mistral's own."""
  return target.rotary_keys(config) | {'sliding_window': target.window_of(config)}


def tensors(config: ModelConfig) -> dict[str, WrittenTensor]:
  """Every tensor of the checkpoint, by name."""
  return target.written(llama.stored_tensors({}, config))
