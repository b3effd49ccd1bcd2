"""Attention of a few new tokens to the keys and values of a cache."""

from __future__ import annotations

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, apply_position_and_features


def attend_cached(spec: AttentionSpec, q_BxLxHxDh, k_BxCxHkvxDh, v_BxCxHkvxDh, params, i_L, j_C):
  """Output (B, L, H, Dh) of queries at positions i_L on C slots at positions j_C.

  Queries and keys come normalised, neither rotated. A slot whose position is
  later than every query's is not seen. L x C scores are held: L is one when decoding.
  """
  q = apply_position_and_features(spec, q_BxLxHxDh, i_L, params)
  k = apply_position_and_features(spec, k_BxCxHkvxDh, j_C, params)
  return reference.attend(spec, q, k, v_BxCxHkvxDh, params, i_L, j_C)
