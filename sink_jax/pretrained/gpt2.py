"""GPT-2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sink_jax.attention.position import Learned
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor, linear, tied, vector

MODEL_TYPES = ('gpt2',)
PREFIX = 'transformer.'
IGNORED = (r'.*\.attn\.(bias|masked_bias)',)  # causal masks, and what they put on scores

# From names of transformers to those of `ModelConfig.ffn`. Its gelu_new, gelu_pytorch_tanh and
# gelu_fast are one function, the tanh approximation, computed in three ways.
_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh',
                'gelu_fast': 'gelu_tanh', 'gelu': 'gelu', 'relu': 'relu', 'silu': 'swish',
                'swish': 'swish'}


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  `reorder_and_upcast_attn` is left unread: it changes the precision of float16 alone.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  keys.not_quantized(hf)
  # Cross-attention adds a block of weights that no decoder here has.
  keys.only(hf, 'add_cross_attention', False)
  width = keys.size(hf, 'n_embd')
  return ModelConfig(
      layers=keys.size(hf, 'n_layer'), d_model=width, heads=keys.size(hf, 'n_head'),
      # A missing or null `n_inner` stands for 4 times the width.
      ffn_hidden=keys.optional_size(hf, 'n_inner', None) or 4 * width,
      vocab_size=keys.size(hf, 'vocab_size'),
      attention=AttentionSpec(position=Learned(keys.size(hf, 'n_positions'))),
      ffn=activation(hf, 'activation_function', 'gelu_new'), norm='layernorm',
      norm_eps=keys.number(hf, 'layer_norm_epsilon', 1e-5), biases=('qkv', 'out', 'ffn'),
      tied=keys.flag(hf, 'tie_word_embeddings', True))


def activation(hf: dict[str, Any], key: str, default: str) -> str:
  """The `ModelConfig.ffn` of a feed-forward network of two matrices, by its activation.

  Raises:
    ValueError: there is none of that name.
  """
  others = [name for name in _ACTIVATIONS if name != default]
  return _ACTIVATIONS[keys.only(hf, key, default, *others)]


def layer_norm(theirs: str, ours: str, index: tuple[int, ...],
               width: int) -> dict[str, StoredTensor]:
  """Gain and bias of a LayerNorm."""
  return {f'{theirs}.weight': vector(f'{ours}/gain', index, width),
          f'{theirs}.bias': vector(f'{ours}/bias', index, width)}


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name.

  Attention that is not scaled by 1 / sqrt(Dh), or that is scaled by 1 / layer as well, has
  the difference in its query weights and biases here. Scores are the checkpoint's; recorded
  queries and their norms are larger or smaller by that factor.
  """
  position = config.attention.position
  assert isinstance(position, Learned), 'the family has learned positions'
  table = (config.vocab_size, config.d_model)
  tensors = {'transformer.wte.weight': vector('embed', (), *table),
             'transformer.wpe.weight': vector('positions', (), position.max_length, config.d_model),
             **layer_norm('transformer.ln_f', 'final_norm', (), config.d_model),
             'lm_head.weight': (tied(table, 'transformer.wte.weight') if config.tied
                                else linear('unembed/kernel', (), table))}
  for layer in range(config.layers):
    tensors |= _block(config, layer, query_factor(hf, config, layer))
  return tensors


def query_factor(hf: dict[str, Any], config: ModelConfig, layer: int) -> float:
  """The factor on the queries of a layer that makes up for our scaling by 1 / sqrt(Dh)."""
  factor = 1.0
  if not keys.flag(hf, 'scale_attn_weights', True):
    # Cancels the division of scores by sqrt(Dh), which AttentionSpec always has.
    factor *= math.sqrt(config.dims.head_dim)
  if keys.flag(hf, 'scale_attn_by_inverse_layer_idx', False):
    # transformers divides the scores of layer i, counted from 0, by i + 1.
    factor /= layer + 1
  return factor


def _block(config: ModelConfig, layer: int, factor: float) -> dict[str, StoredTensor]:
  """One block. Its weights are stored as (in, out), with q, k and v side by side."""
  name, width, hidden = f'transformer.h.{layer}', config.d_model, config.ffn_hidden
  tensors = (layer_norm(f'{name}.ln_1', 'blocks/norm1', (layer,), width)
             | layer_norm(f'{name}.ln_2', 'blocks/norm2', (layer,), width))
  for theirs, ours, size in (('attn.c_proj', 'attention/out', (width, width)),
                             ('mlp.c_fc', 'ffn/w1', (width, hidden)),
                             ('mlp.c_proj', 'ffn/w_out', (hidden, width))):
    path = f'blocks/{ours}'
    # `vector`, not `linear`: this family's weights are (in, out) in the file, too.
    tensors[f'{name}.{theirs}.weight'] = vector(f'{path}/kernel', (layer,), *size)
    tensors[f'{name}.{theirs}.bias'] = vector(f'{path}/bias', (layer,), size[1])
  for kind, leaf, shape in (('weight', 'kernel', (width, 3 * width)),
                            ('bias', 'bias', (3 * width,))):
    tensors[f'{name}.attn.c_attn.{kind}'] = StoredTensor(shape, tuple(
        # A score is linear in its query, so a factor on the query's weights and bias is one on
        # scores.
        LeafPart(f'blocks/attention/{ours}/{leaf}', (layer,), _columns(j, width, scale))
        for j, (ours, scale) in enumerate((('query', factor), ('key', 1), ('value', 1)))))
  return tensors


def _columns(j: int, width: int, factor: float) -> Callable[[np.ndarray], np.ndarray]:
  def take(x: np.ndarray) -> np.ndarray:
    part = x[..., j * width:(j + 1) * width]
    # In float32, since the product of a float16 number and the factor is rounded otherwise.
    return part if factor == 1 else np.float32(factor) * part.astype(np.float32)
  return take
