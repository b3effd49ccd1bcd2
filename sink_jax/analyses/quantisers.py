"""The quantisers that people use, a row of a table each: its tool, its flag and its function.

A function returns what a layer reads after rounding: float32 arrays, as of activations (B, T, D),
or of keys and values (B, T, H, Dh), of B sequences. Weights keep their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from scipy.linalg import hadamard

BLOCK = 32  # channels of a head that share a scale in ggml
_ROTATED = 64  # llama.cpp rotates heads of multiples of so many channels
_FP8_MOST = 448.0


class Quantiser(NamedTuple):
  """A row of `ACTIVATIONS` or `CACHES`.

  flag: how the tool is asked for it. function: of activations (B, T, D); of a cache, of keys or
  values (B, T, H, Dh) and whether they are keys. quoted: whether sentences of cards have it, so
  that it is measured in several runs. block: the size of a head must be a multiple of it. bits: of
  a value in a cache, with the scales of its blocks; scale_bits: of the scale of a token and head.
  """

  name: str
  tool: str
  flag: str
  function: Callable[..., jax.Array]
  quoted: bool = False
  block: int = 1
  bits: float = 16
  scale_bits: int = 0

  def bits_of_value(self, channels: int) -> float:
    """The bits that a value of a head of so many channels takes in a cache."""
    return self.bits + self.scale_bits / channels


def symmetric(x: jax.Array, levels: int, axes: tuple[int, ...]) -> jax.Array:
  """Integers of +-levels, ties to even; a scale max|x| / levels for all entries along axes."""
  largest = jnp.abs(x).max(axes, keepdims=True)
  scale = jnp.where(largest > 0, largest / levels, 1)
  return jnp.round(x / scale) * scale


def with_zero_point(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """256 levels from the least to the largest entry along axes, one of which is exactly zero."""
  low = jnp.minimum(x.min(axes, keepdims=True), 0)
  high = jnp.maximum(x.max(axes, keepdims=True), 0)
  scale = jnp.where(high > low, (high - low) / 255, 1)
  zero = jnp.round(-low / scale)
  return (jnp.clip(jnp.round(x / scale) + zero, 0, 255) - zero) * scale


def q8_0(x: jax.Array) -> jax.Array:
  """ggml's `quantize_row_q8_0`: 127 levels of max|x|; ties away from zero, scales of 16 bits."""
  blocks = _blocks(x)
  scale = jnp.abs(blocks).max(-1, keepdims=True) / _constant(127)
  scaled = blocks * _inverse(scale)
  size = jnp.abs(scaled)
  whole = jnp.floor(size)
  rounded = jnp.sign(scaled) * (whole + jnp.floor(2 * (size - whole)))
  return (rounded * _half(scale)).reshape(x.shape)


def q4_0(x: jax.Array) -> jax.Array:
  """ggml's `quantize_row_q4_0`: levels -8 to 7 of -1/8 of the largest entry, with its sign."""
  blocks = _blocks(x)
  at = jnp.abs(blocks).argmax(-1, keepdims=True)
  scale = jnp.take_along_axis(blocks, at, -1) / -8
  level = jnp.clip(jnp.trunc(blocks * _inverse(scale) + 8.5), 0, 15) - 8
  return (level * _half(scale)).reshape(x.shape)


def rotated(
  quantiser: Callable[[jax.Array], jax.Array], x_BxTxHxDh: jax.Array, is_key: bool
) -> jax.Array:
  """A quantiser of heads that llama.cpp rotates, and that are rotated back.

  It is the cache of ggml-org/llama.cpp PR 21038: queries, keys and values times a Hadamard matrix
  over the root of its size, and the output times it again. A product of rotated queries and keys is
  that of queries and keys rotated back. Keys have the largest matrix that divides a head, values
  one of 64 channels (`build_input_k_rot`, `build_input_v_rot` of llama-kv-cache.cpp); a head that
  is not a multiple of 64 is not rotated.
  """
  channels = x_BxTxHxDh.shape[-1]
  if channels % _ROTATED:
    return quantiser(x_BxTxHxDh)
  size = channels & -channels if is_key else _ROTATED  # the largest power of 2 that divides it
  matrix = jnp.asarray(hadamard(size), jnp.float32) / size**0.5

  def turn(x: jax.Array) -> jax.Array:
    parts = x.reshape(*x.shape[:-1], -1, size)
    return jnp.matmul(parts, matrix, precision=jax.lax.Precision.HIGHEST).reshape(x.shape)

  return turn(quantiser(turn(x_BxTxHxDh)))


