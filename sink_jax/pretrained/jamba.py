"""Jamba: Mamba and attention blocks, some with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sink_jax.attention.position import Nope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Experts, Layer, Mamba, ModelConfig
from sink_jax.pretrained import keys
from sink_jax.pretrained.stored_tensors import (
  LeafPart,
  StoredTensor,
  block,
  linear,
  shortest_period,
  tied,
  vector,
)

MODEL_TYPES = ('jamba',)
PREFIX = 'model.'
IGNORED = ()


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Left unread: which kernels and scans compute the mixers, and what only training or a
  cache needs.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  keys.not_quantized(hf)
  keys.only(hf, 'hidden_act', 'silu', 'swish')
  keys.only(hf, 'mamba_inner_layernorms', True)
  if hf.get('sliding_window') is not None:
    raise keys.refused('sliding_window', hf['sliding_window'], 'attention here sees all tokens')
  layers, width = keys.size(hf, 'num_hidden_layers'), keys.size(hf, 'hidden_size')
  experts = None
  if keys.size(hf, 'num_experts') > 1:
    experts = Experts(hf['num_experts'], keys.size(hf, 'num_experts_per_tok'))
  # Two independent rhythms, of attention among mixers and of experts among networks; the pattern
  # below is their common period.
  attention, mixture = _layers(hf, 'attn'), _layers(hf, 'expert')
  rank = hf.get('mamba_dt_rank', 'auto')
  mamba = Mamba(inner=keys.size(hf, 'mamba_expand') * width,
                state=keys.size(hf, 'mamba_d_state'), conv=keys.size(hf, 'mamba_d_conv'),
                # Upwards: transformers has ceil(hidden_size / 16).
                rank=-(-width // 16) if rank == 'auto' else keys.size(hf, 'mamba_dt_rank'))
  return ModelConfig(
      layers=layers, d_model=width, heads=keys.size(hf, 'num_attention_heads'),
      kv_heads=keys.optional_size(hf, 'num_key_value_heads', 8), head_dim=keys.head_dim(hf),
      ffn_hidden=keys.size(hf, 'intermediate_size'), vocab_size=keys.size(hf, 'vocab_size'),
      attention=AttentionSpec(position=Nope()), norm_eps=keys.number(hf, 'rms_norm_eps', 1e-6),
      pattern=shortest_period([
          Layer(mamba=None if attention(layer) else mamba,
                experts=experts if mixture(layer) else None)
          for layer in range(layers)]),
      biases=('mamba',) if keys.flag(hf, 'mamba_proj_bias', False) else (),
      tied=keys.flag(hf, 'tie_word_embeddings', False))


def _layers(hf: dict[str, Any], kind: str) -> Callable[[int], bool]:
  """A function of a layer: whether it is of the kind that comes once in a period."""
  period, offset = keys.size(hf, f'{kind}_layer_period'), hf.get(f'{kind}_layer_offset')
  if type(offset) is not int or not 0 <= offset < period:
    raise ValueError(f'config.json: {kind}_layer_offset = {offset!r} must be an integer from 0 '
                     f'to {kind}_layer_period - 1 = {period - 1}.')
  return lambda layer: layer % period == offset


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  table = (config.vocab_size, config.d_model)
  tensors = {'model.embed_tokens.weight': vector('embed', (), *table),
             'model.final_layernorm.weight': vector('final_norm/gain', (), config.d_model),
             'lm_head.weight': (tied(table, 'model.embed_tokens.weight') if config.tied
                                else linear('unembed/kernel', (), table))}
  for layer in range(config.layers):
    (path, i), name = block(config, layer), f'model.layers.{layer}'
    # Tensor names count layers through, the pattern counts within a period.
    kind = config.pattern[layer % len(config.pattern)]
    for theirs, ours in (('input_layernorm', 'norm1'), ('pre_ff_layernorm', 'norm2')):
      tensors[f'{name}.{theirs}.weight'] = vector(f'{path}/{ours}/gain', (i,), config.d_model)
    if kind.mamba:
      tensors |= _mixer(config, kind.mamba, f'{name}.mamba', f'{path}/mamba', i,
                        keys.flag(hf, 'mamba_conv_bias', True))
    else:
      tensors |= _attention(config, f'{name}.self_attn', f'{path}/attention', i)
    tensors |= _feed_forward(config, kind.experts, f'{name}.feed_forward', f'{path}/ffn', i)
  return tensors


def _attention(config: ModelConfig, name: str, path: str, i: int) -> dict[str, StoredTensor]:
  dims, width = config.dims, config.d_model
  inner, inner_kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
  return {f'{name}.{theirs}_proj.weight': linear(f'{path}/{ours}/kernel', (i,), shape)
          for theirs, ours, shape in (('q', 'query', (inner, width)),
                                      ('k', 'key', (inner_kv, width)),
                                      ('v', 'value', (inner_kv, width)),
                                      ('o', 'out', (width, inner)))}


def _feed_forward(config: ModelConfig, experts: Experts | None, name: str, path: str,
                  i: int) -> dict[str, StoredTensor]:
  """One network, or those of all experts and the router."""
  width, hidden = config.d_model, config.ffn_hidden
  kernels = (('gate', 'w1', (hidden, width)), ('up', 'w2', (hidden, width)),
             ('down', 'w_out', (width, hidden)))
  tensors = {}
  for theirs, ours, shape in kernels:
    for e in range(experts.count if experts else 1):
      # The file has a tensor per expert; the leaf stacks experts behind layers.
      inside, index = (f'.experts.{e}', (i, e)) if experts else ('', (i,))
      tensors[f'{name}{inside}.{theirs}_proj.weight'] = linear(
          f'{path}/{ours}/kernel', index, shape)
  if experts:
    tensors[f'{name}.router.weight'] = linear(
        f'{path}/router/kernel', (i,), (experts.count, width))
  return tensors


def _mixer(config: ModelConfig, sizes: Mamba, name: str, path: str, i: int,
           conv_bias: bool) -> dict[str, StoredTensor]:
  """The tensors of a Mamba mixer; the convolution's kernel is (inner, 1, taps) in the file."""
  width, inner, state, rank = config.d_model, sizes.inner, sizes.state, sizes.rank
  tensors = {
      f'{name}.{theirs}.weight': linear(f'{path}/{ours}/kernel', (i,), shape)
      for theirs, ours, shape in (('in_proj', 'in', (2 * inner, width)),
                                  ('x_proj', 'x', (rank + 2 * state, inner)),
                                  ('dt_proj', 'dt', (inner, rank)),
                                  ('out_proj', 'out', (width, inner)))}
  tensors |= {f'{name}.{part}_layernorm.weight': vector(f'{path}/{part}_norm/gain', (i,), size)
              for part, size in (('dt', rank), ('b', state), ('c', state))}
  tensors |= {
      f'{name}.conv1d.weight': StoredTensor(
          (inner, 1, sizes.conv), (LeafPart(f'{path}/conv/kernel', (i,), _taps, transposed=True),)),
      # A checkpoint without this bias leaves the leaf at zero, which computes the same.
      f'{name}.conv1d.bias': vector(f'{path}/conv/bias', (i,), inner, optional=not conv_bias),
      f'{name}.dt_proj.bias': vector(f'{path}/dt/bias', (i,), inner),
      f'{name}.A_log': vector(f'{path}/a_log', (i,), inner, state),
      f'{name}.D': vector(f'{path}/d', (i,), inner)}
  if 'mamba' in config.biases:
    tensors |= {f'{name}.in_proj.bias': vector(f'{path}/in/bias', (i,), 2 * inner),
                f'{name}.out_proj.bias': vector(f'{path}/out/bias', (i,), width)}
  return tensors


def _taps(weight_Ix1xK: np.ndarray) -> np.ndarray:
  # A depthwise convolution of PyTorch has one input per channel: the axis of length 1.
  return weight_Ix1xK[:, 0]
