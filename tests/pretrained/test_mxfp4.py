"""MXFP4: its sixteen values, its layout, and gpt-oss checkpoints that use it."""

import jax
import ml_dtypes
import numpy as np
from numpy.testing import assert_array_equal

import sink_jax as sj
from sink_jax.pretrained.moe import VALUES, dequantize
from tests.pretrained import tiny


def by_definition(nibble, scale):
  """One sign bit, two exponent bits (bias 1), one fraction bit, and a power of two as scale."""
  sign, exponent, fraction = -1 if nibble & 8 else 1, nibble >> 1 & 3, nibble & 1
  magnitude = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
  return sign * magnitude * 2.0 ** (scale - 127)


def test_all_values_at_all_scales():
  assert [by_definition(nibble, 127) for nibble in range(16)] == list(VALUES)
  blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
  for first in (0, 100, 127, 237):
    scales = np.arange(first, first + 16, dtype=np.uint8)  # each group of 16 bytes has its own
    x = dequantize(blocks, scales[None, None])
    expected = [
      by_definition(half, int(scales[byte // 16]))
      for byte in range(256)
      for half in (byte & 15, byte >> 4)
    ]
    assert x.dtype == ml_dtypes.bfloat16
    assert_array_equal(x.astype(np.float64), [[expected]])


def test_a_checkpoint_is_that_of_its_dequantised_weights(tmp_path):
  packed = tiny.tensors(tiny.GPT_OSS)
  plain = {}
  for name, x in packed.items():
    if name.endswith('scales'):
      x[:] = x % 4 + 122  # gives weights of ordinary size
    elif not name.endswith('blocks'):
      plain[name] = x
  for name in [name for name in packed if name.endswith('blocks')]:
    weights = dequantize(packed[name], packed[name.replace('blocks', 'scales')])
    plain[name.removesuffix('_blocks')] = np.ascontiguousarray(weights.swapaxes(1, 2))

  # Blocks and their scales may be in different files.
  by_kind = dict(sorted(packed.items(), key=lambda item: item[0].endswith('scales')))
  tiny.write(tmp_path / 'packed', tiny.GPT_OSS, by_kind, files=2)
  tiny.write(tmp_path / 'plain', tiny.GPT_OSS | {'quantization_config': None}, plain)
  one, other = sj.load_pretrained(tmp_path / 'packed'), sj.load_pretrained(tmp_path / 'plain')
  assert one.config == other.config
  jax.tree.map(assert_array_equal, one.params, other.params)
  gate_up = plain['model.layers.2.mlp.experts.gate_up_proj'].astype(np.float32)
  ffn = one.params['blocks']['layer0']['ffn']
  assert_array_equal(ffn['w1']['kernel'][1], gate_up[..., ::2])
  assert_array_equal(ffn['w2']['kernel'][1], gate_up[..., 1::2])
