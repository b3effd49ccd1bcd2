"""Attention of a few new tokens to the keys and values of a cache.

With one new query per text the scores are as many as the keys, so the definition serves: no
T x T array arises that a kernel would have to avoid.
"""

from __future__ import annotations

import jax

from sink_jax.attention import reference
from sink_jax.attention.spec import (
  AttentionSpec,
  Params,
  apply_position_and_features,
  position_queries,
)


def attend_cached(spec: AttentionSpec, q_BxLxHxDh: jax.Array, k_BxCxHkvxDh: jax.Array,
                  v_BxCxHkvxDh: jax.Array, params: Params, i_L: jax.Array, j_C: jax.Array,
                  v_BxLxHkvxDh: jax.Array, gate_BxLxD: jax.Array | None = None) -> jax.Array:
  """Output (B, L, H, Dh) of queries at positions i_L to C cache entries at positions j_C.

  Queries and keys come normalised, neither rotated, and values as attention mixes them. Positions
  may be those within the cache, which change as entries are dropped, so keys are rotated at every
  step. An entry whose position is later than every query's is not seen; that is how an empty one
  is marked. L x C scores are held: L is one when decoding. v_BxLxHkvxDh are the values of the
  queries' own tokens, and gate_BxLxD is the block's normed input of them, see `attend`.
  """
  q = position_queries(spec, q_BxLxHxDh, i_L, params)
  k = apply_position_and_features(spec, k_BxCxHkvxDh, j_C, params)
  o = reference.attend(spec, q, k, v_BxCxHkvxDh, params, i_L, j_C)
  return spec.head.output(o, v_BxLxHkvxDh, gate_BxLxD, params.get('head', {})).astype(q.dtype)


def attend_cached_each(spec: AttentionSpec, q_BxLxHxDh: jax.Array, k_BxExHkvxDh: jax.Array,
                       v_BxExHkvxDh: jax.Array, params: Params, i_L: jax.Array, j_LxE: jax.Array,
                       v_BxLxHkvxDh: jax.Array, gate_BxLxD: jax.Array | None = None) -> jax.Array:
  """`attend_cached` for queries each of which has positions (E,) of its own for the entries.

  Keys are rotated once for each query, so that L x E keys are held.
  """
  each = lambda q_BxHxDh, i, j_E, v_BxHkvxDh, gate_BxD: attend_cached(
      spec, q_BxHxDh[:, None], k_BxExHkvxDh, v_BxExHkvxDh, params, i[None], j_E,
      v_BxHkvxDh[:, None], None if gate_BxD is None else gate_BxD[:, None])[:, 0]
  return jax.vmap(each, (1, 0, 0, 1, 1), 1)(q_BxLxHxDh, i_L, j_LxE, v_BxLxHkvxDh, gate_BxLxD)
