"""Families with LayerNorm: GPT-2, OPT, GPT-NeoX with Pythia, and Falcon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sink_jax.attention.position import Learned
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import config_keys as keys
from sink_jax.pretrained.config_keys import Json, take
from sink_jax.pretrained.stored_tensors import (
  FREQUENCIES,
  Family,
  LeafPart,
  StoredTensor,
  Table,
  Take,
  embeddings,
  group_by_group,
  linear,
  linears,
  vector,
)

# {name in transformers: name in `ModelConfig.ffn`}. The gelu_new, gelu_pytorch_tanh and
# gelu_fast are one function, the tanh approximation, computed in three ways.
_ACTIVATIONS = {
  'gelu_new': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'gelu_fast': 'gelu_tanh',
  'gelu': 'gelu',
  'relu': 'relu',
  'silu': 'swish',
  'swish': 'swish',
}
# OPT's position of the first token is row 2 of the stored table; only padding reads those before.
_OFFSET = 2


def _model(
  hf: Json,
  activation: tuple[str, str],
  tied: bool = True,
  sizes: tuple[str, str, str] = ('num_hidden_layers', 'hidden_size', 'num_attention_heads'),
  **options: Any,
) -> ModelConfig:
  """The model; activation: its key and the family's default; sizes: keys of layers, D, heads."""
  keys.check_not_quantized(hf)
  ffn = _ACTIVATIONS[take(hf, activation[0], (activation[1], *_ACTIVATIONS))]
  layers, width, heads = (take(hf, key, int) for key in sizes)
  return ModelConfig(
    layers=layers,
    d_model=width,
    heads=heads,
    vocab_size=take(hf, 'vocab_size', int),
    ffn=ffn,
    norm='layernorm',
    tied=take(hf, 'tie_word_embeddings', bool, tied),
    **options,
  )


def _layer_norm(theirs: str, ours: str, index: tuple[int, ...], width: int) -> Table:
  """Gain and bias of a LayerNorm."""
  return {
    f'{theirs}.weight': vector(f'{ours}/gain', index, width),
    f'{theirs}.bias': vector(f'{ours}/bias', index, width),
  }


def gpt2(hf: Json) -> ModelConfig:
  """GPT-2; `reorder_and_upcast_attn` is left unread: it changes only the precision of float16."""
  # Cross-attention adds a block of weights that no decoder here has.
  take(hf, 'add_cross_attention', (False,))
  return _model(
    hf,
    ('activation_function', 'gelu_new'),
    sizes=('n_layer', 'n_embd', 'n_head'),
    ffn_hidden=take(hf, 'n_inner', int, None) or 4 * take(hf, 'n_embd', int),
    attention=AttentionSpec(position=Learned(take(hf, 'n_positions', int))),
    norm_eps=take(hf, 'layer_norm_epsilon', float, 1e-5),
    biases=('qkv', 'out', 'ffn'),
  )


def _gpt2_tensors(hf: Json, config: ModelConfig) -> Table:
  """Weights are stored as (in, out), with q, k and v side by side.

  If attention is not scaled by 1 / sqrt(Dh), or also by 1 / layer, its query weights and biases
  absorb the difference here. Scores are the checkpoint's; recorded queries and their norms differ
  by that factor.
  """
  width, hidden, position = config.d_model, config.ffn_hidden, config.attention.position
  assert isinstance(position, Learned), 'the family has learned positions'
  tensors = (
    embeddings(config, 'transformer.wte.weight')
    | _layer_norm('transformer.ln_f', 'final_norm', (), width)
    | {'transformer.wpe.weight': vector('positions', (), position.max_length, width)}
  )
  scaled = take(hf, 'scale_attn_weights', bool, True)
  by_layer = take(hf, 'scale_attn_by_inverse_layer_idx', bool, False)
  for layer in range(config.layers):
    name = f'transformer.h.{layer}'
    for norm in (1, 2):
      tensors |= _layer_norm(f'{name}.ln_{norm}', f'blocks/norm{norm}', (layer,), width)
    for theirs, ours, size in (
      ('attn.c_proj', 'attention/out', (width, width)),
      ('mlp.c_fc', 'ffn/w1', (width, hidden)),
      ('mlp.c_proj', 'ffn/w_out', (hidden, width)),
    ):
      tensors[f'{name}.{theirs}.weight'] = vector(f'blocks/{ours}/kernel', (layer,), *size)
      tensors[f'{name}.{theirs}.bias'] = vector(f'blocks/{ours}/bias', (layer,), size[1])
    # transformers divides the scores of layer i, counted from 0, by i + 1. A score is linear in its
    # query, so a factor on the query's weights and bias is one on scores.
    factor = (1.0 if scaled else math.sqrt(config.dims.head_dim)) / (layer + 1 if by_layer else 1)
    for theirs, leaf, shape in (
      ('weight', 'kernel', (width, 3 * width)),
      ('bias', 'bias', (3 * width,)),
    ):
      tensors[f'{name}.attn.c_attn.{theirs}'] = StoredTensor(
        shape,
        tuple(
          LeafPart(f'blocks/attention/{ours}/{leaf}', (layer,), _columns(j * width, width, scale))
          for j, (ours, scale) in enumerate((('query', factor), ('key', 1.0), ('value', 1.0)))
        ),
      )
  return tensors


