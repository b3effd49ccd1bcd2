"""gpt-oss: sink logits, windows in every other layer, experts; bfloat16 or as published, MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Experts, Layer, ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.mxfp4 import dequantize
from sink_jax.pretrained.rope import rope, rotary_parameters
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor, block, linear, vector

MODEL_TYPES = ('gpt_oss',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED
_BASE = 150000.0
# What transformers takes where config.json has no rotary parameters.
_YARN = {'rope_type': 'yarn', 'factor': 32.0, 'beta_fast': 32.0, 'beta_slow': 1.0,
         'truncate': False, 'original_max_position_embeddings': 4096}


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  if _packed(hf):
    # MXFP4 is read below. The key is hidden from `llama_like`, which refuses quantised weights.
    hf = {key: value for key, value in hf.items() if key != 'quantization_config'}
  keys.only(hf, 'swiglu_alpha', 1.702, why='a constant of this activation here')
  keys.only(hf, 'swiglu_limit', 7.0, why='a constant of this activation here')
  layers = keys.size(hf, 'num_hidden_layers')
  # The family's default, for a config.json without layer_types: even layers have the window.
  kinds = ['full_attention' if i % 2 else 'sliding_attention' for i in range(layers)]
  masks = windows.masks(hf, kinds, keys.optional_size(hf, 'sliding_window', 128))
  experts = Experts(count=keys.size(hf, 'num_local_experts'),
                    active=keys.size(hf, 'num_experts_per_tok'), renormalize=True)
  position = rope(hf if rotary_parameters(hf) else hf | {'rope_parameters': _YARN}, base=_BASE)
  # By default the last layer of a period has full attention, which is then the mask of the model;
  # the layers with a window override it in the pattern.
  spec = AttentionSpec(position=position, mask=masks[-1], kv_bias=SinkLogit())
  pattern = tuple(Layer(mask=None if mask == spec.mask else mask, experts=experts)
                  for mask in masks)
  attention = ('qkv', 'out') if keys.flag(hf, 'attention_bias', True) else ()
  return llama.llama_like(hf, kv_heads=8, head_dim=64, eps=1e-5, attention=spec, pattern=pattern,
                          ffn='clamped_swiglu', biases=(*attention, 'ffn'))


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  tensors = llama.outside(config)
  assert config.pattern[0].experts, 'every layer of this family has experts'
  experts = config.pattern[0].experts.count
  for layer in range(config.layers):
    (path, i), name = block(config, layer), f'model.layers.{layer}'
    tensors |= llama.attention(config, layer) | {
        f'{name}.self_attn.sinks': vector(f'{path}/attention/kv_bias_logit', (i,), config.heads),
        f'{name}.mlp.router.weight': linear(f'{path}/ffn/router/kernel', (i,),
                                            (experts, config.d_model)),
        f'{name}.mlp.router.bias': vector(f'{path}/ffn/router/bias', (i,), experts)}
    tensors |= _experts(config, f'{name}.mlp.experts', f'{path}/ffn', i, experts, _packed(hf))
  return tensors


def _experts(config: ModelConfig, name: str, path: str, i: int, experts: int,
             packed: bool) -> dict[str, StoredTensor]:
  """The matrices of all experts of a layer.

  The outputs of gate and up take turns along one matrix: even ones are the gate's (our w1), odd
  ones up's (w2). Not packed a matrix is (in, out); in MXFP4 it is (out, in), since the groups
  of 32 numbers that share a scale lie along the inputs, and two numbers make a byte:
  blocks (experts, out, in / 32, 16) and scales (experts, out, in / 32). See `mxfp4`.
  """
  width, hidden = config.d_model, config.ffn_hidden
  # Outputs are the last axis of a stored matrix, but the rows of a packed one.
  half = _half_of_rows if packed else _half
  tensors = {
      f'{name}.gate_up_proj_bias': StoredTensor((experts, 2 * hidden), (
          LeafPart(f'{path}/w1/bias', (i,), _half(0)),
          LeafPart(f'{path}/w2/bias', (i,), _half(1)))),
      f'{name}.down_proj_bias': vector(f'{path}/w_out/bias', (i,), experts, width)}
  for matrix, inner, outer, parts in (
      ('gate_up_proj', width, 2 * hidden, (
          LeafPart(f'{path}/w1/kernel', (i,), half(0), transposed=packed),
          LeafPart(f'{path}/w2/kernel', (i,), half(1), transposed=packed))),
      ('down_proj', hidden, width, (LeafPart(f'{path}/w_out/kernel', (i,), transposed=packed),))):
    if not packed:
      tensors[f'{name}.{matrix}'] = StoredTensor((experts, inner, outer), parts)
      continue
    if inner % 32:
      raise keys.refused('quantization_config', 'mxfp4', f'{inner} numbers are no whole number of '
                         'groups of 32')
    scales, groups = f'{name}.{matrix}_scales', (experts, outer, inner // 32)
    tensors[scales] = StoredTensor(groups, quantized=True)
    tensors[f'{name}.{matrix}_blocks'] = StoredTensor((*groups, 16), parts, quantized=True,
                                              read_with=(scales,), combine=dequantize)
  return tensors


def _half(first: int) -> Callable[[np.ndarray], np.ndarray]:
  return lambda x: x[..., first::2]


def _half_of_rows(first: int) -> Callable[[np.ndarray], np.ndarray]:
  return lambda x: x[..., first::2, :]


def _packed(hf: dict[str, Any]) -> bool:
  quantization = hf.get('quantization_config')
  return isinstance(quantization, dict) and quantization.get('quant_method') == 'mxfp4'
