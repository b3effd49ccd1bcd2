"""Similarities f(s), functions of a scaled score s = phi(q).phi(k)/sqrt(Dh) + g (Section 7.4)."""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from sink_jax.attention import require
from sink_jax.component import Component


class Similarity(Component):
  """A parameter-free scalar function f(s) of float32 scores.

  It runs inside kernel tiles, so it may only use elementwise operations that lower on every back
  end; kernels take its derivative by `jax.jvp`.
  """

  signed: ClassVar[bool] = False  # may f(s) be negative?
  # 'additive': a row's sum is sum_j f(s); only these similarities are called as functions.
  # 'exponential': f = exp, computed relative to the row's maximum. 'rectified': Softpick, whose
  # weights and sum use different functions.
  kind: ClassVar[Literal['additive', 'exponential', 'rectified']] = 'additive'
  cap: ClassVar[float] = 0.0  # the c by which scores of keys become c tanh(s / c); 0 for none

  def __call__(self, s: jax.Array) -> jax.Array:
    raise NotImplementedError


class Exp(Similarity):
  """f(s) = exp(s). With RowSum this is softmax attention (Eq. 4)."""

  kind = 'exponential'


class CappedExp(Similarity):
  """f(s) = exp(c tanh(s / c)), c = cap: softmax of scores that cannot leave (-c, c).

  It is the soft cap of Gemma 2 (arXiv:2408.00118, Section 2), where c = 50. It acts on the scores
  of all keys, including a learned k*, but not on a logit that is not a product (SinkLogit).
  """

  cap: float = 50.0

  kind = 'exponential'

  def __post_init__(self):
    require(self, self.cap > 0, 'cap must be above 0; Exp() is without a cap')


class Sigmoid(Similarity):
  """f(s) = 1 / (1 + exp(-(s + bias))).

  Without a bias it is the sigmoid attention of the official code (sail-sg/Attention-Sink). With
  bias = -log T for training sequences of T tokens, the weights of a row of T keys sum to about one
  when training begins (Ramapuram et al. 2024, arXiv:2409.04431).
  """

  bias: float = 0.0

  def __call__(self, s: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(s + self.bias if self.bias else s)


class Relu(Similarity):
  """f(s) = max(s, 0), with derivative 0 at s = 0.

  With the normalizer `Count()` it is the ReLU attention of Guo et al. 2024 (arXiv:2410.13835).
  Wortsman et al. 2023 (arXiv:2309.08586) divide by a fixed length instead.
  """

  def __call__(self, s: jax.Array) -> jax.Array:
    # Not `jnp.maximum`, whose derivative at s = 0 is 1/2: features of zeros have such scores.
    return jnp.where(s > 0, s, 0)


class SquaredRelu(Similarity):
  """f(s) = max(s, 0)^2, as in the gated attention unit of Hua et al. 2022 (arXiv:2202.10447)."""

  def __call__(self, s: jax.Array) -> jax.Array:
    relu = jnp.where(s > 0, s, 0)
    return relu * relu


class Linear(Similarity):
  """f(s) = s: the similarity of every kernel ("linear") attention of Table 15."""

  signed = True

  def __call__(self, s: jax.Array) -> jax.Array:
    return s


class Softpick(Similarity):
  """f(s) = max(exp(s) - 1, 0): softpick, with its normalizer AbsSum (arXiv 2504.20966).

  A key with a score below zero has no weight, but its score counts in the sum that the row is
  divided by, so a row may be all zeros. The formula is from the paper and its code
  (zaydzuhri/softpick-attention). The derivative at s = 0 is zero.
  """

  kind = 'rectified'