def fp8(x: jax.Array) -> jax.Array:
  """vLLM's e4m3 with a scale of 1: what exceeds 448 becomes 448."""
  clipped = jnp.clip(x, -_FP8_MOST, _FP8_MOST)
  return clipped.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def int8_per_token_head(x_BxTxHxDh: jax.Array) -> jax.Array:
  """vLLM's: a scale for each token and head; the kernel stores integers, which cuts fractions."""
  largest = jnp.abs(x_BxTxHxDh).max(-1, keepdims=True)
  scale = jnp.maximum(largest / _constant(127), 1e-6)
  return jnp.trunc(jnp.clip(x_BxTxHxDh * (1 / scale), -128, 127)) * scale


def _blocks(x: jax.Array) -> jax.Array:
  return x.reshape(*x.shape[:-1], -1, BLOCK)


def _inverse(scale: jax.Array) -> jax.Array:
  return jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))


def _half(scale: jax.Array) -> jax.Array:
  return scale.astype(jnp.float16).astype(jnp.float32)


def _constant(value: float) -> jax.Array:
  """A divisor that XLA does not replace by its rounded inverse."""
  return jax.lax.optimization_barrier(jnp.float32(value))


def _int8(strategy: str, symmetric: bool) -> str:
  kind = str(symmetric).lower()
  return f'num_bits: 8, strategy: {strategy}, symmetric: {kind}, dynamic: true'


_W8A8 = 'compressed-tensors'
ACTIVATIONS = (
  Quantiser(
    'int8 per tensor',
    _W8A8,
    _int8('tensor', True),
    lambda x: symmetric(x, 127, (1, 2)),
    quoted=True,
  ),
  Quantiser(
    'int8 per token',
    _W8A8,
    _int8('token', True),
    lambda x: symmetric(x, 127, (2,)),
    quoted=True,
  ),
  Quantiser(
    'int8 per tensor, zero point',
    _W8A8,
    _int8('tensor', False),
    lambda x: with_zero_point(x, (1, 2)),
  ),
  Quantiser(
    'int8 per token, zero point',
    _W8A8,
    _int8('token', False),
    lambda x: with_zero_point(x, (2,)),
  ),
)
_Q8_0, _Q4_0 = '-ctk q8_0 -ctv q8_0', '-ctk q4_0 -ctv q4_0'
_UNROTATED = 'LLAMA_ATTN_ROT_DISABLE=1'
CACHES = (
  Quantiser(
    'q8_0',
    'llama.cpp',
    _Q8_0,
    lambda x, is_key: rotated(q8_0, x, is_key),
    quoted=True,
    block=BLOCK,
    bits=8.5,
  ),
  Quantiser(
    'q4_0',
    'llama.cpp',
    _Q4_0,
    lambda x, is_key: rotated(q4_0, x, is_key),
    quoted=True,
    block=BLOCK,
    bits=4.5,
  ),
  Quantiser(
    'q8_0, not rotated',
    'llama.cpp',
    f'{_UNROTATED} {_Q8_0}',
    lambda x, is_key: q8_0(x),
    block=BLOCK,
    bits=8.5,
  ),
  Quantiser(
    'q4_0, not rotated',
    'llama.cpp',
    f'{_UNROTATED} {_Q4_0}',
    lambda x, is_key: q4_0(x),
    block=BLOCK,
    bits=4.5,
  ),
  Quantiser(
    'fp8',
    'vLLM',
    '--kv-cache-dtype fp8',
    lambda x, is_key: fp8(x),
    quoted=True,
    bits=8,
  ),
  Quantiser(
    'int8_per_token_head',
    'vLLM',
    '--kv-cache-dtype int8_per_token_head',
    lambda x, is_key: int8_per_token_head(x),
    bits=8,
    scale_bits=32,
  ),
  Quantiser(
    'worst case',
    'none',
    '4 bits, one scale for all heads of a sequence',
    lambda x, is_key: symmetric(x, 7, (1, 2, 3)),
    bits=4,
  ),
)
