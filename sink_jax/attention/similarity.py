"""Similarities f(s), functions of a scaled score s = phi(q).phi(k)/sqrt(Dh) + g (Section 7.4)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from sink_jax.attention.param import soft_cap
from sink_jax.component import Component


class Similarity(Component):
  """A parameter-free scalar function f(s) of the score.

  It runs inside kernel tiles, so it may only use operations that lower on every back end.
  """

  signed: ClassVar[bool] = False  # may f(s) be negative?
  # How rows are computed: 'additive' sums f as it is; 'exponential' is f = exp, whose rows are
  # computed relative to their maximum and cannot overflow; 'rectified' is Softpick, which weighs
  # values by one function of the score and sums another.
  kind: ClassVar[Literal['additive', 'exponential', 'rectified']] = 'additive'

  @property
  def limit(self) -> float:
    """The soft cap c: scores s of keys become c tanh(s / c) before exp; 0 means no cap."""
    return 0.0

  def __call__(self, s: jax.Array) -> jax.Array:
    """Returns f of float32 scores, elementwise; kernels take its derivative by `jax.jvp`."""
    raise NotImplementedError


class Exp(Similarity):
  """f(s) = exp(s). With RowSum this is softmax attention (Eq. 4)."""

  kind = 'exponential'

  def __call__(self, s: jax.Array) -> jax.Array:
    return jnp.exp(s)


class CappedExp(Similarity):
  """f(s) = exp(c tanh(s / c)), c = cap: softmax of scores that cannot leave (-c, c).

  It is the soft cap of the attention logits of Gemma 2 (arXiv:2408.00118, Section 2), which
  uses c = 50. The cap acts on the scores of all keys, including a learned k*. It does not act on
  a logit that is no product with a key, such as that of SinkLogit.
  """

  cap: float = 50.0

  kind = 'exponential'

  def __post_init__(self):
    if not 0 < self.cap < math.inf:
      raise ValueError(f'{self}: cap must be above 0 and finite; 50 is usual, and Exp() is without '
                       'a cap.')

  @property
  def limit(self) -> float:
    return self.cap

  def __call__(self, s: jax.Array) -> jax.Array:
    return jnp.exp(soft_cap(s, self.cap))


class Sigmoid(Similarity):
  """f(s) = 1 / (1 + exp(-(s + bias))).

  Without a bias it is the sigmoid attention of the official code (sail-sg/Attention-Sink). With
  bias = -log T, where T is the length of the training sequences, the weights of a row that sees T
  keys sum to about one when training begins (Ramapuram et al. 2024, arXiv:2409.04431).
  """

  bias: float = 0.0

  def __post_init__(self):
    if not math.isfinite(self.bias):
      raise ValueError(f'{self}: bias must be finite.')

  def __repr__(self) -> str:
    # A bias of zero is left out: configs and records that were written before there was one hold
    # 'Sigmoid()', and are compared with this string.
    return f'{type(self).__name__}({f"bias={self.bias!r}" if self.bias else ""})'

  def __call__(self, s: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(s + self.bias if self.bias else s)


class Relu(Similarity):
  """f(s) = max(s, 0), with derivative 0 at s = 0.

  With the normalizer `Count()`, which divides by the number of visible keys, it is the ReLU
  attention of Guo et al. 2024 (arXiv:2410.13835). Wortsman et al. 2023 (arXiv:2309.08586) divide
  by a fixed length instead.
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
  divided by. Hence a row need not sum to one, and may be all zeros. The derivative at s = 0 is
  taken as zero. The formula is that of the paper and of its code (zaydzuhri/softpick-attention,
  naive_softpick_attn.py and flash_softpick_attn.py).
  """

  kind = 'rectified'

  def __call__(self, s: jax.Array) -> jax.Array:
    return jax.nn.relu(jnp.expm1(s))


def exp_less_one(s: jax.Array, log: jax.Array) -> jax.Array:
  """Returns exp(-log) (exp(s) - 1) for scores s <= log and log >= 0.

  Kernels cannot use it, since expm1 does not lower on every back end.
  """
  # The minimum keeps expm1 finite where it is not used: a gradient through `where` takes both.
  near = jnp.expm1(jnp.minimum(s, 1)) * jnp.exp(-log)
  return jnp.where(s < 1, near, jnp.exp(s - log) - jnp.exp(-log))


def elu_plus_one(x: jax.Array) -> jax.Array:
  """Returns elu(x) + 1, without expm1, which does not lower on every back end."""
  # The minimum keeps exp finite where it is not used: a gradient through `where` takes both.
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