def _columns(first: int, width: int, factor: float) -> Take:
  def columns(x: np.ndarray) -> np.ndarray:
    part = x[..., first : first + width]
    # In float32, since float16 would round the product with the factor.
    return part if factor == 1 else np.float32(factor) * part.astype(np.float32)

  return columns


def opt(hf: Json) -> ModelConfig:
  """OPT, whose size 350m is post-norm and projects narrower embeddings."""
  take(hf, '_remove_final_layer_norm', (False,), why='pre-norm models have a final norm here')
  take(hf, 'layer_norm_elementwise_affine', (True,))
  width, embedding = take(hf, 'hidden_size', int), take(hf, 'word_embed_proj_dim', int, None)
  return _model(
    hf,
    ('activation_function', 'relu'),
    ffn_hidden=take(hf, 'ffn_dim', int),
    # transformers makes no projection if the two widths are equal.
    embedding_dim=None if embedding == width else embedding,
    norm_eps=1e-5,
    attention=AttentionSpec(position=Learned(take(hf, 'max_position_embeddings', int))),
    norm_location='pre' if take(hf, 'do_layer_norm_before', bool, True) else 'post',
    biases=('qkv', 'out', 'ffn') if take(hf, 'enable_bias', bool, True) else (),
  )


def _opt_tensors(hf: Json, config: ModelConfig) -> Table:
  width, hidden, position = config.d_model, config.ffn_hidden, config.attention.position
  assert isinstance(position, Learned), 'the family has learned positions'
  name, narrow = 'model.decoder', config.embedding_dim
  tensors = embeddings(config, f'{name}.embed_tokens.weight')
  tensors[f'{name}.embed_positions.weight'] = StoredTensor(
    (position.max_length + _OFFSET, width), (LeafPart('positions', (), lambda x: x[_OFFSET:]),)
  )
  if config.norm_location == 'pre':  # the post-norm model ends with the norm of its last block
    tensors |= _layer_norm(f'{name}.final_layer_norm', 'final_norm', (), width)
  if narrow:
    tensors |= {
      f'{name}.project_in.weight': linear('embed_in/kernel', (), (width, narrow)),
      f'{name}.project_out.weight': linear('embed_out/kernel', (), (narrow, width)),
    }
  for layer in range(config.layers):
    block = f'{name}.layers.{layer}'
    tensors |= _layer_norm(f'{block}.self_attn_layer_norm', 'blocks/norm1', (layer,), width)
    tensors |= _layer_norm(f'{block}.final_layer_norm', 'blocks/norm2', (layer,), width)
    tensors |= linears(
      block,
      'blocks',
      (layer,),
      (
        ('self_attn.q_proj', 'attention/query', (width, width)),
        ('self_attn.k_proj', 'attention/key', (width, width)),
        ('self_attn.v_proj', 'attention/value', (width, width)),
        ('self_attn.out_proj', 'attention/out', (width, width)),
        ('fc1', 'ffn/w1', (hidden, width)),
        ('fc2', 'ffn/w_out', (width, hidden)),
      ),
      bool(config.biases),
    )
  return tensors


def gpt_neox(hf: Json) -> ModelConfig:
  """GPT-NeoX and Pythia."""
  # `attention_bias` concerns only attention: the feed-forward layers always have biases.
  biases = ('qkv', 'out', 'ffn') if take(hf, 'attention_bias', bool, True) else ('ffn',)
  # Other families have these two keys under other names, which `rope` reads.
  angles = hf | {
    'rope_theta': hf.get('rotary_emb_base'),
    'partial_rotary_factor': hf.get('rotary_pct'),
  }
  return _model(
    hf,
    ('hidden_act', 'gelu'),
    tied=False,
    ffn_hidden=take(hf, 'intermediate_size', int),
    attention=AttentionSpec(position=keys.rope(angles, fraction=0.25)),
    norm_eps=take(hf, 'layer_norm_eps', float, 1e-5),
    biases=biases,
    parallel_residual=take(hf, 'use_parallel_residual', bool, True),
  )


