"""Runs with gates and QK-norm as Qwen3-Next, with full attention and without experts.

Its projection of queries holds the gate of each head's channels behind the head's query, and the
gains of all its norms are stored minus one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from sink_jax.attention.head import ElementGate, PlainOutput
from sink_jax.attention.per_token import QKNorm
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import qwen3, target
from sink_jax.pretrained.stored_tensors import block
from sink_jax.pretrained.target import Leaves, Refusal, WrittenTensor

NAME = 'qwen3_next'
ARCHITECTURE = 'Qwen3NextForCausalLM'


def refusals(config: ModelConfig) -> list[Refusal]:
  """What keeps a model from being a Qwen3-Next, all of whose norms share one eps."""
  return target.refusals(config, masks='causal', qk_norm=QKNorm(eps=config.norm_eps),
                         head=ElementGate())


def keys(config: ModelConfig, context: int) -> dict[str, Any]:
  """The keys of config.json that are Qwen3-Next's own; its defaults are another model's."""
  return target.rotary_keys(config) | {
      'partial_rotary_factor': 1.0, 'attention_bias': False,
      'layer_types': ['full_attention'] * config.layers,
      # Blocks without experts; no block has more than this one network.
      'mlp_only_layers': list(range(config.layers)), 'num_experts': 0}


def tensors(config: ModelConfig) -> dict[str, WrittenTensor]:
  """Every tensor of the checkpoint, by name."""
  plain = target.written(qwen3.stored_tensors({}, dataclasses.replace(
      config, attention=dataclasses.replace(config.attention, head=PlainOutput()))))
  table = {name: WrittenTensor(tensor.shape, _minus_one(tensor.make))
           if name.endswith('norm.weight') else tensor for name, tensor in plain.items()}
  for layer in range(config.layers):
    name = f'model.layers.{layer}.self_attn.q_proj.weight'
    outputs, inputs = plain[name].shape
    table[name] = WrittenTensor((2 * outputs, inputs), _with_gates(config, layer))
  return table


def _minus_one(make: Callable[[Leaves], np.ndarray]) -> Callable[[Leaves], np.ndarray]:
  """A gain as what is added to one; in float64, since it is near to one."""
  return lambda leaf: np.asarray(make(leaf), np.float64) - 1


def _with_gates(config: ModelConfig, layer: int) -> Callable[[Leaves], np.ndarray]:
  """The queries of each head (Dh, D) and behind them its gates (Dh, D), for all heads."""
  (path, i), dims = block(config, layer), config.dims

  def make(leaf: Leaves) -> np.ndarray:
    query, gate = (leaf(f'{path}/attention/{name}', (i,)).T.reshape(dims.heads, dims.head_dim, -1)
                   for name in ('query/kernel', 'head_kernel'))
    return np.concatenate([query, gate], 1).reshape(-1, config.d_model)

  return make
