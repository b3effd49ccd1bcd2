"""Position encodings (Table 3, Appendix A); the official code is sail-sg/Attention-Sink.

Positions are 0-based. Positions that are known when a program is traced are NumPy arrays, so that
tables of angles become constants of the program; the positions of a decoding step are traced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention.param import AnyArray, Param
from sink_jax.component import Component

Positions = np.ndarray | jax.Array  # 0-based integers (T,)


class Position(Component):
  """A position encoding, which acts on embeddings, on queries and keys, or on scores.

  A subclass overrides the methods for one of the three and inherits the others unchanged.
  """

  has_bias: ClassVar[bool] = False  # is there a bias g on the scores?
  # Does `rotate` turn by angles that are proportional to positions? Products of queries and keys
  # then depend on the differences of their positions alone.
  turns: ClassVar[bool] = False

  def embedding_params(self, d_model: int) -> dict[str, Param]:
    """Returns the parameters of `embedding`, which the model has once, not per layer."""
    return {}

  def embedding(self, positions_T: Positions, d_model: int,
                params: Mapping[str, AnyArray]) -> jax.Array | None:
    """Returns what is added to the token embeddings H^0, (T, d_model) float32, or None."""
    return None

  def check_length(self, length: int) -> None:
    """Raises a ValueError if the encoding does not cover `length` tokens."""

  def scaled(self, length: int) -> Position:
    """Returns the same encoding for a model of sequences of `length` tokens."""
    return self

  def rotate(self, x_BxTxHxDh: jax.Array, positions_T: Positions) -> jax.Array:
    """Returns queries or keys, rotated by their positions, in their dtype."""
    return x_BxTxHxDh

  def slopes(self, heads: int) -> np.ndarray:
    """Returns slopes (heads,) float32 of the bias g(i,j,h) = slopes[h] * distance_bias(i-j)."""
    return np.ones(heads, np.float32)

  def distance_bias(self, distance: jax.Array | np.ndarray) -> jax.Array:
    """Returns the bias at a distance i - j, float32; it runs inside kernel tiles."""
    raise NotImplementedError


class Nope(Position):
  """No position encoding."""


class Rope(Position):
  """Rotary embedding (Eq. 8) in the half-split layout of the official code.

  The paper pairs neighbouring channels; the two layouts differ by a fixed permutation of channels,
  which the projections absorb. Angles are computed in float32.

  Attributes:
    base: the wavelength of channel pair c, from 0, is 2 pi base^(2c / channels) tokens if factor=1.
    fraction: the share of the Dh channels, from the first on, that is rotated (0.25 in GPT-NeoX).
    factor: the number by which positions are divided (linear interpolation).
  """

  base: float = 10000.0
  fraction: float = 1.0
  factor: float = 1.0

  turns = True

  @property
  def amplitude(self) -> float:
    """The factor that multiplies the rotated channels of both queries and keys."""
    return 1.0

  def __post_init__(self):
    if not self.base > 0:
      raise ValueError(f'{self}: base must be > 0; 10000 is usual.')
    if not (0 < self.fraction <= 1 and self.factor > 0):
      raise ValueError(f'{self}: fraction must lie in (0, 1], and factor above 0.')

  def frequencies(self, channels: int) -> np.ndarray:
    """Returns the radians per position of each pair of rotated channels, (channels / 2,)."""
    # Computed in float64 and rounded once, in `rotate`. A frequency divided by the factor gives the
    # same angles as positions divided by it.
    return self.base ** (-np.arange(0, channels, 2) / channels) / self.factor

  def rotate(self, x_BxTxHxDh: jax.Array, positions_T: Positions) -> jax.Array:
    # Rounded down, as transformers does for GPT-NeoX; the other channels pass unrotated.
    channels = int(x_BxTxHxDh.shape[-1] * self.fraction)
    if channels % 2 or not channels:
      raise ValueError(f'{self} needs an even head dimension to rotate, not {channels}: change '
                       'the number of heads or use Nope() or Alibi().')
    # T positions by F = channels / 2 frequencies; below they get an axis for the heads, which all
    # turn alike.
    angle_TxF = (jnp.asarray(positions_T, jnp.float32)[:, None]
                 * jnp.asarray(self.frequencies(channels), jnp.float32))
    # Half-split: channels c and c + channels/2 form a pair. The rotation is computed in float32,
    # since angles of late positions have no bits to spare in bfloat16.
    cos, sin = (self.amplitude * f(angle_TxF)[:, None, :] for f in (jnp.cos, jnp.sin))
    x = x_BxTxHxDh.astype(jnp.float32)
    a, b = jnp.split(x[..., :channels], 2, axis=-1)
    rotated = [a * cos - b * sin, b * cos + a * sin, x[..., channels:]]
    return jnp.concatenate(rotated, -1).astype(x_BxTxHxDh.dtype)


class Llama3Rope(Rope):
  """The scaled rotary embedding of LLaMA 3.1: low frequencies are divided by `factor`.

  A channel pair that turns fewer than low_frequency_factor times within original_length positions
  has a low frequency. One that turns more than high_frequency_factor times keeps its frequency. In
  between, the full and the divided frequency are interpolated linearly in the number of turns.
  """

  base: float = 500000.0
  factor: float = 8.0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self):
    super().__post_init__()
    if not 0 < self.low_frequency_factor < self.high_frequency_factor or self.original_length < 1:
      raise ValueError(f'{self}: needs 0 < low_frequency_factor < high_frequency_factor, and an '
                       'original_length of at least 1.')

  def frequencies(self, channels: int) -> np.ndarray:
    full = self.base ** (-np.arange(0, channels, 2) / channels)
    turns = self.original_length * full / (2 * np.pi)
    low, high = self.low_frequency_factor, self.high_frequency_factor
    fast = np.clip((turns - low) / (high - low), 0, 1)
    return fast * full + (1 - fast) * full / self.factor


class YarnRope(Rope):
  """YaRN: Rope with interpolated low frequencies and scaled queries and keys (gpt-oss).

  Channel pairs that turn more than beta_fast times within original_length positions keep their
  frequency. Those that turn fewer than beta_slow times have it divided by `factor`. A linear ramp
  over the channels in between mixes the two.

  Attributes:
    attention_factor: the factor of queries and keys; None means 0.1 ln(factor) + 1, or 1 if
      factor is at most 1.
    truncate: whether the ends of the ramp are rounded outwards to whole channels.
  """

  factor: float = 32.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  original_length: int = 4096
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self):
    super().__post_init__()
    if not (self.base > 1 and min(self.beta_fast, self.beta_slow) > 0 < self.original_length):
      raise ValueError(f'{self}: needs a base above 1, and beta_fast, beta_slow and '
                       'original_length above 0.')

  @property
  def amplitude(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    # The YaRN paper's recommendation. It scales queries and keys alike, so scores grow by its
    # square.
    return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

  def frequencies(self, channels: int) -> np.ndarray:
    full = self.base ** (-np.arange(0, channels, 2) / channels)
    # The (fractional) channel pair that turns so many times within the original length.
    pair = lambda turns: (channels * math.log(self.original_length / (turns * 2 * math.pi))
                          / (2 * math.log(self.base)))
    first, last = pair(self.beta_fast), pair(self.beta_slow)
    if self.truncate:
      first, last = math.floor(first), math.ceil(last)
    # `channels - 1`, although there are channels / 2 pairs: transformers clips there, too.
    first, last = max(first, 0), min(last, channels - 1)
    # The least width, also that of transformers, prevents a division by zero where both ends meet.
    ramp = (np.arange(channels // 2) - first) / max(last - first, 0.001)
    slow = np.clip(ramp, 0, 1)
    return slow * full / self.factor + (1 - slow) * full


class Sinusoidal(Position):
  """The absolute encoding of Eq. 5, with interleaved sines and cosines and positions from 0.

  It is not scaled: its entries reach 1, whatever the scale of the token embeddings is.
  """

  base: float = 10000.0

  def __post_init__(self):
    if not self.base > 0:
      raise ValueError(f'{self}: base must be > 0; 10000 is usual.')

  def embedding(self, positions_T: Positions, d_model: int,
                params: Mapping[str, AnyArray]) -> jax.Array | None:
    channel = np.arange(d_model)
    # Channels 2c and 2c + 1 share a frequency. The official code puts all sines before all cosines;
    # Eq. 5, which this follows, interleaves them.
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
    # A decoding step indexes the table by traced positions, and JAX clamps those out of bounds:
    # tokens beyond the table would silently share its last vector.
    if length > self.max_length:
      raise ValueError(f'{length} tokens exceed the {self.max_length} learned positions of '
                       f'{self}: use shorter inputs, or train with a larger max_length.')

  def scaled(self, length: int) -> Learned:
    # As long as the sequences: further rows would be parameters that never get a gradient.
    return Learned(max_length=length)

  def embedding(self, positions_T: Positions, d_model: int,
                params: Mapping[str, AnyArray]) -> jax.Array | None:
    table_PxD = params['table']
    if isinstance(positions_T, np.ndarray) and (positions_T == np.arange(len(positions_T))).all():
      return jnp.asarray(table_PxD[:len(positions_T)])  # whose gradient needs no scatter
    return jnp.asarray(table_PxD[positions_T])


class Alibi(Position):
  """g = -slope_h |i - j| with slope_h = 2^(-8h/H), h = 1..H (Eq. 7).

  If H is not a power of two, the slopes follow the recipe of the ALiBi authors, as in the official
  code: those of the next lower power of two, then every other one of the next higher power.
  """

  has_bias = True

  def slopes(self, heads: int) -> np.ndarray:
    # For a power of two, `lower` is `heads`, and the slice below drops the second list.
    lower = 2 ** math.floor(math.log2(heads))
    geometric = lambda n: [2.0 ** (-8 * h / n) for h in range(1, n + 1)]
    return np.array((geometric(lower) + geometric(2 * lower)[::2])[:heads], np.float32)

  def distance_bias(self, distance: jax.Array | np.ndarray) -> jax.Array:
    # The absolute value matters only where queries see later keys, as under a Prefix mask.
    return -jnp.abs(distance).astype(jnp.float32)


class Relative(Position):
  """g = bucket(i - j), the T5 bucket number itself, in all heads: the official code's "relative".

  Nothing is learned. Buckets are 0..31 and grow with the distance, so *farther* keys score higher:
  if all tokens have equal content, the bias alone gives the first one an importance of 0.334 at
  T = 64. The paper's Proposition 2 assumes a non-increasing g; `decreasing=True` is that form,
  g = -bucket(i - j). A distance below half the number B of buckets is its own bucket; beyond, the
  bucket grows logarithmically up to `max_distance`. Eq. 6 as printed takes the floor before it
  multiplies by B/2; this class takes it afterwards, as the official code does.
  """

  decreasing: bool = False
  buckets: int = 32
  max_distance: int = 128

  has_bias = True

  def __post_init__(self):
    # Otherwise `span` below would be zero or negative, or its quotient a division by zero.
    if self.buckets < 2 or self.max_distance <= self.buckets // 2:
      raise ValueError(f'{self}: needs at least 2 buckets and a max_distance beyond '
                       'half their number.')

  def distance_bias(self, distance: jax.Array | np.ndarray) -> jax.Array:
    exact = self.buckets // 2
    # T5's unidirectional buckets: later keys, which a Prefix mask shows, count as distance 0.
    d = jnp.maximum(distance, 0).astype(jnp.float32)
    span = math.log2(self.max_distance / exact)
    beyond = exact + jnp.floor(jnp.log2(jnp.maximum(d, exact) / exact) / span * exact)
    bucket = jnp.where(d < exact, d, jnp.minimum(beyond, self.buckets - 1))
    return -bucket if self.decreasing else bucket
