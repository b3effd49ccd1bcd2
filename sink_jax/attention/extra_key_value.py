"""Biases k*, v* beside the keys and values, and sink logits (Section 7.3)."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from sink_jax.attention.param import Dims, Param
from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class ExtraKeyValue(Component):
  """What attention sees beside its tokens.

  A bias slot is one more key, seen by every query: never rotated, without position
  bias, with its value v* (None: a zero value).
  """

  has_extra_key = False  # is there an extra key, which takes part in the normalisation?
  logit_may_be_negative = False  # also where all features, and so their products, are positive?

  @property
  def label(self) -> str:
    """A few words for tables, of the default values; empty where nothing is added."""
    return type(self).__name__

  @property
  def description(self) -> str:
    """What is added, as a part of a sentence; empty where nothing is."""
    return repr(self)

  @property
  def acts_only_through_normalisation(self) -> bool:
    """Is the extra key without a value, so that it changes nothing but the sum of a row?"""
    return False

  def check_narrower(self, head_dim: int) -> None:
    """Raises a ValueError where heads of `head_dim` channels leave no such variant."""

  def params(self, dims: Dims) -> dict[str, Param]:
    return {}

  def key_HxDh(self, params, dims: Dims):
    """k*, before the feature map; None where the logit does not depend on q."""
    return None

  def logit_H(self, params):
    """The slot's score where it does not depend on q."""
    raise NotImplementedError

  def value_HxDh(self, params, dims: Dims):
    """v* of the slot, or None."""
    return None

  def output_HxDh(self, params, dims: Dims):
    """A vector added to every head's output, or None."""
    return None


@dataclasses.dataclass(frozen=True)
class NoBias(ExtraKeyValue):
  """Attention to the tokens alone."""

  label = description = ''


@dataclasses.dataclass(frozen=True)
class KBias(ExtraKeyValue):
  """A learned key k* whose value is fixed (Tables 4, 5, 12 and 13).

  shared: one k* for all heads of a layer instead of one per head.
  learnable_dims: only the first d_a channels are learned, the rest are zero
    (Table 13); None learns all.
  value: 'zero'; 'first' for v' = [1, 0, ..., 0]; 'uniform' for
    v'' = [1, ..., 1] / sqrt(Dh). value_norm: the m of m v' and m v'' (Table 5).
  """

  shared: bool = False
  learnable_dims: int | None = None
  value: str = 'zero'
  value_norm: float = 1.0

  has_extra_key = True
  label = 'K bias'
  description = 'the key bias k*'

  def __post_init__(self):
    if self.value not in ('zero', 'first', 'uniform'):
      raise ValueError(f"{self}: value must be 'zero', 'first' or 'uniform'.")
    if self.learnable_dims is not None and self.learnable_dims < 1:
      raise ValueError(f'{self}: learnable_dims must be at least 1, or None for all.')

  @property
  def acts_only_through_normalisation(self):
    return self.value == 'zero'

  def check_narrower(self, head_dim):
    if (self.learnable_dims or 0) >= head_dim:
      raise ValueError(f'{self.learnable_dims} learnable dimensions; heads have {head_dim}')

  def params(self, dims):
    learned = self.learnable_dims or dims.head_dim
    if learned > dims.head_dim:
      raise ValueError(f'{self}: learnable_dims exceeds the head dimension {dims.head_dim}.')
    return {'key': Param((1 if self.shared else dims.heads, learned), 'bias')}

  def key_HxDh(self, params, dims):
    key = params['key']
    key = jnp.pad(key, ((0, 0), (0, dims.head_dim - key.shape[1])))
    return jnp.broadcast_to(key, (dims.heads, dims.head_dim))

  def value_HxDh(self, params, dims):
    if self.value == 'zero':
      return None
    shape = (dims.heads, dims.head_dim)
    if self.value == 'first':
      return jnp.zeros(shape).at[:, 0].set(self.value_norm)
    return jnp.full(shape, self.value_norm / math.sqrt(dims.head_dim))


@dataclasses.dataclass(frozen=True)
class KVBias(ExtraKeyValue):
  """A learned key k* and a learned value v* (Table 4; Sun et al. 2024)."""

  shared: bool = False

  has_extra_key = True
  label = 'KV bias'
  description = 'the key and value biases k* and v*'

  def params(self, dims):
    shape = (1 if self.shared else dims.heads, dims.head_dim)
    return {'key': Param(shape, 'bias'), 'value': Param(shape, 'bias')}

  def key_HxDh(self, params, dims):
    return jnp.broadcast_to(params['key'], (dims.heads, dims.head_dim))

  def value_HxDh(self, params, dims):
    return jnp.broadcast_to(params['value'], (dims.heads, dims.head_dim))


@dataclasses.dataclass(frozen=True)
class VBias(ExtraKeyValue):
  """A learned v* added to every head's output; no extra key (Table 4, last row)."""

  shared: bool = False

  label = 'V bias'
  description = 'the value bias v*'

  def params(self, dims):
    return {'value': Param((1 if self.shared else dims.heads, dims.head_dim), 'bias')}

  def output_HxDh(self, params, dims):
    return jnp.broadcast_to(params['value'], (dims.heads, dims.head_dim))


@dataclasses.dataclass(frozen=True)
class SinkLogit(ExtraKeyValue):
  """One learned logit per query head, without a value (gpt-oss).

  The K bias whose logit does not depend on the query.
  """

  has_extra_key = True
  logit_may_be_negative = True  # it is learned, and no product of features
  acts_only_through_normalisation = True
  label = 'sink logit'
  description = 'the sink logit'

  def params(self, dims):
    return {'logit': Param((dims.heads,), 'zeros')}

  def logit_H(self, params):
    return params['logit']
