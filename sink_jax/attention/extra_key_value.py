"""The extra key k* and value v* that a layer may have beside its tokens (Section 7.3).

The paper calls them K biases, KV biases and V biases. An extra key takes part in the softmax, or
in the row sum, of every query. A query that matches no token can attend to it instead of to the
first token, which is why variants with an extra key show no sink on that token. The learned sink
logit of gpt-oss is an extra key whose score does not depend on the query.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention.param import AnyArray, Dims, Param
from sink_jax.attention.position import Alibi, Positions
from sink_jax.component import Component, check_integers

Arrays = Mapping[str, AnyArray]  # a component's parameters in one layer, by name


class ExtraKeyValue(Component):
  """What attention has beside its tokens: an extra key, an extra value, both or neither.

  An extra key is one more key that every query sees. It is never rotated and gets no position bias.
  Its value is v*, or zero if `value_HxDh` returns None. Code that depends on the variant reads the
  attributes below and does not test for its class.
  """

  has_extra_key: ClassVar[bool] = False  # is there a key that takes part in the normalisation?
  # May the extra logit be negative where all features, and so all products, are positive?
  logit_may_be_negative: ClassVar[bool] = False
  # Is its score the logarithm of what is added to a sum of exponentials, so that f must be exp?
  needs_exponential: ClassVar[bool] = False
  # Words for tables and for sentences; empty where nothing is added to attention.
  label: ClassVar[str]
  description: ClassVar[str]

  def __init_subclass__(cls, **options):
    super().__init_subclass__(**options)
    # Words are not inherited: what a subclass adds is something else.
    cls.label = vars(cls).get('label', cls.__name__)
    cls.description = vars(cls).get('description', cls.__name__)

  @property
  def acts_only_through_normalisation(self) -> bool:
    """Whether the extra key has no value, so that it changes nothing but the sum of a row."""
    return False

  @property
  def future(self) -> int | None:
    """The text length, if the extra key stands for all positions after the query; else None.

    The mask must hide those positions.
    """
    return None

  def check_narrower(self, head_dim: int) -> None:
    """Raises a ValueError if heads of `head_dim` channels are too narrow for this variant."""

  def params(self, dims: Dims) -> dict[str, Param]:
    """Returns the parameters of one layer, {name: Param}."""
    return {}

  def key_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    """Returns each query head's k* before the feature map; None if the logit ignores the query."""
    return None

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    """Returns the extra key's score where it depends on the head and position of a query alone.

    An axis may have size one instead, if the score is the same along it.
    """
    raise NotImplementedError

  def value_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    """Returns v* of every query head, or None for a zero value."""
    return None

  def output_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    """Returns a vector per head that is added to the head's output, or None."""
    return None


class NoBias(ExtraKeyValue):
  """No extra key and no extra value: attention sees its tokens alone."""

  label = description = ''


class KBias(ExtraKeyValue):
  """A learned key k* whose value is fixed (Tables 4, 5, 12 and 13).

  Attributes:
    shared: whether all heads of a layer share one k*, instead of one per head.
    learnable_dims: the number d_a of channels, from the first on, that are learned; the others
      are zero (Table 13). None learns all.
    value: the fixed value: 'zero', 'first' for m v' with v' = [1, 0, ..., 0], or 'uniform' for
      m v'' with v'' = [1, ..., 1] / sqrt(Dh).
    value_norm: the norm m of the value (Table 5).
  """

  shared: bool = False
  learnable_dims: int | None = None
  value: str = 'zero'
  value_norm: float = 1.0

  has_extra_key = True
  label = 'K bias'
  description = 'the key bias k*'

  def __post_init__(self):
    # Without this a misspelt value would act as 'uniform', the last branch of `value_HxDh`.
    if self.value not in ('zero', 'first', 'uniform'):
      raise ValueError(f"{self}: value must be 'zero', 'first' or 'uniform'.")
    if self.learnable_dims is not None and self.learnable_dims < 1:
      raise ValueError(f'{self}: learnable_dims must be at least 1, or None for all.')

  @property
  def acts_only_through_normalisation(self) -> bool:
    return self.value == 'zero'

  def check_narrower(self, head_dim: int) -> None:
    # Equal is refused, too: with all channels learned, a row of Table 13 would be the plain K bias.
    if (self.learnable_dims or 0) >= head_dim:
      raise ValueError(f'{self.learnable_dims} learnable dimensions; heads have {head_dim}')

  def params(self, dims: Dims) -> dict[str, Param]:
    learned = self.learnable_dims or dims.head_dim
    if learned > dims.head_dim:
      raise ValueError(f'{self}: learnable_dims exceeds the head dimension {dims.head_dim}.')
    # One row per query head, also where key heads are grouped: every query head has an extra score
    # of its own. A shared k* keeps its axis of heads, with the length 1.
    return {'key': Param((1 if self.shared else dims.heads, learned), 'bias')}

  def key_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    key = params['key']
    # The channels that are not learned are no parameters at all, so neither the optimizer nor
    # weight decay can move them from zero (Table 13).
    key = jnp.pad(key, ((0, 0), (0, dims.head_dim - key.shape[1])))
    return jnp.broadcast_to(key, (dims.heads, dims.head_dim))

  def value_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    if self.value == 'zero':
      return None
    shape = (dims.heads, dims.head_dim)
    if self.value == 'first':
      return jnp.zeros(shape).at[:, 0].set(self.value_norm)
    # Over sqrt(Dh), so that m v'' has the norm m in heads of any width, as m v' has (Table 5).
    return jnp.full(shape, self.value_norm / math.sqrt(dims.head_dim))


