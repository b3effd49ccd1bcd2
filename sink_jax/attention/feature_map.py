"""Feature maps phi ("kernels" in the paper's Section 7.4), applied after RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.attention.param import AnyArray, Dims, Param
from sink_jax.attention.similarity import Similarity, elu_plus_one
from sink_jax.component import Component


class FeatureMap(Component):
  """A map phi of every query and key of a layer, and of an extra key k*."""

  positive: ClassVar[bool] = False  # are all features positive, so that phi(q).phi(k) > 0?

  def params(self, dims: Dims) -> dict[str, Param]:
    """Returns the parameters of one layer, {name: Param}."""
    return {}

  def features(self, x: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    """Returns the features (..., Dh) of queries or keys (..., Dh), in their dtype."""
    raise NotImplementedError


class Identity(FeatureMap):
  """phi(x) = x."""

  def features(self, x: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    return x


class EluPlusOne(FeatureMap, Similarity):
  """elu(x) + 1, either as a feature map (elementwise on q and k) or as a similarity f(s).

  The paper uses the function for both (Table 15), so this class is both.
  """

  positive = True

  def features(self, x: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    return elu_plus_one(x)

  def __call__(self, s: jax.Array) -> jax.Array:
    return elu_plus_one(s)


class Mlp(FeatureMap):
  """phi(x) = W2 relu(W1 x) with Dh x Dh matrices and no biases.

  The heads of a layer share the matrices, and so do queries and keys, as in the official code
  (sail-sg/Attention-Sink).
  """

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'w1': Param((dims.head_dim, dims.head_dim), 'linear'),
            'w2': Param((dims.head_dim, dims.head_dim), 'linear')}

  def features(self, x: jax.Array, params: Mapping[str, AnyArray]) -> jax.Array:
    hidden = jax.nn.relu(jnp.einsum('...d,de->...e', x, params['w1'].astype(x.dtype)))
    # Nothing follows W2, so features may be negative: `positive` stays False for this map.
    return jnp.einsum('...d,de->...e', hidden, params['w2'].astype(x.dtype))
