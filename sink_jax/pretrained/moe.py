"""LLaMA-likes with a mixture of experts in every block: Mixtral and gpt-oss, also in MXFP4.

MXFP4 are 4-bit floating-point numbers in groups of 32 that share a power of two. A number has a
sign, two bits of exponent and one of fraction, so it is one of 16 values; a group has one byte for
the exponent of its factor (OCP Microscaling Formats, version 1.0). Two numbers share a byte, so a
row of a matrix is columns / 32 blocks of 16 bytes. A value times a power of two is a bfloat16
number.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.models.config import Experts, ModelConfig
from sink_jax.pretrained import config_keys as keys
from sink_jax.pretrained.config_keys import Json, take
from sink_jax.pretrained.llama import llama_like, table
from sink_jax.pretrained.stored_tensors import (
  Family,
  LeafPart,
  StoredTensor,
  Table,
  Take,
  block,
  linear,
  vector,
)

# The value of each of the 16 patterns of bits: the sign is the highest one.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# transformers takes these if the config.json of gpt-oss has no rotary parameters.
_YARN = {
  'rope_type': 'yarn',
  'factor': 32.0,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'truncate': False,
  'original_max_position_embeddings': 4096,
}


def _experts(hf: Json) -> Experts:
  # The softmax over all experts, divided by its sum over the active ones, is a softmax over these.
  return Experts(
    take(hf, 'num_local_experts', int), take(hf, 'num_experts_per_tok', int), renormalize=True
  )


def mixtral(hf: Json) -> ModelConfig:
  """Mistral with experts; keys for training only, such as the router's noise, are left unread."""
  return llama_like(
    hf,
    kv_heads=8,
    eps=1e-5,
    **keys.blocks([keys.one_mask(hf, None)], keys.rope(hf, base=1e6), _experts(hf)),
  )


def _mixtral_tensors(hf: Json, config: ModelConfig) -> Table:
  """Published files have a tensor for every matrix of every expert.

  transformers 5 computes with the matrices of all experts of a layer in one tensor, gate above up,
  and saves those on request (`save_pretrained(save_original_format=False)`).
  """
  tensors, count, width, hidden = (
    table(hf, config),
    _experts(hf).count,
    config.d_model,
    config.ffn_hidden,
  )
  for layer in range(config.layers):
    (path, i), name = block(config, layer), f'model.layers.{layer}'
    gate, router = (
      f'{name}.block_sparse_moe.gate.weight',
      linear(f'{path}/ffn/router/kernel', (i,), (count, width)),
    )
    names: dict[
      str, tuple[str, ...]
    ] = {}  # of the tensors of a matrix, in the order of the experts
    for theirs, ours, shape in (
      ('w1', 'w1', (hidden, width)),
      ('w3', 'w2', (hidden, width)),
      ('w2', 'w_out', (width, hidden)),
    ):
      names[ours] = tuple(
        f'{name}.block_sparse_moe.experts.{e}.{theirs}.weight' for e in range(count)
      )
      tensors |= {
        key: linear(f'{path}/ffn/{ours}/kernel', (i, e), shape) for e, key in enumerate(names[ours])
      }
    part = lambda ours, take: LeafPart(f'{path}/ffn/{ours}/kernel', (i,), take, transposed=True)
    tensors |= {
      gate: router,
      f'{name}.mlp.gate.weight': StoredTensor(router.shape, router.parts, instead_of=(gate,)),
      f'{name}.mlp.experts.gate_up_proj': StoredTensor(
        (count, 2 * hidden, width),
        (part('w1', lambda x: x[:, :hidden]), part('w2', lambda x: x[:, hidden:])),
        instead_of=names['w1'] + names['w2'],
      ),
      f'{name}.mlp.experts.down_proj': StoredTensor(
        (count, width, hidden), (part('w_out', lambda x: x),), instead_of=names['w_out']
      ),
    }
  return tensors


def gpt_oss(hf: Json) -> ModelConfig:
  """gpt-oss: sink logits, windows in every other layer, experts; bfloat16, or published MXFP4."""
  if _packed(hf):  # hidden from `llama_like`, which refuses quantised weights
    hf = {key: value for key, value in hf.items() if key != 'quantization_config'}
  for key, value in (('swiglu_alpha', 1.702), ('swiglu_limit', 7.0)):
    take(hf, key, (value,), why='a constant of this activation here')
  masks = keys.masks(hf, lambda i: i % 2 == 0, take(hf, 'sliding_window', int, 128))
  position = keys.rope(
    hf if keys.rotary_parameters(hf) else hf | {'rope_parameters': _YARN}, base=150000.0
  )
  attention = ('qkv', 'out') if take(hf, 'attention_bias', bool, True) else ()
  return llama_like(
    hf,
    kv_heads=8,
    head_size=64,
    eps=1e-5,
    ffn='clamped_swiglu',
    biases=(*attention, 'ffn'),
    **keys.blocks(masks, position, _experts(hf), kv_bias=SinkLogit()),
  )


