"""Counter-based random numbers: every draw is a pure function of its integer keys.

NumPy only, vectorised, and independent of NumPy's own generators, so that a
draw can be repeated at random access, on any host and with any NumPy version.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def bits(*keys) -> np.ndarray:
  """64 random bits for each tuple of integer keys; keys broadcast like arrays.

  A chain of SplitMix64 steps (Steele, Lea and Flood 2014), one for each key.
  """
  state = np.uint64(0)
  with np.errstate(over='ignore'):  # the arithmetic is modulo 2**64 on purpose
    for key in keys:
      key = np.asarray(key).astype(np.uint64)
      state = state + (key + np.uint64(1)) * _GAMMA
      state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
      state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
      state = state ^ (state >> np.uint64(31))
  return state


def uniform(*keys) -> np.ndarray:
  """Uniform float64 in [0, 1)."""
  return (bits(*keys) >> np.uint64(11)) * 2.0**-53


def integers(bound: int, *keys) -> np.ndarray:
  """Uniform int64 in [0, bound), for bounds below 2**32 (bias at most bound / 2**32)."""
  high = bits(*keys) >> np.uint64(32)
  return (high * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def normal(*keys) -> np.ndarray:
  """Standard normal float64 (at most 6.7 in size): Box-Muller on the two halves of 64 bits."""
  drawn = bits(*keys)
  radius = np.sqrt(-2 * np.log(((drawn >> np.uint64(32)) + 1.0) * 2.0**-32))
  return radius * np.cos((drawn & np.uint64(0xFFFFFFFF)) * (2 * np.pi * 2.0**-32))


def permutation(size: int, *keys) -> np.ndarray:
  """A fixed permutation of range(size); its first n are a subset of its first n + 1."""
  return np.argsort(bits(*keys, np.arange(size)), kind='stable')
