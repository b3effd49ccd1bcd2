"""Named sizes, parameter counts and FLOPs."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.arguments import check_known
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.transformer import Transformer

# '60m' and '1b' are the paper's (Section 4, Section 7.4), '7b' and '13b' LLaMA-2's (Touvron et
# al. 2023); 'tiny' is for two CPU cores.
SIZES: dict[str, dict[str, int]] = {
    'tiny': dict(layers=2, d_model=64, heads=4, ffn_hidden=128),
    '60m': dict(layers=10, d_model=768, heads=8, ffn_hidden=1536),
    '1b': dict(layers=22, d_model=2048, heads=16, ffn_hidden=5632),
    '7b': dict(layers=32, d_model=4096, heads=32, ffn_hidden=11008),
    '13b': dict(layers=40, d_model=5120, heads=40, ffn_hidden=13824),
}


def sized(size: str, **overrides: Any) -> ModelConfig:
  """Returns the ModelConfig of a named size.

  Args:
    size: one of 'tiny', '60m', '1b', '7b' and '13b'.
    overrides: fields of ModelConfig, such as vocab_size, which no size sets.

  Raises:
    ValueError: the size is unknown, and the message lists the choices; or ModelConfig refuses the
      fields, as without a vocab_size.
  """
  check_known(size, SIZES, 'Unknown model size')
  fields: dict[str, Any] = SIZES[size] | overrides
  return ModelConfig(**fields)


@functools.lru_cache
def parameter_shapes(config: ModelConfig) -> ParamTree:
  """The parameter tree with a `jax.ShapeDtypeStruct` for every array; allocates nothing."""
  # One token suffices to trace the parameters, but the libraries' kernels refuse so few.
  # A loop over blocks makes the same tree as unrolled ones, and is traced once.
  config = dataclasses.replace(config, implementation='reference', unroll=1)
  if config.vocab_size:
    inputs = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  else:
    inputs = jax.ShapeDtypeStruct((1, 1, config.input_features), jnp.float32)
  return jax.eval_shape(Transformer(config).init, jax.random.key(0), inputs)['params']


def kept_bytes(config: ModelConfig, remat: str, tensor: int = 1) -> float:
  """Bytes per token and block that are kept for the backward pass, as `ModelConfig.remat` lists.

  Args:
    remat: any but 'none', with which the compiler decides what is kept.
    tensor: devices that split heads and hidden units; the residual stream is whole on each.
  """
  # In values per token: `whole` is held by every device, `split` is divided by `tensor`.
  heads, keys = (n * config.dims.head_dim for n in (config.heads, config.dims.kv_heads))
  hidden = {'none': 0}.get(config.ffn, config.ffn_hidden * (1 + config.ffn.endswith('glu')))
  # A norm after the feed-forward network needs its output again.
  products = 3 if config.norm_location in ('sandwich', 'after', 'post') else 2
  gates = config.attention.head.products(config.dims)
  whole, split = {'save_matmuls': (products * config.d_model, 2 * (heads + keys) + hidden + gates),
                  'save_attention': (config.d_model, heads), 'blocks': (config.d_model, 0)}[remat]
  if config.attention.value.reads_first:  # the carry of the loop has the first block's values, too
    split += keys
  return (whole + split / tensor) * jnp.dtype(config.dtype).itemsize


def parameter_count(config: ModelConfig | None = None, *, size: str | None = None,
                    vocab_size: int = 50432, embeddings: bool = True) -> int:
  """Returns the number of parameters of a config, or of a named size with a vocabulary.

  With spectral norms as parameters it counts the vectors of their power iteration as well, which no
  gradient reaches.

  Args:
    config: the config of the model.
    size: a named size, if no config is given; see `sized`.
    vocab_size: the vocabulary of the named size.
    embeddings: whether token embeddings, unembedding and position embeddings count too.

  Raises:
    ValueError: neither a config nor a size is given, or the size is unknown.
  """
  if isinstance(config, str):
    raise ValueError(f'parameter_count takes a ModelConfig, or size={config!r}.')
  if config is None:
    if size is None:
      raise ValueError("parameter_count needs a config or a size, such as size='60m'. Choices: "
                       f'{", ".join(SIZES)}.')
    config = sized(size, vocab_size=vocab_size)
  shapes = dict(parameter_shapes(config))
  if not embeddings:
    # Where the unembedding is tied, there is no 'unembed' to remove.
    for name in ('embed', 'unembed', 'positions'):
      shapes.pop(name, None)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def flops_per_token(config: ModelConfig, length: int) -> float:
  """FLOPs of matrix products per token of one training step.

  The forward pass counts once and the backward pass twice. Every linear layer counts, gates of
  heads among them, and the unembedding where it is tied, and attention as `attention_flops` counts
  it; look-ups, feature maps, biases and the recurrence of Mamba mixers do not.
  """
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  # 'head_kernel' is that of a gate: its size is its products per token, whatever it reads.
  linear = sum(math.prod(x.shape) for path, x in leaves if path[-1].key.endswith('kernel'))
  if config.tied:  # a product with the embedding's table, which is no kernel
    linear += config.vocab_size * (config.embedding_dim or config.d_model)
  return 3 * (2 * linear + attention_flops(config, length))


def attention_flops(config: ModelConfig, length: int) -> float:
  """FLOPs of attention per token in the forward pass.

  A query counts the keys that its block's mask leaves it, on average over `length` queries.
  Blocks with a Mamba mixer have none.
  """
  masks = [config.attention_of(layer).mask for layer in config.pattern if not layer.mamba]
  keys = sum(hi - lo for mask in masks
             for lo, hi in (mask.key_range(i, i, length) for i in range(length)))
  periods = config.layers // len(config.pattern)
  # Two products (scores and outputs) of two FLOPs per multiplication and addition.
  return 4 * periods * config.heads * config.dims.head_dim * keys / length
