"""Normalizers Z_i of the rows of similarities f_ij (Section 7.4, Appendix C.4).

A kernel returns one statistic per row: sum_j f_ij^power, or its logarithm when
f = exp. A normalizer turns that statistic into the factor of the row, in both forms; rows of
softpick come with AbsSum's factor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class Normalizer(Component):
  """o_i = factor_i * sum_j f_ij v_j."""

  needs_nonnegative: ClassVar[bool] = False  # are sums of signed similarities meaningless?
  # Does it change the weights of a row one by one once their sum is known? Such rows are no sums
  # of f_ij v_j times a factor, which is all that a kernel's tile accumulates.
  clips: ClassVar[bool] = False

  @property
  def power(self) -> float | None:
    """The statistic of a row is sum_j f_ij^power; None: no statistic is needed.

    With power 0 it is the number of visible keys, which no similarity changes.
    """
    return 1.0

  def factor(self, row_sum: jax.Array) -> jax.Array:
    """1/Z_i from sum_j f_ij^power, elementwise, for similarities other than exp."""
    raise NotImplementedError

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    """log(1/Z_i) + lse for exp, whose rows arrive divided by exp(lse), elementwise.

    Args:
      lse: log sum_j exp(s_ij), float32.
      power_lse: log sum_j exp(power s_ij).
    """
    raise NotImplementedError

  def clipped(self, weights: jax.Array) -> jax.Array:
    """What multiplies the values, elementwise, of the divided weights, where it `clips`."""
    raise NotImplementedError


def _floor(p: float) -> float:
  """The least row sum x that counts: x^(-1/p) and its derivative stay within float32.

  Only rows whose similarities all but vanish reach it, such as a sigmoid of scores below
  -40 (p = 1) or -16 (p = 4); their output then shrinks instead of becoming infinite.
  """
  # At a sum x the derivative of x^(-1/p) has the size x^(-(1/p + 1)) / p, which is 1e36 / p here:
  # below 3.4e38, the largest float32 number, for every p of the paper, 1/4 to 4.
  return 10 ** (-36 / (1 / p + 1))


@dataclasses.dataclass(frozen=True)
class RowSum(Normalizer):
  """Z_i = (sum_j f_ij + eps) / scale.

  The official code (sail-sg/Attention-Sink) adds eps = 1e-8 to sums of sigmoid and elu+1;
  softmax takes none. `scale` is the paper's alpha (Eq. 29, Table 14 left): rows then sum to alpha.
  """

  eps: float = 0.0
  scale: float = 1.0

  needs_nonnegative = True

  def __post_init__(self):
    if self.eps < 0 or self.scale <= 0:
      raise ValueError(f'{self}: eps must be >= 0 and scale > 0.')

  def factor(self, row_sum: jax.Array) -> jax.Array:
    return self.scale / jnp.maximum(row_sum + self.eps, _floor(1.0))

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    # Rows of exp arrive divided by their sum, so alpha is all that is left: AttentionSpec refuses
    # exp with an eps.
    return jnp.full_like(lse, jnp.log(self.scale))


@dataclasses.dataclass(frozen=True)
class PNorm(Normalizer):
  """Z_i = (sum_j f_ij^p)^(1/p) (Eq. 43 and 44, Figure 29)."""

  p: float = 0.5

  needs_nonnegative = True

  def __post_init__(self):
    if self.p <= 0:
      raise ValueError(f'{self}: p must be > 0; the paper uses 1/4 to 4.')

  @property
  def power(self) -> float | None:
    return self.p

  def factor(self, row_sum: jax.Array) -> jax.Array:
    return jnp.maximum(row_sum, _floor(self.p)) ** (-1 / self.p)

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    # log Z = power_lse / p, from two log-sums: the sums themselves may be beyond float32.
    return lse - power_lse / self.p


@dataclasses.dataclass(frozen=True)
class Unnormalized(Normalizer):
  """Z_i = 1: scores of a row are independent of one another."""

  @property
  def power(self) -> float | None:
    return None

  def factor(self, row_sum: jax.Array) -> jax.Array:
    return jnp.ones_like(row_sum)


@dataclasses.dataclass(frozen=True)
class Count(Normalizer):
  """Z_i = the number of keys that query i sees; an extra key is one of them.

  With `Relu()` these are the rows relu(s) / i of Guo et al. 2024 (arXiv:2410.13835). Similarities
  of any sign may be divided by it; exp, which it does not bound, may not.
  """

  @property
  def power(self) -> float | None:
    return 0.0

  def factor(self, row_sum: jax.Array) -> jax.Array:
    # Rows that see no key, those of padding, are zero whatever divides them.
    return 1 / jnp.maximum(row_sum, 1)


@dataclasses.dataclass(frozen=True)
class AbsFloor(Normalizer):
  """Z_i = max(|sum_j f_ij|, floor): for similarities that can be negative.

  The signed similarities are summed first, as in the official code (Table 15: floor = 1).
  """

  floor: float = 1.0

  def __post_init__(self):
    if self.floor <= 0:
      raise ValueError(f'{self}: floor must be > 0.')

  def factor(self, row_sum: jax.Array) -> jax.Array:
    # The absolute value of the sum, not a sum of absolute values: similarities of both signs may
    # cancel, and the floor is for the rows where they do.
    return 1 / jnp.maximum(jnp.abs(row_sum), self.floor)

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    # log Z = max(lse, log floor), and this is lse - log Z.
    return jnp.minimum(lse - jnp.log(self.floor), 0)


@dataclasses.dataclass(frozen=True)
class AbsSum(Normalizer):
  """Z_i = sum_j |exp(s_ij) - 1| + eps exp(m_i), m_i = max(0, max_j s_ij): that of Softpick alone.

  The paper (arXiv 2504.20966) and its code divide both sides by exp(m_i) and add eps to the sum
  that is left; eps is 1e-6 in the released kernels and 1e-8 in their T x T form. They take m_i
  without the 0, which makes no difference: where every score is negative the row is zero. As in
  the released kernels m_i has no gradient.
  """

  eps: float = 1e-6

  def __post_init__(self):
    # Without it a row of zero scores would be 0 / 0.
    if self.eps <= 0:
      raise ValueError(f'{self}: eps must be > 0; the released kernels of softpick use 1e-6.')


@dataclasses.dataclass(frozen=True)
class Clipped(Normalizer):
  """Clipped softmax: A_ij = clip((high - low) P_ij + low, 0, 1) of the softmax P, for exp alone.

  Weights can so be exactly 0, and 1, with finite scores, and a weight that is clipped passes no
  gradient on (Bondarenko et al. 2023, arXiv:2306.12929, whose gamma is `low` and whose zeta, or
  eta in the code, is `high`; the function is that of the release,
  Qualcomm-AI-research/outlier-free-transformers). They write low = -alpha / T for sequences of T
  tokens; the default is alpha = 12 at T = 512, their choice for OPT-125M. `Clipped(low=0.0)` is
  softmax. Rows sum to one no longer: their proxy scores are the clipped weights over their sum.
  """

  low: float = -12 / 512
  high: float = 1.0

  clips = True

  def __post_init__(self):
    if not -math.inf < self.low <= 0 or not 1 <= self.high < math.inf:
      raise ValueError(f'{self}: low must be <= 0, so that hidden keys have no weight, and '
                       'high >= 1; low = -alpha / T for sequences of T tokens.')

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    return jnp.zeros_like(lse)  # rows of exp arrive divided by their sum

  def clipped(self, weights: jax.Array) -> jax.Array:
    return jnp.clip((self.high - self.low) * weights + self.low, 0, 1)
