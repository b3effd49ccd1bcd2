"""Runs with sink logits as GraniteSWA, with or without windows and positions.

Its attention multiplies the output of softmax by sigmoid(lse - sink), which is softmax with the
sink's logit beside the scores and without a value for it. Its other defaults are another model's
(multipliers, biases of nothing, windows in three of four blocks, tied embeddings), so all keys that
matter are written.
"""

from __future__ import annotations

import math
from typing import Any

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.position import Rope
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import granite_swa, target
from sink_jax.pretrained.target import Refusal, WrittenTensor

NAME = 'granite_swa'
ARCHITECTURE = 'GraniteSWAForCausalLM'
_UNUSED_BASE = 10000.0  # of a model whose blocks have no positions


def refusals(config: ModelConfig) -> list[Refusal]:
  """What keeps a model from being a GraniteSWA."""
  return target.refusals(config, masks='any', biases=('attention', 'ffn'), kv_bias=SinkLogit,
                         nope=True, scaled=False)


def keys(config: ModelConfig, context: int) -> dict[str, Any]:
  """The keys of config.json that are GraniteSWA's own."""
  # 0: a block without positions.
  bases = [position.base if isinstance(position, Rope) else 0
           for position in target.positions_of(config)]
  return {
      'rope_parameters': {'rope_type': 'default', 'rope_theta': max(bases) or _UNUSED_BASE},
      'layer_rope_theta': bases,
      'layer_types': target.layer_types(config),
      # A number also where no block has a window: the class makes the mask of one in any case.
      'sliding_window': target.window_of(config) or context,
      'attention_bias': 'qkv' in config.biases, 'mlp_bias': 'ffn' in config.biases,
      'attention_multiplier': 1 / math.sqrt(config.dims.head_dim), 'embedding_multiplier': 1.0,
      'residual_multiplier': 1.0, 'logits_scaling': 1.0}


def tensors(config: ModelConfig) -> dict[str, WrittenTensor]:
  """Every tensor of the checkpoint, by name."""
  return target.written(granite_swa.unscaled_tensors(config))
