"""MXFP4: its sixteen values, its layout, and gpt-oss checkpoints that use it."""

import jax
import ml_dtypes
import numpy as np

import sink_jax as sj
from sink_jax.pretrained.moe import VALUES, dequantize
from tests.pretrained import tiny


def by_definition(nibble, scale):
  """One sign bit, two exponent bits (bias 1), one fraction bit, and a power of two as scale."""
  sign, exponent, fraction = -1 if nibble & 8 else 1, nibble >> 1 & 3, nibble & 1
  magnitude = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
  return sign * magnitude * 2.0 ** (scale - 127)


def test_all_values_at_all_scales():
  blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
  for scale in (0, 1, 100, 127, 128, 200, 252):
    x = dequantize(blocks, np.full((1, 1, 16), scale, np.uint8))
    expected = [
      by_definition(half, scale) for byte in range(256) for half in (byte & 15, byte >> 4)
    ]
    assert x.dtype == ml_dtypes.bfloat16 and x.shape == (1, 1, 512)
    np.testing.assert_array_equal(x.astype(np.float64).ravel(), expected)
  assert [by_definition(nibble, 127) for nibble in range(16)] == list(VALUES)


def test_every_group_has_its_own_scale():
  blocks = np.full((2, 3, 2, 16), 0x32, np.uint8)  # 1.0, then 1.5
  scales = np.arange(120, 132, dtype=np.uint8).reshape(2, 3, 2)
  x = dequantize(blocks, scales).astype(np.float64)
  factor = np.repeat(2.0 ** (scales.astype(int) - 127), 32, -1)
  np.testing.assert_array_equal(x, factor * np.tile([1, 1.5], 32))


# The result of transformers.integrations.mxfp4.convert_moe_packed_tensors on these bytes,
# transposed back.
BLOCKS = bytes.fromhex('00112233445566778899aabbccddeeff0f1e2d3c4b5a69788796a5b4c3d2e1f0')
SCALES = bytes([125, 130])
PUBLISHED = [
  0,
  0,
  0.125,
  0.125,
  0.25,
  0.25,
  0.375,
  0.375,
  0.5,
  0.5,
  0.75,
  0.75,
  1,
  1,
  1.5,
  1.5,
  0,
  0,
  -0.125,
  -0.125,
  -0.25,
  -0.25,
  -0.375,
  -0.375,
  -0.5,
  -0.5,
  -0.75,
  -0.75,
  -1,
  -1,
  -1.5,
  -1.5,
  -48,
  0,
  -32,
  4,
  -24,
  8,
  -16,
  12,
  -12,
  16,
  -8,
  24,
  -4,
  32,
  0,
  48,
  48,
  0,
  32,
  -4,
  24,
  -8,
  16,
  -12,
  12,
  -16,
  8,
  -24,
  4,
  -32,
  0,
  -48,
]


def test_it_is_what_transformers_computes():
  x = dequantize(
    np.frombuffer(BLOCKS, np.uint8).reshape(1, 1, 2, 16),
    np.frombuffer(SCALES, np.uint8).reshape(1, 1, 2),
  )
  np.testing.assert_array_equal(x.astype(np.float64).ravel(), PUBLISHED)


def test_a_checkpoint_is_that_of_its_dequantised_weights(tmp_path):
  packed = tiny.tensors(tiny.GPT_OSS)
  for name in packed:
    if name.endswith('scales'):
      packed[name] = packed[name] % 4 + 122  # gives weights of ordinary size
  plain = {}
  for name, x in packed.items():
    if name.endswith('blocks'):
      scales = packed[name.replace('blocks', 'scales')]
      plain[name.removesuffix('_blocks')] = np.ascontiguousarray(
        dequantize(x, scales).swapaxes(1, 2)
      )
    elif not name.endswith('scales'):
      plain[name] = x
  # Blocks and their scales may be in different files.
  tiny.write(
    tmp_path / 'packed',
    tiny.GPT_OSS,
    dict(sorted(packed.items(), key=lambda kv: (kv[0].endswith('scales'), kv[0]))),
    files=2,
  )
  tiny.write(
    tmp_path / 'plain', {k: v for k, v in tiny.GPT_OSS.items() if k != 'quantization_config'}, plain
  )
  one, other = sj.load_pretrained(tmp_path / 'packed'), sj.load_pretrained(tmp_path / 'plain')
  assert one.config == other.config
  jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
  gate_up = plain['model.layers.2.mlp.experts.gate_up_proj'].astype(np.float32)
  ffn = one.params['blocks']['layer0']['ffn']
  np.testing.assert_array_equal(ffn['w1']['kernel'][1], gate_up[..., ::2])
  np.testing.assert_array_equal(ffn['w2']['kernel'][1], gate_up[..., 1::2])
  assert np.isfinite(one.logits(np.zeros((1, 6), np.int32))).all()
