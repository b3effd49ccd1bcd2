"""Attention of a few new tokens to the keys and values of a cache.

With one new query per text the scores are as many as the keys, so the definition serves: no
T x T array arises that a kernel would have to avoid.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sink_jax.attention import reference
from sink_jax.attention.spec import (
  AttentionSpec,
  Params,
  apply_position_and_features,
  position_queries,
)


def attend_cached(spec: AttentionSpec, q_BxLxHxDh: jax.Array, k_BxHkvxCxDh: jax.Array,
                  v_BxHkvxCxDh: jax.Array, params: Params, i_L: jax.Array, j_C: jax.Array,
                  v_BxLxHkvxDh: jax.Array, gate_BxLxD: jax.Array | None = None, *,
                  rotated: bool = False) -> jax.Array:
  """Output (B, L, H, Dh) of queries at positions i_L to C cache entries at positions j_C.

  Queries come normalised and not rotated, and values as attention mixes them. Keys come normalised:
  rotated by their positions, or not; those within the cache change as entries are dropped, so that
  keys are then rotated at every step. An entry whose position is later than every query's is not
  seen; that is how an empty one is marked. L x C scores are held: L is one when decoding.
  v_BxLxHkvxDh are the values of the queries' own tokens, and gate_BxLxD is the block's normed input
  of them, see `attend`.
  """
  q = position_queries(spec, q_BxLxHxDh, i_L, params)
  # The transposes are folded into the products, so nothing is copied.
  k_BxCxHkvxDh, v_BxCxHkvxDh = (jnp.swapaxes(x, 1, 2) for x in (k_BxHkvxCxDh, v_BxHkvxCxDh))
  if rotated:
    k = spec.feature_map.features(k_BxCxHkvxDh, params.get('feature_map', {}))
  else:
    k = apply_position_and_features(spec, k_BxCxHkvxDh, j_C, params)
  o = reference.attend(spec, q, k, v_BxCxHkvxDh, params, i_L, j_C)
  return spec.head.output(o, v_BxLxHkvxDh, gate_BxLxD, params.get('head', {})).astype(q.dtype)


def attend_cached_each(spec: AttentionSpec, q_BxLxHxDh: jax.Array, k_BxHkvxExDh: jax.Array,
                       v_BxHkvxExDh: jax.Array, params: Params, i_L: jax.Array, j_LxE: jax.Array,
                       v_BxLxHkvxDh: jax.Array, gate_BxLxD: jax.Array | None = None, *,
                       rotated: bool = False) -> jax.Array:
  """`attend_cached` for queries each of which has positions (E,) of its own for the entries.

  Keys that are not rotated yet are rotated once for each query, so that L x E keys are held.
  """
  each = lambda q_BxHxDh, i, j_E, v_BxHkvxDh, gate_BxD: attend_cached(
      spec, q_BxHxDh[:, None], k_BxHkvxExDh, v_BxHkvxExDh, params, i[None], j_E,
      v_BxHkvxDh[:, None], None if gate_BxD is None else gate_BxD[:, None], rotated=rotated)[:, 0]
  return jax.vmap(each, (1, 0, 0, 1, 1), 1)(q_BxLxHxDh, i_L, j_LxE, v_BxLxHkvxDh, gate_BxLxD)
