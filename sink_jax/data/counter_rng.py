"""Counter-based random numbers: every draw is a pure function of its integer keys.

A generator with a state would have to be advanced through all earlier draws, saved with a
checkpoint, and kept separate in each process. Here the draw for row 10**9 is computed from that
number. The code uses NumPy but none of its generators, so that a draw is the same on any host and
with any version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, made odd: SplitMix64's step


def bits(*keys: ArrayLike) -> np.ndarray:
  """64 random bits (uint64) for each tuple of integer keys, which broadcast like arrays.

  A chain of SplitMix64 steps (Steele, Lea and Flood 2014), one for each key. An additional key
  gives another draw, never a continuation.
  """
  state = np.zeros((), np.uint64)
  with np.errstate(over='ignore'):  # the arithmetic is modulo 2**64 on purpose
    for key in keys:
      # 1 is added, so that a key of 0 moves the state as well. The shifts and factors after it are
      # SplitMix64's output function.
      key = np.asarray(key).astype(np.uint64)
      state = state + (key + np.uint64(1)) * _GAMMA
      state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
      state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
      state = state ^ (state >> np.uint64(31))
  return state


def uniform(*keys: ArrayLike) -> np.ndarray:
  """Uniform float64 in [0, 1)."""
  return (bits(*keys) >> np.uint64(11)) * 2.0**-53  # the 53 bits that a float64 has


def integers(bound: int, *keys: ArrayLike) -> np.ndarray:
  """Uniform int64 in [0, bound), for bounds below 2**32 (bias at most bound / 2**32)."""
  # The upper half of a product of 32 bits with the bound: a remainder would take a division.
  high = bits(*keys) >> np.uint64(32)
  return (high * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def normal(*keys: ArrayLike) -> np.ndarray:
  """Standard normal float64 (at most 6.7 in size): Box-Muller on the two halves of 64 bits."""
  drawn = bits(*keys)
  # In (0, 1], since the logarithm of 0 is not finite.
  radius = np.sqrt(-2 * np.log(((drawn >> np.uint64(32)) + 1.0) * 2.0**-32))
  return radius * np.cos((drawn & np.uint64(0xFFFFFFFF)) * (2 * np.pi * 2.0**-32))


def permutation(size: int, *keys: int) -> np.ndarray:
  """A permutation of range(size), fixed by the keys.

  Every number has a random key of 64 bits, by which all are sorted; ties, which nearly never
  occur, stay in their order.
  """
  return np.argsort(bits(*keys, np.arange(size)), kind='stable')