def falcon(hf: Json) -> ModelConfig:
  """Falcon: parallel residuals, and queries, keys and values of all heads in one tensor.

  A model with one norm in front of both parts of a block gets two that are equal; training it
  further moves them apart. Models with ALiBi (falcon-rw) are not read.
  """
  take(hf, 'alibi', (False,), why='the bias of distances is divided by sqrt(Dh) in this family')
  heads = take(hf, 'num_attention_heads', int)
  if keys.head_dim(hf) is not None:
    raise keys.unsupported(
      'head_dim',
      hf['head_dim'],
      'a head of this family has hidden_size / num_attention_heads channels',
    )
  if _is_new(hf):  # 40B, 180B and 11B; 7B has the older layout
    kv_heads = take(hf, 'num_kv_heads', int, None) or heads
    take(hf, 'parallel_attn', (True,), why='new_decoder_architecture is true')
    take(hf, 'num_ln_in_parallel_attn', (2, 1))
  else:
    kv_heads = 1 if take(hf, 'multi_query', bool, True) else heads
    take(hf, 'num_ln_in_parallel_attn', (1,), why='new_decoder_architecture is false')
  return _model(
    hf,
    ('activation', 'gelu'),
    kv_heads=None if kv_heads == heads else kv_heads,
    ffn_hidden=take(hf, 'ffn_hidden_size', int, None) or 4 * take(hf, 'hidden_size', int),
    attention=AttentionSpec(position=keys.rope(hf)),
    norm_eps=take(hf, 'layer_norm_epsilon', float, 1e-5),
    parallel_residual=take(hf, 'parallel_attn', bool, True),
    biases=('qkv', 'out', 'ffn') if take(hf, 'bias', bool, False) else (),
  )


def _is_new(hf: Json) -> bool:
  return take(hf, 'new_decoder_architecture', bool, False)


def _neox_tensors(hf: Json, config: ModelConfig) -> Table:
  return _grouped(
    config,
    'gpt_neox.layers',
    'attention',
    ('input_layernorm', 'post_attention_layernorm'),
    {
      **embeddings(config, 'gpt_neox.embed_in.weight', 'embed_out.weight'),
      **_layer_norm('gpt_neox.final_layer_norm', 'final_norm', (), config.d_model),
    },
  )


def _falcon_tensors(hf: Json, config: ModelConfig) -> Table:
  norms = ('input_layernorm', 'input_layernorm')
  if not config.parallel_residual:
    norms = ('input_layernorm', 'post_attention_layernorm')
  elif _is_new(hf) and take(hf, 'num_ln_in_parallel_attn', (2, 1)) == 2:
    norms = ('ln_attn', 'ln_mlp')
  return _grouped(
    config,
    'transformer.h',
    'self_attention',
    norms,
    {
      **embeddings(config, 'transformer.word_embeddings.weight'),
      **_layer_norm('transformer.ln_f', 'final_norm', (), config.d_model),
    },
  )


def _grouped(
  config: ModelConfig, blocks: str, attention: str, norms: tuple[str, str], outside: Table
) -> Table:
  """All tensors of a model with one tensor for q, k and v in each block."""
  tensors, width, hidden = dict(outside), config.d_model, config.ffn_hidden
  for layer in range(config.layers):
    name = f'{blocks}.{layer}'
    for ours, theirs in enumerate(norms, 1):
      for key, tensor in _layer_norm(
        f'{name}.{theirs}', f'blocks/norm{ours}', (layer,), width
      ).items():
        # One stored norm may fill both.
        known = tensors[key].parts if key in tensors else ()
        tensors[key] = StoredTensor(tensor.shape, (*known, *tensor.parts))
    tensors |= linears(
      name,
      'blocks',
      (layer,),
      [(f'{attention}.dense', 'attention/out', (width, width))],
      'out' in config.biases,
    )
    tensors |= linears(
      name,
      'blocks',
      (layer,),
      (
        ('mlp.dense_h_to_4h', 'ffn/w1', (hidden, width)),
        ('mlp.dense_4h_to_h', 'ffn/w_out', (width, hidden)),
      ),
      'ffn' in config.biases,
    )
    name, path = f'{name}.{attention}.query_key_value', 'blocks/attention'
    tensors[f'{name}.weight'] = group_by_group(path, (layer,), 'kernel', config.dims, width)
    if 'qkv' in config.biases:
      tensors[f'{name}.bias'] = group_by_group(path, (layer,), 'bias', config.dims)
  return tensors


# Masks, the values they put on scores, and rotary frequencies are not parameters.
FAMILIES = {
  'gpt2': Family(gpt2, _gpt2_tensors, 'transformer.', r'.*\.attn\.(bias|masked_bias)'),
  'opt': Family(opt, _opt_tensors, 'model.', r'.*decoder\.version'),
  'gpt_neox': Family(
    gpt_neox, _neox_tensors, 'gpt_neox.', FREQUENCIES + r'|.*\.attention\.(bias|masked_bias)'
  ),
  'falcon': Family(falcon, _falcon_tensors, 'transformer.'),
}
