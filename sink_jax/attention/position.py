"""Position encodings (Table 3, Appendix A); the official code is sail-sg/Attention-Sink.

Positions are 0-based. Positions that are known when a program is traced are NumPy arrays, so that
tables of angles become constants of the program; the positions of a decoding step are traced.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention import AnyArray, Arrays, Param, require
from sink_jax.component import Component


class Position(Component):
  """A position encoding, which acts on embeddings, on queries and keys, or on scores."""

  has_bias: ClassVar[bool] = False  # is there a bias g on the scores?

  def embedding_params(self, d_model: int) -> dict[str, Param]:
    """Returns the parameters of `embedding`, which the model has once, not per layer."""
    return {}

  def embedding(self, positions_T: AnyArray, d_model: int, params: Arrays) -> jax.Array | None:
    """Returns what is added to the token embeddings H^0, (T, d_model) float32, or None."""
    return None

  def check_length(self, length: int) -> None:
    """Raises a ValueError if the encoding does not cover `length` tokens."""

  def rotate(self, x_BxTxHxDh: jax.Array, positions_T: AnyArray) -> jax.Array:
    """Returns queries or keys, rotated by their positions, in their dtype."""
    return x_BxTxHxDh

  def slopes(self, heads: int) -> np.ndarray:
    """Returns slopes (heads,) float32 of the bias g(i,j,h) = slopes[h] * distance_bias(i-j)."""
    return np.ones(heads, np.float32)

  def distance_bias(self, distance: AnyArray) -> jax.Array:
    """Returns the bias at a distance i - j, float32; it runs inside kernel tiles."""
    raise NotImplementedError


class Nope(Position):
  """No position encoding."""


class Rope(Position):
  """Rotary embedding (Eq. 8) in the half-split layout of the official code.

  The paper pairs neighbouring channels; the two layouts differ by a fixed permutation of channels,
  which the projections absorb.

  base: the wavelength of channel pair c, from 0, is 2 pi base^(2c / channels) tokens if factor=1.
  fraction: the share of the Dh channels, from the first on, that is rotated (0.25 in GPT-NeoX).
  factor: the number by which positions are divided (linear interpolation).
  """

  base: float = 10000.0
  fraction: float = 1.0
  factor: float = 1.0

  amplitude: ClassVar[float] = 1.0  # multiplies the rotated channels of both queries and keys

  def __post_init__(self):
    require(
      self,
      self.base > 0 and 0 < self.fraction <= 1 and self.factor > 0,
      'base and factor must be > 0, and fraction must lie in (0, 1]',
    )

  def frequencies(self, channels: int) -> np.ndarray:
    """Returns the radians per position of each pair of channels, (channels / 2,) float64."""
    return self.base ** (-np.arange(0, channels, 2) / channels) / self.factor

  def rotate(self, x_BxTxHxDh: jax.Array, positions_T: AnyArray) -> jax.Array:
    # Rounded down, as transformers does for GPT-NeoX; the other channels pass unrotated.
    channels = int(x_BxTxHxDh.shape[-1] * self.fraction)
    if channels % 2 or not channels:
      raise ValueError(
        f'{self} needs an even head dimension to rotate, not {channels}: change '
        'the number of heads or use Nope() or Alibi().'
      )
    angle_TxF = jnp.asarray(positions_T, jnp.float32)[:, None] * jnp.asarray(
      self.frequencies(channels), jnp.float32
    )
    # Half-split: channels c and c + channels/2 form a pair. In float32, since angles of late
    # positions have no bits to spare in bfloat16.
    cos, sin = (self.amplitude * f(angle_TxF)[:, None, :] for f in (jnp.cos, jnp.sin))
    x = x_BxTxHxDh.astype(jnp.float32)
    a, b = jnp.split(x[..., :channels], 2, axis=-1)
    rotated = [a * cos - b * sin, b * cos + a * sin, x[..., channels:]]
    return jnp.concatenate(rotated, -1).astype(x_BxTxHxDh.dtype)


class Llama3Rope(Rope):
  """The scaled rotary embedding of LLaMA 3.1: low frequencies are divided by `factor`.

  A channel pair that rotates fewer than low_frequency_factor times within original_length positions
  has a low frequency. A pair that rotates more than high_frequency_factor times keeps its
  frequency. In between, the two are interpolated linearly in the number of rotations.
  """

  base: float = 500000.0
  factor: float = 8.0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def frequencies(self, channels: int) -> np.ndarray:
    full = self.base ** (-np.arange(0, channels, 2) / channels)
    turns = self.original_length * full / (2 * np.pi)
    low, high = self.low_frequency_factor, self.high_frequency_factor
    fast = np.clip((turns - low) / (high - low), 0, 1)
    return fast * full + (1 - fast) * full / self.factor


class YarnRope(Rope):
  """YaRN: Rope with interpolated low frequencies and scaled queries and keys (gpt-oss).

  Channel pairs that rotate more than beta_fast times within original_length positions keep their
  frequency. Pairs that rotate fewer than beta_slow times have it divided by `factor`. A linear ramp
  over the channels in between mixes the two; with `truncate` its ends are rounded to channels.

  attention_factor: the factor of queries and keys; None means the YaRN paper's recommendation,
  0.1 ln(factor) + 1, or 1 if factor is at most 1.
  """

  factor: float = 32.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  original_length: int = 4096
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self):
    super().__post_init__()
    positive = min(self.beta_fast, self.beta_slow, self.original_length) > 0
    require(
      self,
      self.base > 1 and positive,
      'base must be > 1, and beta_fast, beta_slow and original_length > 0',
    )

  @property
  def amplitude(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

  def frequencies(self, channels: int) -> np.ndarray:
    full = self.base ** (-np.arange(0, channels, 2) / channels)
    # The (fractional) channel pair that rotates `turns` times within the original length.
    pair = lambda turns: (
      channels * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))
    )
    first, last = pair(self.beta_fast), pair(self.beta_slow)
    if self.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)  # as transformers clips them
    # This least width, which transformers also uses, prevents a division by zero where both ends
    # meet.
    slow = np.clip((np.arange(channels // 2) - first) / max(last - first, 0.001), 0, 1)
    return slow * full / self.factor + (1 - slow) * full


class Sinusoidal(Position):
  """Eq. 5: interleaved sines and cosines; the official code puts all sines before all cosines."""

  base: float = 10000.0

  def __post_init__(self):
    require(self, self.base > 0, 'base must be > 0')

  def embedding(self, positions_T: AnyArray, d_model: int, params: Arrays) -> jax.Array | None:
    channel = np.arange(d_model)
    frequency = self.base ** (-(channel // 2 * 2) / d_model)
    xp = np if isinstance(positions_T, np.ndarray) else jnp  # known positions: float64 angles
    angle_TxD = positions_T[:, None] * xp.asarray(frequency)
    return jnp.asarray(xp.where(channel % 2, xp.cos(angle_TxD), xp.sin(angle_TxD)), jnp.float32)


class Learned(Position):
  """A learned vector per position, for positions below `max_length`."""

  max_length: int = 2048

  def embedding_params(self, d_model: int) -> dict[str, Param]:
    return {'table': Param((self.max_length, d_model), 'embedding')}

  def check_length(self, length: int) -> None:
    # JAX clamps traced positions of a decoding step that are out of bounds.
    if length > self.max_length:
      raise ValueError(
        f'{length} tokens exceed the {self.max_length} learned positions of '
        f'{self}: use shorter inputs, or train with a larger max_length.'
      )

  def embedding(self, positions_T: AnyArray, d_model: int, params: Arrays) -> jax.Array | None:
    table_PxD = params['table']
    if isinstance(positions_T, np.ndarray) and (positions_T == np.arange(len(positions_T))).all():
      # a slice, since its gradient needs no scatter
      return jnp.asarray(table_PxD[: len(positions_T)])
    return jnp.asarray(table_PxD[positions_T])


class Alibi(Position):
  """g = -slope_h |i - j| with slope_h = 2^(-8h/H), h = 1..H (Eq. 7).

  If H is not a power of two, the slopes are those of the next lower power, then every other one of
  the next higher power, as in the ALiBi authors' code and the official code.
  """

  has_bias = True

  def slopes(self, heads: int) -> np.ndarray:
    # For a power of two, `lower` is `heads`, and the slice below drops the second list.
    lower = 2 ** math.floor(math.log2(heads))
    geometric = lambda n: [2.0 ** (-8 * h / n) for h in range(1, n + 1)]
    return np.array((geometric(lower) + geometric(2 * lower)[::2])[:heads], np.float32)

  def distance_bias(self, distance: AnyArray) -> jax.Array:
    # The absolute value matters only where queries see later keys, as under a Prefix mask.
    return -jnp.abs(distance).astype(jnp.float32)


class Relative(Position):
  """g = bucket(i - j), the T5 bucket number itself, in all heads: the official code's "relative".

  Buckets are 0..31 and grow with the distance, so *farther* keys score higher: if all tokens have
  equal content, the first one has an importance of 0.334 at T = 64. The paper's Proposition 2
  assumes a non-increasing g; `decreasing=True` is that form, g = -bucket(i - j). With B buckets,
  the bucket is the distance itself below B/2; beyond, it grows logarithmically up to
  `max_distance`. Eq. 6 as printed takes the floor before it multiplies by B/2; this class takes it
  afterwards, as the official code does.
  """

  decreasing: bool = False
  buckets: int = 32
  max_distance: int = 128

  has_bias = True

  def __post_init__(self):
    require(
      self,
      self.buckets >= 2 and self.max_distance > self.buckets // 2,
      'needs at least 2 buckets and a max_distance beyond half their number',
    )

  def distance_bias(self, distance: AnyArray) -> jax.Array:
    exact = self.buckets // 2
    # T5's unidirectional buckets: later keys, which a Prefix mask shows, count as distance 0.
    d = jnp.maximum(distance, 0).astype(jnp.float32)
    span = math.log2(self.max_distance / exact)
    beyond = exact + jnp.floor(jnp.log2(jnp.maximum(d, exact) / exact) / span * exact)
    bucket = jnp.where(d < exact, d, jnp.minimum(beyond, self.buckets - 1))
    return -bucket if self.decreasing else bucket
