"""`attend`: one entry to every implementation of attention."""

from __future__ import annotations

import jax

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, prepare, repeat_heads
from sink_jax.kernels import chunked
from sink_jax.kernels.finish import finish

IMPLEMENTATIONS = ('chunked', 'reference')


def attend(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
           v_BxTxHkvxDh: jax.Array, params=None, *, implementation: str | None = None):
  """Attention output (B, T, H, Dh) of a variant, in the dtype of the queries.

  Applies everything the spec says: QK norm, rotation, feature map, mask, similarity,
  biases, normalizer. H may be a multiple of Hkv (grouped-query attention).

  Args:
    params: {slot: {name: array}} for the slots that own parameters; their shapes are
      `spec.params(Dims(heads, kv_heads, head_dim))`.
    implementation: 'chunked' (memory linear in T; the default) or 'reference' (the
      T x T definition). They agree to rounding; nothing falls back to another one.

  Raises:
    ValueError: shapes that do not fit, missing parameters, unknown implementation.
  """
  params = params or {}
  check_implementation(implementation)
  if v_BxTxHkvxDh.shape != k_BxTxHkvxDh.shape:
    raise ValueError('keys and values must have the same shape: '
                     f'{k_BxTxHkvxDh.shape}, {v_BxTxHkvxDh.shape}.')
  if implementation == 'reference':
    return reference.attend(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params)
  q, k = prepare(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
  rows = chunked.rows(spec, q, k, repeat_heads(v_BxTxHkvxDh, q.shape[2]))
  return finish(spec, q, rows, params).astype(q_BxTxHxDh.dtype)


def check_implementation(implementation: str | None) -> None:
  """Raises a ValueError that lists the choices."""
  if implementation not in (None, *IMPLEMENTATIONS):
    raise ValueError(f'Unknown implementation {implementation!r}. Choices: '
                     f'{", ".join(IMPLEMENTATIONS)}.')