class KVBias(ExtraKeyValue):
  """A learned key k* and a learned value v* (Table 4; Sun et al. 2024)."""

  shared: bool = False

  has_extra_key = True
  label = 'KV bias'
  description = 'the key and value biases k* and v*'

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

  label = 'V bias'
  description = 'the value bias v*'

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'value': Param((1 if self.shared else dims.heads, dims.head_dim), 'bias')}

  def output_HxDh(self, params: Arrays, dims: Dims) -> jax.Array | None:
    return jnp.broadcast_to(params['value'], (dims.heads, dims.head_dim))


class SinkLogit(ExtraKeyValue):
  """One learned logit per query head, without a value (gpt-oss).

  It is a K bias whose logit does not depend on the query.
  """

  has_extra_key = True
  logit_may_be_negative = True  # it is learned, and no product of features
  label = 'sink logit'
  description = 'the sink logit'

  @property
  def acts_only_through_normalisation(self) -> bool:
    return True

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'logit': Param((dims.heads,), 'zeros')}

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    # Not divided by sqrt(Dh): the logit itself is learned, and it is no product of two vectors.
    return jnp.asarray(params['logit'])[:, None]


class ZeroSink(ExtraKeyValue):
  """Softmax off by one: Z_i = n + sum_j exp(s_ij), without parameters (Miller 2023).

  With n = 1 it is softmax with a logit of zero and a value of zero appended, which Xiao et al. 2023
  (arXiv:2309.17453) call a zero sink. It is also a sink logit that stays at 0, where `SinkLogit`
  starts. Any n > 0 acts as a fixed logit log n. The share n / Z_i of a row is reported as the
  weight of the extra key.
  """

  n: float = 1.0

  has_extra_key = True
  needs_exponential = True
  label = 'off by one'
  description = ''  # nothing is learned

  def __post_init__(self):
    if not 0 < self.n < math.inf:
      raise ValueError(f'{self}: n must be > 0 and finite; NoBias() adds nothing to the sum.')

  @property
  def acts_only_through_normalisation(self) -> bool:
    return True

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    return jnp.full((1, 1), math.log(self.n), jnp.float32)


class PseudoMask(ExtraKeyValue):
  """Z_i gains sum_j exp(-p_ij) over j = i+1 .. context, with p_ij = m_h (j - i + 1).

  These are the pseudo-attention scores of StableMask (Yin et al. 2024, arXiv:2402.04779). They
  stand at the keys that a causal mask hides, and their weights multiply no value. The sum shrinks
  from position to position, which tells a model without position embeddings where it is. As in the
  authors' code (MikaStars39/StableMask, src/model.py, at commit 8adc057; later ones have scores of
  zero), the slopes m_h are those of ALiBi and the next position has p = 2 m_h. Only the abstract of
  the paper was read. The authors' code sums up to the length of its input. Here `context` is fixed,
  so that decoding a text gives the same as one pass over it; from position `context` on, attention
  is plain softmax.

  Attributes:
    context: the number of positions, usually the length of the training sequences.
    gamma: one slope for all heads; None means the slopes of ALiBi.
  """

  context: int = 2048
  gamma: float | None = None

  has_extra_key = True
  needs_exponential = True
  label = 'pseudo-attention'
  description = ''  # nothing is learned

  def __post_init__(self):
    check_integers(self, 'context')
    if self.context < 1 or self.gamma is not None and not 0 < self.gamma < math.inf:
      raise ValueError(f"{self}: context must be at least 1, and gamma > 0, or None for ALiBi's "
                       'slopes.')

  @property
  def acts_only_through_normalisation(self) -> bool:
    return True

  @property
  def future(self) -> int:
    return self.context

  def logit_HxL(self, params: Arrays, heads: int, i_L: Positions) -> jax.Array:
    slope_Hx1 = (Alibi().slopes(heads)[:, None] if self.gamma is None
                 else np.full((1, 1), self.gamma, np.float32))
    count_L = self.context - 1 - jnp.asarray(i_L, jnp.float32)  # positions still to come
    # A geometric series: exp(-2m) (1 - exp(-m count)) / (1 - exp(-m)), in logarithms.
    series = lambda n: jnp.log(-jnp.expm1(-slope_Hx1 * n))
    logit = series(jnp.maximum(count_L, 1)) - series(1) - 2 * slope_Hx1
    # Finite, so that a row that adds nothing has finite differences of logarithms.
    return jnp.where(count_L > 0, logit, -1e30)
