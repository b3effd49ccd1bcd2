"""Position encodings (Table 3, Appendix A)."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from sink_jax.attention.param import Param
from sink_jax.slot import Slot


@dataclasses.dataclass(frozen=True)
class Position(Slot):
  """An encoding acts in one of three places; the other two stay as they are here."""

  has_bias = False  # is there a bias g on the scores?

  def embedding_params(self, d_model: int) -> dict[str, Param]:
    return {}

  def embedding(self, length: int, d_model: int, params):
    """(length, d_model) added to the token embeddings H^0, or None."""
    return None

  def rotate(self, x_BxTxHxDh):
    """Queries or keys at positions 0..T-1, rotated by their position."""
    return x_BxTxHxDh

  def slopes(self, heads: int):
    """Per-head factor (heads,) of the bias g(i,j,h) = slopes[h] * distance_bias(i-j)."""
    return np.ones(heads, np.float32)

  def distance_bias(self, distance):
    """The bias of a distance i - j, as float32."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Nope(Position):
  """No position encoding."""


@dataclasses.dataclass(frozen=True)
class Rope(Position):
  """Rotary embedding (Eq. 8) of all of Dh, in the half-split layout of the release.

  The paper writes pairs of neighbouring channels; the layouts differ by a fixed
  permutation of channels, which the projections absorb. Angles are float32.
  """

  base: float = 10000.0

  def __post_init__(self):
    if not self.base > 0:
      raise ValueError(f'{self}: base must be > 0; 10000 is usual.')

  def rotate(self, x_BxTxHxDh):
    length, head_dim = x_BxTxHxDh.shape[1], x_BxTxHxDh.shape[-1]
    if head_dim % 2:
      raise ValueError(f'Rope needs an even head dimension, not {head_dim}: change the '
                       'number of heads or use Nope() or Alibi().')
    frequency = self.base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_TxF = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle_TxF)[:, None, :], jnp.sin(angle_TxF)[:, None, :]
    a, b = jnp.split(x_BxTxHxDh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return rotated.astype(x_BxTxHxDh.dtype)


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Position):
  """Absolute encoding of Eq. 5, sine and cosine interleaved, positions from 0.

  Unscaled: entries reach 1, whatever the scale of the token embeddings.
  """

  base: float = 10000.0

  def embedding(self, length, d_model, params):
    channel = np.arange(d_model)
    frequency = self.base ** (-(channel // 2 * 2) / d_model)
    angle_TxD = np.arange(length)[:, None] * frequency
    return jnp.asarray(
        np.where(channel % 2, np.cos(angle_TxD), np.sin(angle_TxD)), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Learned(Position):
  """A learned vector per position."""

  max_length: int = 2048

  def embedding_params(self, d_model):
    return {'table': Param((self.max_length, d_model), 'embedding')}

  def embedding(self, length, d_model, params):
    if length > self.max_length:
      raise ValueError(f'{length} positions exceed Learned(max_length={self.max_length}): '
                       'train with a larger max_length or use shorter inputs.')
    return params['table'][:length]


@dataclasses.dataclass(frozen=True)
class Alibi(Position):
  """g = -slope_h |i - j|, slopes 2^(-8h/H) (Eq. 7).

  Head counts that are no power of two follow the recipe of the ALiBi authors, as
  the release does: the slopes of the next lower power, then every other slope of
  the next higher one.
  """

  has_bias = True

  def slopes(self, heads):
    lower = 2 ** math.floor(math.log2(heads))
    geometric = lambda n: [2.0 ** (-8 * h / n) for h in range(1, n + 1)]
    return np.array((geometric(lower) + geometric(2 * lower)[::2])[:heads], np.float32)

  def distance_bias(self, distance):
    return -jnp.abs(distance).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Relative(Position):
  """The release's "relative" bias: the T5 bucket number itself, for all heads.

  Nothing is learned: a key at distance d gets + bucket(d), 0..31, so *farther* keys
  score higher, and with equal contents the first token alone takes an importance of
  0.334 at T = 64. The paper's Proposition 2 speaks of a non-increasing g;
  `decreasing=True` is that form, - bucket(d). Below half the buckets the bucket is
  the distance; beyond, it is logarithmic up to `max_distance`. Eq. 6 as printed
  takes the floor before multiplying by B/2; this follows the release, after.
  """

  decreasing: bool = False
  buckets: int = 32
  max_distance: int = 128

  has_bias = True

  def __post_init__(self):
    if self.buckets < 2 or self.max_distance <= self.buckets // 2:
      raise ValueError(f'{self}: needs at least 2 buckets and a max_distance beyond '
                       'half their number.')

  def distance_bias(self, distance):
    exact = self.buckets // 2
    d = jnp.maximum(distance, 0).astype(jnp.float32)
    span = math.log2(self.max_distance / exact)
    beyond = exact + jnp.floor(jnp.log2(jnp.maximum(d, exact) / exact) / span * exact)
    bucket = jnp.where(d < exact, d, jnp.minimum(beyond, self.buckets - 1))
    return -bucket if self.decreasing else bucket