def _gpt_oss_tensors(hf: Json, config: ModelConfig) -> Table:
  """The outputs of gate and up alternate along one matrix: even ones are the gate's, odd ones up's.

  Unpacked, a matrix is (in, out); in MXFP4 it is (out, in), since the groups of 32 numbers that
  share a scale lie along the inputs: blocks (experts, out, in / 32, 16), two numbers a byte, and
  scales (experts, out, in / 32).
  """
  tensors, packed, count = table(hf, config), _packed(hf), _experts(hf).count
  width, hidden = config.d_model, config.ffn_hidden
  for layer in range(config.layers):
    (path, i), name = block(config, layer), f'model.layers.{layer}.mlp'
    part = lambda ours, take=lambda x: x, packed=False: LeafPart(
      f'{path}/ffn/{ours}', (i,), take, packed
    )
    tensors |= {
      f'{name}.router.weight': linear(f'{path}/ffn/router/kernel', (i,), (count, width)),
      f'{name}.router.bias': vector(f'{path}/ffn/router/bias', (i,), count),
      f'{name}.experts.gate_up_proj_bias': StoredTensor(
        (count, 2 * hidden), (part('w1/bias', _half(0)), part('w2/bias', _half(1)))
      ),
      f'{name}.experts.down_proj_bias': vector(f'{path}/ffn/w_out/bias', (i,), count, width),
    }
    for matrix, inner, outer, parts in (
      (
        'gate_up_proj',
        width,
        2 * hidden,
        (part('w1/kernel', _half(0, packed), packed), part('w2/kernel', _half(1, packed), packed)),
      ),
      ('down_proj', hidden, width, (part('w_out/kernel', packed=packed),)),
    ):
      key, groups = f'{name}.experts.{matrix}', (count, outer, inner // 32)
      if not packed:
        tensors[key] = StoredTensor((count, inner, outer), parts)
        continue
      if inner % 32:
        raise keys.unsupported(
          'quantization_config', 'mxfp4', f'{inner} numbers are not groups of 32'
        )
      tensors[f'{key}_scales'] = StoredTensor(groups, quantized=True)
      tensors[f'{key}_blocks'] = StoredTensor(
        (*groups, 16), parts, quantized=True, read_with=(f'{key}_scales',), combine=dequantize
      )
  return tensors


def _half(first: int, rows: bool = False) -> Take:
  """Every second output: along the last axis of a stored matrix, or the rows of a packed one."""
  return (lambda x: x[..., first::2, :]) if rows else (lambda x: x[..., first::2])


def _packed(hf: Json) -> bool:
  quantization = hf.get('quantization_config')
  return isinstance(quantization, dict) and quantization.get('quant_method') == 'mxfp4'


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """The numbers of MXFP4 as bfloat16, which holds them exactly, (X, rows, columns).

  Args:
    blocks: uint8 (X, rows, columns / 32, 16), two numbers a byte, the one of its lower half
      first.
    scales: uint8 (X, rows, columns / 32); the factor of a group is 2^(scale - 127).
  """
  count, rows, groups, _ = blocks.shape
  halves = np.array([(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)], np.float32)
  with np.errstate(over='ignore'):  # 6 * 2^128 is infinite in either format
    numbers = np.ldexp(halves, np.arange(256)[:, None, None] - 127)
  # Both numbers of a byte as one uint32, which is two bfloat16 numbers, by 256 scale + byte.
  pairs = numbers.astype(ml_dtypes.bfloat16).view(np.uint32).ravel()
  out = np.empty((count, rows, groups, 16), np.uint32)
  for e in range(count):  # one expert at a time, since its indices take as much memory
    np.take(pairs, scales[e].astype(np.uint16)[..., None] << 8 | blocks[e], out=out[e])
  return out.view(ml_dtypes.bfloat16).reshape(count, rows, groups * 32)


FAMILIES = {
  'mixtral': Family(mixtral, _mixtral_tensors),
  'gpt_oss': Family(gpt_oss, _gpt_oss_tensors),
}
