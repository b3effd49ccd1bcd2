"""Temperatures: factors of queries, which may grow with the number of keys that a query sees.

A factor multiplies the query after its normalisation, before rotation and feature map. Without a
feature map it therefore multiplies all products q_i . k_j, including that with an extra key k*. A
position bias and a sink logit are not products, and the factor does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.attention.mask import Mask
from sink_jax.attention.param import AnyArray, Dims, Param
from sink_jax.attention.position import Positions
from sink_jax.component import Component, check_integers


class Temperature(Component):
  """A factor of each query that depends on its position, the mask and the head."""

  # Does the factor depend on the number of visible keys? A cache that counts its own positions, and
  # not those of the text, does not know that number once a token was dropped.
  counts_keys: ClassVar[bool] = False

  def params(self, dims: Dims) -> dict[str, Param]:
    """Returns the parameters of one layer, {name: Param}."""
    return {}

  def factor_LxH(self, positions_L: Positions, mask: Mask,
                 params: Mapping[str, AnyArray]) -> jax.Array | None:
    """Returns the factors of queries at these positions, float32; None for no factor.

    The axis of heads has length 1 if all heads share a factor. Positions ascend, and the last one
    is that of the last token.
    """
    return None


class Fixed(Temperature):
  """No factor: q_i . k_j is multiplied by 1/sqrt(Dh) alone."""


class LogLength(Temperature):
  """q_i <- s_h log(n_i) q_i, where query i sees n_i keys: scalable softmax (arXiv 2501.19399).

  Scalable softmax (SSMax) is exp(s log(n) z_j) / sum_k exp(s log(n) z_k) for n scores z, with a
  learned s in every layer and head. Only the abstract and Figure 1 (s = 0.43) of the paper were
  read, and summaries and implementations of its formula by others. The query's own key counts in
  n_i, and so does a learned sink token; an extra key does not. The first query sees one key, so its
  factor is 0: this changes nothing in a softmax over one token, and sets the token's score to 0
  beside an extra key. The bias that the paper tries beside s log(n) is left out, as in the paper's
  final form.

  Attributes:
    learned: whether s is a parameter (H,) of each layer.
    scale: the initial value of s if it is learned, otherwise s itself. The mean of log(n) over
      n = 1..1024 is 5.9, so with 0.17 a model of this context starts with a mean factor of one.
  """

  learned: bool = True
  scale: float = 1.0

  counts_keys = True

  def __post_init__(self):
    if not math.isfinite(self.scale):
      raise ValueError(f'{self}: scale must be finite; 1 is usual.')

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'scale': Param((dims.heads,), self.scale)} if self.learned else {}

  def factor_LxH(self, positions_L: Positions, mask: Mask,
                 params: Mapping[str, AnyArray]) -> jax.Array | None:
    # There are as many keys as tokens, also where a cache has dropped some.
    visible_L = jnp.asarray(mask.visible(positions_L, positions_L[-1:] + 1), jnp.float32)
    log_L = jnp.log(jnp.maximum(visible_L, 1))  # a mask may leave a query without keys
    scale_H = params['scale'] if self.learned else jnp.full(1, self.scale)
    return log_L[:, None] * scale_H


class Llama4(Temperature):
  """q_i <- (1 + beta log(1 + floor(i / floor))) q_i for query i = 1, 2, ... (Llama 4).

  The formula was read in Meta's code (meta-llama) and in transformers, where beta is `attn_scale`
  and floor is `floor_scale`, and i is the 0-based position plus one. There only the layers without
  rotary positions have the factor. Here all layers of a model have it, so only those whose position
  encoding is `Nope()` compute what Llama 4's do. The positions are those of the encoding: with a
  cache that counts its own positions, the factor stops growing at the size of the cache.

  Attributes:
    beta: how fast the factor grows.
    floor: the number of tokens after which the factor rises by a step; it is one before the first.
  """

  beta: float = 0.1
  floor: int = 8192

  def __post_init__(self):
    check_integers(self, 'floor')
    if not (self.floor >= 1 and 0 <= self.beta < math.inf):
      raise ValueError(f'Llama4(beta={self.beta}, floor={str(self.floor)[:50]}): beta must be >= 0 '
                       'and finite, and floor at least 1.')

  def factor_LxH(self, positions_L: Positions, mask: Mask,
                 params: Mapping[str, AnyArray]) -> jax.Array | None:
    # Whole numbers are divided: in float32 a quotient just below a whole number could round up.
    steps_L = (jnp.asarray(positions_L, jnp.int32) + 1) // min(self.floor, 2**31 - 1)
    return 1 + self.beta * jnp.log1p(steps_L.astype(jnp.float32))[:, None]
