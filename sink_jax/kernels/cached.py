"""Attention of a few new tokens to the keys and values of a cache.

With one new query per text the scores are as many as the keys, so the definition serves: no
T x T array arises that a kernel would have to avoid.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention import reference
from sink_jax.attention.spec import (
  AttentionSpec,
  Params,
  apply_position_and_features,
  scaled_queries,
)


class Turns(NamedTuple):
  """How L queries turn to keys that are kept rotated by the numbers of their C entries.

  A product of a query and a key depends on the difference of their rotations alone. So keys whose
  positions change together, as tokens are dropped, stay as they are, and the query turns to them.

  sinks_S: entries of the first tokens, whose numbers are their positions. ring_Lx2: the two
  positions by which each query is rotated for the other entries. behind_LxC: whether it is the
  second of them that an entry takes.
  """

  sinks_S: jax.Array
  ring_Lx2: jax.Array
  behind_LxC: jax.Array


def attend_cached(spec: AttentionSpec, q_BxLxHxDh: jax.Array, k_BxHkvxCxDh: jax.Array,
                  v_BxHkvxCxDh: jax.Array, params: Params, i_L: jax.Array, j_C: jax.Array,
                  v_BxLxHkvxDh: jax.Array, gate_BxLxD: jax.Array | None = None, *,
                  rotated: bool = False, turns: Turns | None = None) -> jax.Array:
  """Output (B, L, H, Dh) of queries at positions i_L to C cache entries at positions j_C.

  Queries come normalised and not rotated, and values as attention mixes them. Keys come normalised
  and not rotated, or `rotated`: by their positions or, with `turns`, by the numbers of their
  entries. An entry whose position is later than every query's is not seen; that is how an empty one
  is marked. L x C scores are held: L is one when decoding. v_BxLxHkvxDh are the values of the
  queries' own tokens, and gate_BxLxD is what they are projected from, see `attend`.
  """
  scaled = scaled_queries(spec, q_BxLxHxDh, i_L, params)
  q = apply_position_and_features(spec, scaled, i_L, params)
  # The transposes are folded into the products, so nothing is copied.
  k_BxCxHkvxDh, v_BxCxHkvxDh = (jnp.swapaxes(x, 1, 2) for x in (k_BxHkvxCxDh, v_BxHkvxCxDh))
  if rotated:
    k = spec.feature_map.features(k_BxCxHkvxDh, params.get('feature_map', {}))
  else:
    k = apply_position_and_features(spec, k_BxCxHkvxDh, j_C, params)
  if rotated and turns is not None:
    s = _turned_scores(spec, q, scaled, k, i_L, j_C, turns)
    rows = reference.rows_of_scores(spec, s, q, params, i_L, j_C)
    o = reference.mixed(spec, rows, v_BxCxHkvxDh, params).astype(q.dtype)
  else:
    o = reference.attend(spec, q, k, v_BxCxHkvxDh, params, i_L, j_C)
  return spec.head.output(o, v_BxLxHkvxDh, gate_BxLxD, params.get('head', {})).astype(q.dtype)


def attend_cached_each(spec: AttentionSpec, q_BxLxHxDh: jax.Array, k_BxHkvxExDh: jax.Array,
                       v_BxHkvxExDh: jax.Array, params: Params, i_L: jax.Array, j_LxE: jax.Array,
                       v_BxLxHkvxDh: jax.Array, gate_BxLxD: jax.Array | None = None, *,
                       rotated: bool = False, turns: Turns | None = None) -> jax.Array:
  """`attend_cached` for queries each of which has positions (E,) of its own for the entries.

  Keys that are not rotated yet are rotated once for each query, so that L x E keys are held.
  """
  def each(q_BxHxDh, i, j_E, v_BxHkvxDh, gate_BxD, ring):
    return attend_cached(
        spec, q_BxHxDh[:, None], k_BxHkvxExDh, v_BxHkvxExDh, params, i[None], j_E,
        v_BxHkvxDh[:, None], None if gate_BxD is None else gate_BxD[:, None], rotated=rotated,
        turns=turns and Turns(turns.sinks_S, *(x[None] for x in ring)))[:, 0]
  ring = turns and (turns.ring_Lx2, turns.behind_LxC)
  return jax.vmap(each, (1, 0, 0, 1, 1, 0), 1)(q_BxLxHxDh, i_L, j_LxE, v_BxLxHkvxDh, gate_BxLxD,
                                               ring)


def _turned_scores(spec: AttentionSpec, own_BxLxHxDh: jax.Array, q_BxLxHxDh: jax.Array,
                   k_BxCxHkvxDh: jax.Array, i_L: jax.Array, j_C: jax.Array,
                   turns: Turns) -> jax.Array:
  """Scores (B, H, L, C) of queries to keys that are rotated by the numbers of their entries.

  own_BxLxHxDh are the queries rotated by their positions, q_BxLxHxDh those without rotation.
  """
  # One product for each rotation, although both read all keys: with two rows of queries at once
  # XLA's product for CPUs copies the keys of a batch first, and takes three times as long.
  here, behind = (reference.scores(spec, spec.position.rotate(q_BxLxHxDh, at_L), k_BxCxHkvxDh, i_L,
                                   j_C) for at_L in turns.ring_Lx2.T)
  sinks = reference.scores(spec, own_BxLxHxDh, k_BxCxHkvxDh[:, turns.sinks_S], i_L,
                           j_C[turns.sinks_S])
  return jnp.where(turns.behind_LxC, behind, here).at[..., turns.sinks_S].set(sinks)
