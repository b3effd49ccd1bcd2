"""Normalizers Z_i of the rows of similarities f_ij (Section 7.4, Appendix C.4).

A kernel returns one statistic per row: sum_j f_ij^power, or its logarithm if f = exp. A normalizer
computes the factor 1 / Z_i of the row from it; only `reference` applies AbsSum, which only softpick
uses.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.attention import require
from sink_jax.component import Component

# The largest eps with which a row's weights still count as summing to one. The official code
# (sail-sg/Attention-Sink) adds 1e-8; a sum of sigmoids is about half the number of keys.
_NEGLECTED = 1e-6


class Normalizer(Component):
  """o_i = factor_i * sum_j f_ij v_j, where factor_i = 1 / Z_i."""

  needs_nonnegative: ClassVar[bool] = False  # are sums of signed similarities meaningless?
  # The exponent in a row's statistic sum_j f_ij^power; 0 counts keys, None needs no statistic.
  power: ClassVar[float | None] = 1.0

  @property
  def sums_to_one(self) -> bool:
    """True if the weights of a row, with the extra key's, are >= 0 and sum to one."""
    return False

  def factor(self, row_sum: jax.Array) -> jax.Array:
    """Returns 1/Z_i, given sum_j f_ij^power, elementwise; for similarities other than exp."""
    raise NotImplementedError

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    """Returns log(1/Z_i) + lse for f = exp, given log-sums of exp(s_ij) and of exp(power s_ij)."""
    raise NotImplementedError


def _floor(p: float) -> float:
  """The floor of a row sum x, from which on x^(-1/p) and its derivative stay within float32."""
  # At a sum x the derivative of x^(-1/p) has the size x^(-(1/p + 1)) / p, which is 1e36 / p here:
  # below 3.4e38, the largest float32 number, for every p of the paper, 1/4 to 4.
  return 10 ** (-36 / (1 / p + 1))


class RowSum(Normalizer):
  """Z_i = (sum_j f_ij + eps) / scale.

  The official code (sail-sg/Attention-Sink) adds eps = 1e-8 to the sums of sigmoid and elu+1, and
  nothing to those of softmax. `scale` is the paper's alpha (Eq. 29, Table 14 left): rows sum to it.
  """

  eps: float = 0.0
  scale: float = 1.0

  needs_nonnegative = True

  def __post_init__(self):
    require(self, self.eps >= 0 and self.scale > 0, 'eps must be >= 0 and scale > 0')

  @property
  def sums_to_one(self) -> bool:
    # `type` and not isinstance: a subclass may divide by something else.
    return type(self) is RowSum and self.scale == 1 and self.eps <= _NEGLECTED

  def factor(self, row_sum: jax.Array) -> jax.Array:
    return self.scale / jnp.maximum(row_sum + self.eps, _floor(1.0))

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    return jnp.full_like(lse, jnp.log(self.scale))  # AttentionSpec refuses exp with an eps


class PNorm(Normalizer):
  """Z_i = (sum_j f_ij^p)^(1/p) (Eq. 43 and 44, Figure 29)."""

  p: float = 0.5

  needs_nonnegative = True

  def __post_init__(self):
    require(self, self.p > 0, 'p must be > 0; the paper uses 1/4 to 4')

  @property
  def power(self) -> float | None:
    return self.p

  def factor(self, row_sum: jax.Array) -> jax.Array:
    return jnp.maximum(row_sum, _floor(self.p)) ** (-1 / self.p)

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    # log Z = power_lse / p, from two log-sums: the sums themselves may be beyond float32.
    return lse - power_lse / self.p


class Unnormalized(Normalizer):
  """Z_i = 1: the weights of a row do not depend on one another."""

  power = None


class Count(Normalizer):
  """Z_i = the number of keys that query i sees, including an extra key.

  With `Relu()` the weights are relu(s) / i, as in Guo et al. 2024 (arXiv:2410.13835).
  """

  power = 0.0

  def factor(self, row_sum: jax.Array) -> jax.Array:
    # Padding rows, which see no key, are zero for every divisor.
    return 1 / jnp.maximum(row_sum, 1)


class AbsFloor(Normalizer):
  """Z_i = max(|sum_j f_ij|, floor), for similarities that can be negative.

  The signed similarities are summed before the absolute value is taken, as in the official code,
  and may cancel (Table 15 uses floor = 1).
  """

  floor: float = 1.0

  def __post_init__(self):
    require(self, self.floor > 0, 'floor must be > 0')

  def factor(self, row_sum: jax.Array) -> jax.Array:
    return 1 / jnp.maximum(jnp.abs(row_sum), self.floor)

  def log_factor(self, lse: jax.Array, power_lse: jax.Array) -> jax.Array:
    # log Z = max(lse, log floor), and this is lse - log Z.
    return jnp.minimum(lse - jnp.log(self.floor), 0)


class AbsSum(Normalizer):
  """Z_i = sum_j |exp(s_ij) - 1| + eps exp(m_i), m_i = max(0, max_j s_ij); only for Softpick.

  The paper (arXiv 2504.20966) and its released kernels use it with eps = 1e-6; no gradient flows
  through m_i. Their m_i lacks the 0, which does not change the result: a row of negative scores is
  zero.
  """

  eps: float = 1e-6

  def __post_init__(self):
    # Without eps a row of zero scores would be 0 / 0.
    require(self, self.eps > 0, 'eps must be > 0; the released kernels of softpick use 1e-6')


class Clipped(Normalizer):
  """Clipped softmax: A_ij = clip((high - low) P_ij + low, 0, 1) of the softmax P; only for exp.

  Weights can be exactly 0 or 1 at finite scores, and a clipped weight passes no gradient
  (Bondarenko et al. 2023, arXiv:2306.12929; the function is from their code,
  Qualcomm-AI-research/outlier-free-transformers). `low` is their gamma = -alpha / T for sequences
  of T tokens, by default alpha = 12 at T = 512, as for OPT-125M; `high` is their zeta. Rows no
  longer sum to one, so the proxy scores of a row are its clipped weights divided by their sum.
  """

  low: float = -12 / 512
  high: float = 1.0

  def __post_init__(self):
    require(
      self,
      self.low <= 0 and self.high >= 1,
      'low must be <= 0, so that hidden keys have no '
      'weight, and high >= 1; low = -alpha / T for sequences of T tokens',
    )

  def clipped(self, weights: jax.Array) -> jax.Array:
    return jnp.clip((self.high - self.low) * weights + self.low, 0, 1)
