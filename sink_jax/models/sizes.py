"""Named sizes, parameter counts and FLOPs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import jax

from sink_jax.arguments import check_known
from sink_jax.attention.mask import Mask
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.transformer import init_params

# '60m' and '1b' are the paper's (Section 4, Section 7.4), '7b' and '13b' LLaMA-2's (Touvron et
# al. 2023); 'tiny' is for two CPU cores.
SIZES: dict[str, dict[str, Any]] = {
  'tiny': dict(layers=2, d_model=64, heads=4, ffn_hidden=128),
  '60m': dict(layers=10, d_model=768, heads=8, ffn_hidden=1536),
  '1b': dict(layers=22, d_model=2048, heads=16, ffn_hidden=5632),
  '7b': dict(layers=32, d_model=4096, heads=32, ffn_hidden=11008),
  '13b': dict(layers=40, d_model=5120, heads=40, ffn_hidden=13824),
}


def sized(size: str, **overrides: Any) -> ModelConfig:
  """Returns the ModelConfig of a named size, with fields such as vocab_size, which no size sets."""
  check_known(size, SIZES, 'Unknown model size')
  return ModelConfig(**SIZES[size] | overrides)


@functools.lru_cache
def parameter_shapes(config: ModelConfig) -> ParamTree:
  """The parameter tree with a `jax.ShapeDtypeStruct` for every array; allocates nothing."""
  return jax.eval_shape(functools.partial(init_params, config), 0)


def parameter_count(config: ModelConfig, *, embeddings: bool = True) -> int:
  """Returns the number of parameters of a model.

  Singular vectors of sigma-reparam count; without `embeddings` token embeddings, unembedding and
  position embeddings do not.
  """
  left_out = () if embeddings else ('embed', 'unembed', 'positions')
  counted = {name: tree for name, tree in parameter_shapes(config).items() if name not in left_out}
  return sum(math.prod(x.shape) for x in jax.tree.leaves(counted))


def flops_per_token(config: ModelConfig, length: int) -> float:
  """FLOPs of matrix products per token of one training step: forward once, backward twice.

  Look-ups, feature maps, biases and the recurrence of Mamba mixers do not count.
  """
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  # The size of a gate's 'head_kernel' is its number of products per token for any input.
  linear = sum(math.prod(x.shape) for path, x in leaves if path[-1].key.endswith('kernel'))
  if config.tied:  # a product with the embedding's table, which is not a kernel
    linear += config.vocab_size * (config.embedding_dim or config.d_model)
  return 3 * (2 * linear + attention_flops(config, length))


def cache_bytes_per_token(config: ModelConfig, bits: float = 16) -> float:
  """Bytes of the keys and values of a token in all blocks with attention, `bits` for each number.

  A block with a window keeps no more tokens than this window.
  """
  dims = config.dims
  values = 2 * len(config.attention_layers) * dims.kv_heads * dims.head_dim
  return values * bits / 8


def attention_flops(config: ModelConfig, length: int) -> float:
  """FLOPs of attention per token in the forward pass, over the keys that masks let a query see."""
  dims = config.dims
  masks = Counter(spec.mask for spec in config.attention_specs)
  flops = sum(
    count * visible_flops(mask, length, dims.heads * dims.head_dim) for mask, count in masks.items()
  )
  return flops / length


def visible_flops(mask: Mask, length: int, width: int) -> int:
  """FLOPs of the scores and the outputs of all queries, of heads that are `width` wide together.

  Keys that the mask hides do not count, however a kernel computes the scores.
  """
  ranges = (mask.key_range(i, i, length) for i in range(length))
  pairs = sum(end - start for start, end in ranges)
  # Two products, of two FLOPs per multiplication and addition.
  return 4 * width * pairs
