"""The extra key k* and value v* that a layer may have next to its tokens (Section 7.3).

The paper calls them K biases, KV biases and V biases. A query that matches no token can attend to
an extra key instead of to the first token, which then is not a sink.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention import MASKED, Arrays, Dims, Learnable, Param, require
from sink_jax.attention.mask import Positions
from sink_jax.attention.position import Alibi
from sink_jax.component import Component


class ExtraKeyValue(Learnable, Component):
  """An extra key, an extra value, both or neither, next to the tokens.

  An extra key is one more key that every query sees, without rotation and position bias. Its value
  is v*, or zero if `value_HxDh` returns None.
  """

  has_extra_key: ClassVar[bool] = False  # is there a key that takes part in the normalisation?
  # Is its score the logarithm of a term in a sum of exponentials, so that f must be exp?
  needs_exponential: ClassVar[bool] = False
  future: ClassVar[int | None] = None  # the text length, if the key stands for all later tokens

  @property
  def acts_only_through_normalisation(self) -> bool:
    """True if the extra key has no value, so that it changes nothing but the sum of a row."""
    return self.has_extra_key and type(self).value_HxDh is ExtraKeyValue.value_HxDh

  def key_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    """Returns each query head's k* before the feature map; None if the logit ignores the query."""
    return None

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    """Returns the extra key's score if it ignores the query; an axis may have size one."""
    raise NotImplementedError

  def value_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    """Returns v* of every query head, or None for a zero value."""
    return None

  def output_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    """Returns a vector per head that is added to the head's output, or None."""
    return None


class NoBias(ExtraKeyValue):
  """No extra key and no extra value."""


class KBias(ExtraKeyValue):
  """A learned key k* whose value is fixed (Tables 4, 5, 12 and 13).

  shared: whether all heads of a layer share one k*, instead of one per head. learnable_dims: the
  number d_a of channels, from the first on, that are learned; the others are zero (Table 13). None
  learns all. value: 'zero', 'first' for m v' with v' = [1, 0, ..., 0], or 'uniform' for m v'' with
  v'' = [1, ..., 1] / sqrt(Dh), where m is value_norm (Table 5).
  """

  shared: bool = False
  learnable_dims: int | None = None
  value: str = 'zero'
  value_norm: float = 1.0

  has_extra_key = True

  def __post_init__(self):
    require(
      self, self.value in ('zero', 'first', 'uniform'), "value must be 'zero', 'first' or 'uniform'"
    )
    require(
      self,
      self.learnable_dims is None or self.learnable_dims >= 1,
      'learnable_dims must be at least 1, or None for all',
    )

  @property
  def acts_only_through_normalisation(self) -> bool:
    return self.value == 'zero'

  def params(self, dims: Dims) -> dict[str, Param]:
    learned = self.learnable_dims or dims.head_dim
    require(
      self, learned <= dims.head_dim, f'learnable_dims exceeds the head dimension {dims.head_dim}'
    )
    # One row per query head, also where key heads are grouped.
    return {'key': Param((1 if self.shared else dims.heads, learned), 'bias')}

  def key_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    key = params['key']
    key = jnp.pad(key, ((0, 0), (0, dims.head_dim - key.shape[1])))
    return jnp.broadcast_to(key, (dims.heads, dims.head_dim))

  def value_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    if self.value == 'zero':
      return None
    Dh = dims.head_dim
    unit = np.eye(1, Dh)[0] if self.value == 'first' else np.full(Dh, Dh**-0.5)
    return jnp.broadcast_to(self.value_norm * unit.astype(np.float32), (dims.heads, Dh))


class KVBias(ExtraKeyValue):
  """A learned key k* and a learned value v* (Table 4; Sun et al. 2024)."""

  shared: bool = False

  has_extra_key = True

  def params(self, dims: Dims) -> dict[str, Param]:
    shape = (1 if self.shared else dims.heads, dims.head_dim)
    return {'key': Param(shape, 'bias'), 'value': Param(shape, 'bias')}

  def key_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    return jnp.broadcast_to(params['key'], (dims.heads, dims.head_dim))

  def value_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    return jnp.broadcast_to(params['value'], (dims.heads, dims.head_dim))


class VBias(ExtraKeyValue):
  """A learned v* that is added to every head's output, without an extra key (Table 4, last row)."""

  shared: bool = False

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'value': Param((1 if self.shared else dims.heads, dims.head_dim), 'bias')}

  def output_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    return jnp.broadcast_to(params['value'], (dims.heads, dims.head_dim))


class SinkLogit(ExtraKeyValue):
  """One learned logit per query head, not divided by sqrt(Dh), without a value (gpt-oss)."""

  has_extra_key = True

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'logit': Param((dims.heads,), 0.0)}

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    return jnp.asarray(params['logit'])[:, None]


class ZeroSink(ExtraKeyValue):
  """Softmax off by one: Z_i = n + sum_j exp(s_ij), without parameters (Miller 2023).

  It is a sink logit that stays at log n. With n = 1 it is softmax with a logit of zero and a value
  of zero appended, which Xiao et al. 2023 (arXiv:2309.17453) call a zero sink. The share n / Z_i of
  a row is reported as the weight of the extra key.
  """

  n: float = 1.0

  has_extra_key = needs_exponential = True

  def __post_init__(self):
    require(self, self.n > 0, 'n must be > 0; NoBias() adds nothing to the sum')

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    return jnp.full((1, 1), math.log(self.n), jnp.float32)


class PseudoMask(ExtraKeyValue):
  """Z_i gains sum_j exp(-m_h j) over j = i+1 .. context - 1, for 0-based i and j.

  These are the pseudo-attention scores of StableMask (Yin et al. 2024, arXiv:2402.04779). They
  take the positions of the keys that a causal mask hides, and their weights multiply no value.
  Their sum shrinks from position to position, which tells a model without position embeddings where
  it is. We could not read the paper: a summary gives the score -gamma (j - 1) for the j-th
  position. The slopes m_h are those of the authors' code (MikaStars39/StableMask). Its src/model.py
  has the scores -m_h (j - i + 1) at commit 8adc057, and zeros in later commits, because two axes
  are swapped.

  context: the number of positions, usually the length of the training sequences. It is fixed, so
  that decoding gives the same result as one pass; beyond it attention is plain softmax. gamma: one
  slope for all heads; None means the slopes of ALiBi.
  """

  context: int = 2048
  gamma: float | None = None

  has_extra_key = needs_exponential = True

  def __post_init__(self):
    require(
      self,
      self.context >= 1 and (self.gamma is None or self.gamma > 0),
      "context must be at least 1, and gamma > 0, or None for ALiBi's slopes",
    )

  @property
  def future(self) -> int:
    return self.context

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    slope_Hx1 = (
      Alibi().slopes(heads)[:, None]
      if self.gamma is None
      else np.full((1, 1), self.gamma, np.float32)
    )
    first_L = jnp.asarray(i_L, jnp.float32) + 1  # the first hidden position
    count_L = self.context - first_L
    # A geometric series: exp(-m first) (1 - exp(-m count)) / (1 - exp(-m)), in logarithms.
    series = lambda n: jnp.log(-jnp.expm1(-slope_Hx1 * n))
    logit = series(jnp.maximum(count_L, 1)) - series(1) - slope_Hx1 * first_L
    return jnp.where(count_L > 0, logit, MASKED)
