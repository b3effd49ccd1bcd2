"""Operations on each query, key and value by itself, before scores and sums.

Queries and keys are normalised, queries multiplied by a temperature, both rotated (see `position`)
and mapped to features. Values are changed once; a cache stores normalised keys and changed values.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from sink_jax.attention import AnyArray, Arrays, Dims, Learnable, Param, linear, require, rms_norm
from sink_jax.attention.mask import Mask
from sink_jax.attention.similarity import Similarity
from sink_jax.component import Component


class QueryKeyNorm(Learnable, Component):
  """A normalisation of each query and key by itself, before their rotation."""

  def normalized(self, x: jax.Array, params: Arrays, of: Literal['query', 'key']) -> jax.Array:
    """Returns normalised queries (B, T, H, Dh) or keys (B, T, Hkv, Dh), in their dtype."""
    return x


class NoQKNorm(QueryKeyNorm):
  """No normalisation: queries and keys stay as they are projected."""


class QKNorm(QueryKeyNorm):
  """RMSNorm over the Dh channels of a head, with a gain for queries and one for keys (Qwen3)."""

  eps: float = 1e-6
  axis: ClassVar[int | tuple[int, int]] = -1  # over which squares are averaged

  def __post_init__(self):
    require(self, self.eps >= 0, 'eps must be >= 0; 1e-6 is usual')

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'query_gain': Param((dims.head_dim,), 1.0), 'key_gain': Param((dims.head_dim,), 1.0)}

  def normalized(self, x: jax.Array, params: Arrays, of: Literal['query', 'key']) -> jax.Array:
    return rms_norm(x, params[f'{of}_gain'], self.eps, self.axis)


class ProjectionQKNorm(QKNorm):
  """RMSNorm over all heads of a token together, with a gain for every channel of every head.

  It is the QK-norm of OLMo 2 (arXiv:2501.00656, Section 3.3.2), which normalises the output of the
  projection before splitting it into heads.
  """

  axis = (-2, -1)

  def params(self, dims: Dims) -> dict[str, Param]:
    return {
      'query_gain': Param((dims.heads, dims.head_dim), 1.0),
      'key_gain': Param((dims.kv_heads, dims.head_dim), 1.0),
    }


class Temperature(Learnable, Component):
  """A factor of each query, after its normalisation and before its rotation and feature map.

  Without a feature map it multiplies all products q_i . k_j, including that with an extra key k*,
  but neither a position bias nor a sink logit.
  """

  # Does it depend on the number of visible keys? A cache that counts positions in the cache, not in
  # the text, does not know that number once it has dropped a token.
  counts_keys: ClassVar[bool] = False

  def factor_LxH(self, positions_L: AnyArray, mask: Mask, params: Arrays) -> jax.Array | None:
    """Returns the factors of queries, float32; (L, 1) if heads share them; None for no factor.

    Positions ascend; the last one is the position of the last token.
    """
    return None


class Fixed(Temperature):
  """No factor: q_i . k_j is multiplied only by 1/sqrt(Dh)."""


class LogLength(Temperature):
  """q_i <- s_h log(n_i) q_i, where query i sees n_i keys: scalable softmax (arXiv 2501.19399).

  Scalable softmax (SSMax) is exp(s log(n) z_j) / sum_k exp(s log(n) z_k) for n scores z, with an s
  for every layer and head (Eq. 11, without the bias that the paper tries). We read only its
  abstract and Figure 1, and implementations that cite its equations. A learned sink token counts in
  n_i, an extra key does not. The first query sees one key, so its factor is 0.

  learned: whether s is a parameter (H,) of each layer. scale: the initial value of s if it is
  learned, otherwise s itself. With 0.168, the paper's value in those implementations, the mean
  factor over n = 1..1024 is one.
  """

  learned: bool = True
  scale: float = 1.0

  counts_keys = True

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'scale': Param((dims.heads,), self.scale)} if self.learned else {}

  def factor_LxH(self, positions_L: AnyArray, mask: Mask, params: Arrays) -> jax.Array | None:
    # All tokens count as keys, including those that a cache has dropped.
    visible_L = jnp.asarray(mask.visible(positions_L, positions_L[-1:] + 1), jnp.float32)
    log_L = jnp.log(jnp.maximum(visible_L, 1))  # a mask may leave a query without keys
    scale_H = params['scale'] if self.learned else jnp.full(1, self.scale)
    return log_L[:, None] * scale_H


class FeatureMap(Learnable, Component):
  """A map phi of every query and key of a layer, and of an extra key k* ("kernel", Section 7.4)."""

  positive: ClassVar[bool] = False  # are all features positive, so that phi(q).phi(k) > 0?

  def features(self, x: jax.Array, params: Arrays) -> jax.Array:
    """Returns the features (..., Dh) of queries or keys (..., Dh), in their dtype."""
    return x


class Identity(FeatureMap):
  """phi(x) = x."""


class EluPlusOne(FeatureMap, Similarity):
  """elu(x) + 1, elementwise, as a feature map or as a similarity f(s) (Table 15 has both)."""

  positive = True

  def features(self, x: jax.Array, params: Arrays) -> jax.Array:
    return self(x)

  def __call__(self, s: jax.Array) -> jax.Array:
    # The minimum keeps exp finite where it is not used: a gradient through `where` takes both. No
    # expm1, which does not lower on every back end.
    return jnp.where(s > 0, s + 1, jnp.exp(jnp.minimum(s, 0)))


class Mlp(FeatureMap):
  """phi(x) = W2 relu(W1 x), with matrices that heads, queries and keys share.

  As in the official code (sail-sg/Attention-Sink).
  """

  def params(self, dims: Dims) -> dict[str, Param]:
    return {
      'w1': Param((dims.head_dim, dims.head_dim), 'linear'),
      'w2': Param((dims.head_dim, dims.head_dim), 'linear'),
    }

  def features(self, x: jax.Array, params: Arrays) -> jax.Array:
    w1, w2 = (jnp.asarray(params[name], x.dtype) for name in ('w1', 'w2'))
    return linear(jax.nn.relu(linear(x, w1)), w2)


class Value(Learnable, Component):
  """A change of the projected values of tokens; it does not act on a learned extra value v*."""

  def values(self, v: jax.Array, params: Arrays) -> jax.Array:
    """Returns the values (B, T, Hkv, Dh) that attention mixes, in the dtype of projected ones."""
    return v


class PlainValue(Value):
  """No change: attention mixes the projected values."""


class ValueScale(Value):
  """v <- c v with one learned c per layer and key head, starting at one.

  It was meant to be V-scale (Chen et al. 2026, arXiv:2603.17771), but is not. By the authors'
  replies to reviewers, V-scale is phi(|v|^2) v; phi has one parameter per layer and head, and
  shrinks short values. We could not read the paper, which defines phi.
  """

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'scale': Param((dims.kv_heads,), 1.0)}

  def values(self, v: jax.Array, params: Arrays) -> jax.Array:
    # In float32 and rounded once: c rounded to bfloat16 could not move by less than 2^-9.
    return (v.astype(jnp.float32) * params['scale'][:, None]).astype(v.dtype)
