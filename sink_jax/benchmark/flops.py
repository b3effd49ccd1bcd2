"""Floating-point operations that the benchmarks count, and datasheet peaks.

Only matrix products count, with 2 operations per multiplication and addition, and of T x T scores
those that the mask leaves, T^2 / 2 under a causal one. A backward pass of attention has five
products and the forward pass two, so it counts 2.5 times as much, however often a kernel computes
the scores again.
"""

from __future__ import annotations

from sink_jax.attention.mask import Mask

_TERA = 1e12
# Dense bfloat16 FLOP/s of one device as its maker states them, by a part of the device kind,
# the first that fits. A device of a TPU v7x is one of the two cores of a chip (2307).
_PEAKS = (
    # Their clocks are lower than those of the boards below, and not listed.
    ('H100 PCIe', None), ('H100 NVL', None), ('H200 NVL', None),
    ('H100', 989 * _TERA), ('H200', 989 * _TERA), ('A100', 312 * _TERA),
    ('TPU v5 lite', 197 * _TERA), ('TPU v5e', 197 * _TERA), ('TPU v5', 459 * _TERA),
    ('TPU v6', 918 * _TERA), ('TPU7x', 2307 / 2 * _TERA), ('TPU v7', 2307 / 2 * _TERA),
)


def datasheet_peak(device_kind: str) -> float | None:
  """Dense bfloat16 FLOP/s of one device; None for a kind that is not listed."""
  return next((peak for part, peak in _PEAKS if part in device_kind), None)


def scores(length: int, mask: Mask) -> float:
  """Scores of one head that count: T^2 / 2, or w T - w^2 / 2 in a window of w < T keys."""
  window = min(mask.window or length, length)
  # The first w queries see w / 2 keys on average, and all others w.
  return window * length - window**2 / 2


def attention_flops(shape: tuple[int, int, int, int], mask: Mask) -> tuple[float, float]:
  """FLOPs of the forward pass, and of both passes, at a shape (B, H, T, Dh).

  A forward pass takes 4 B H Dh per score, and both together 3.5 times that.
  """
  batch, heads, length, head_dim = shape
  forward = 4 * batch * heads * head_dim * scores(length, mask)
  return forward, 3.5 * forward


def importance_flops(shape: tuple[int, int, int, int], mask: Mask,
                     keys: int | None = None) -> float:
  """FLOPs of streamed importance at a shape (B, H, T, Dh).

  There are two passes with a product q.k per score: for the statistics of the rows, and for the
  sums over the columns. With `keys` the second pass is over the first so many keys alone.
  """
  batch, heads, length, head_dim = shape
  second = scores(length, mask) if keys is None else length * keys
  return 2 * batch * heads * head_dim * (scores(length, mask) + second)


def loss_flops(tokens: int, d_model: int, vocab: int) -> float:
  """FLOPs of the cross-entropy with both gradients: three products of tokens x D x V."""
  return 6.0 * tokens * d_model * vocab
