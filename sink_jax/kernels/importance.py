"""Importance of every key without a T x T map (Section 3.2).

The definition gives the rows of attention for a block of queries at a time, and each column is
summed over the blocks: O(T) memory at any length.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Float

from sink_jax.attention import AnyArray, reference
from sink_jax.attention.spec import AttentionSpec, LayerParams, TransformedQK, transform_qk
from sink_jax.foreign import (
  Tensor,
  TokenMask,
  as_array,
  check_entries,
  library,
  standard_promotion,
  texts_in,
)
from sink_jax.kernels import chunked

_SCORES = 2**21  # of one head at a time: 8 MiB at any T, which stay in the cache


class Importance(NamedTuple):
  """alpha_k = sum_i A_ik / (T - k + 1) of every key, per head.

  The sum is over all rows i that see key k: under a causal mask those from k on.

  Attributes:
    raw: alpha where A are the attention weights that multiply the values; if rows sum to one, it
      equals `normalized`.
    normalized: alpha where A are the row-normalised (proxy) scores.
    extra_key: the mean over queries of the extra key's normalised weight w_i; None without one.
    extra_key_released: this mean as the official code (sail-sg/Attention-Sink) computes it, with
      the additional row of weight one that its kernel needs: (1 + sum_i w_i) / (T + 1).
    entropy: mean entropy of the rows, with the extra key, over that of uniform attention; 1 is
      uniform.
  """

  raw: Float[Array, '*B H T']
  normalized: Float[Array, '*B H T']
  extra_key: Float[Array, '*B H'] | None
  extra_key_released: Float[Array, '*B H'] | None
  entropy: Float[Array, '*B H'] | None = None


@standard_promotion()
def streaming_importance(
  spec: AttentionSpec,
  q_BxTxHxDh: Float[AnyArray, 'B T H Dh'] | Tensor,
  k_BxTxHkvxDh: Float[AnyArray, 'B T Hkv Dh'] | Tensor,
  params: LayerParams | None = None,
  *,
  keys: int | None = None,
  entropy: bool = False,
  mask: TokenMask | None = None,
) -> Importance:
  """Computes the importance of every key, a mean over a column of A, in memory linear in T.

  The divisor of key k is T - k + 1 under every mask, as in the official code
  (sail-sg/Attention-Sink). It is differentiable. Embeddings of positions are not applied, see
  `attend`.

  For a padded batch it is the importance of each text by itself: positions count from the first
  token of a text, T is its length, and keys beyond its end are NaN.

  Args:
    q_BxTxHxDh: queries; an array of NumPy or JAX, or a PyTorch tensor.
    k_BxTxHkvxDh: keys, likewise.
    params: {component: {name: array}}, as for `attend`.
    keys: how many keys are measured, from the first on, such as 4 for Sink_1 to Sink_4; by default
      all.
    entropy: whether to compute the entropy as well; it has no derivative where a weight is 0.
    mask: (B, T), 1 for tokens and 0 for padding on their left or right: the attention_mask. Without
      it padding counts as text.

  Raises:
    ValueError: shapes, dtypes, params or the mask do not fit, a query or key is not finite, or
      `keys` lies outside 1..T. The values of tracers are not checked.
  """
  params = params or {}
  q, k = as_array(q_BxTxHxDh, 'queries'), as_array(k_BxTxHkvxDh, 'keys')
  texts = texts_in(mask, *q.shape[:2])
  length_B = None
  if texts is not None:
    if spec.mask.prefix and spec.temperature.counts_keys:
      raise ValueError(
        f'{spec.temperature} counts the keys of a prefix, up to the end of a text: '
        f'with {spec.mask} give texts of one length, without mask=.'
      )
    q, k = (texts.filled(texts.aligned(x, 1), 1, 0) for x in (q, k))  # padding may hold anything
    length_B = texts.length_S
  for name, x in (('queries', q), ('keys', k)):
    check_entries(name, library(x).isfinite(x), x, 'it must be finite')
  return _importance(spec, q, k, params, keys=keys, entropy=entropy, length_B=length_B)


# One program also for a caller who does not compile: each operation would be a program of its own.
@functools.partial(jax.jit, static_argnames=('spec', 'keys', 'entropy'))
def _importance(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  params: LayerParams,
  *,
  keys: int | None,
  entropy: bool,
  length_B: jax.Array | None,
) -> Importance:
  qk = transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
  return transformed_importance(spec, qk, params, keys=keys, entropy=entropy, length_B=length_B)


def transformed_importance(
  spec: AttentionSpec,
  qk: TransformedQK,
  params: LayerParams,
  *,
  keys: int | None = None,
  entropy: bool = False,
  length_B: AnyArray | None = None,
) -> Importance:
  """`streaming_importance` of queries and keys that are transformed already.

  length_B: the lengths of texts that begin at the first position; by default all are T long.
  """
  q, k = qk
  batch, length, heads, _ = q.shape
  keys = length if keys is None else keys
  if not 1 <= keys <= length:
    raise ValueError(f'keys = {keys} is outside 1..{length}.')
  length_Bx1x1 = jnp.reshape(jnp.asarray(length if length_B is None else length_B), (-1, 1, 1))
  if length_B is not None:  # a prefix mask shows keys beyond the end of a text
    params = {**params, 'edit': {'keep': jnp.arange(length) < length_Bx1x1}}
  raw = normalized = jnp.zeros((batch, heads, keys))
  zeros = jnp.zeros((batch, heads))
  extra = zeros if spec.kv_bias.has_extra_key else None
  entropies = zeros if entropy else None
  for first, last, lo, hi in chunked.spans(spec, length):
    count = max(0, min(hi, keys) - lo)  # the requested keys of this span

    def add_block(sums, block):
      i_L, q_BxLxHxDh = block
      rows = reference.rows(spec, q_BxLxHxDh, k[:, lo:hi], params, i_L, jnp.arange(lo, hi))
      added = _block_sums(rows, i_L < length_Bx1x1, count, entropy)
      return jax.tree.map(jnp.add, sums, added), None

    size = chunked.BLOCK
    while size % 2 == 0 and size * (hi - lo) > _SCORES:
      size //= 2
    zeros = jnp.zeros((batch, heads, count))
    (*sums, extra, entropies), _ = jax.lax.scan(
      add_block,
      (zeros, zeros, extra, entropies),
      chunked.query_blocks(q[:, first:last], first, size),
    )
    raw, normalized = (
      total.at[..., lo : lo + count].add(x) for total, x in zip((raw, normalized), sums)
    )
  rows_seeing_k = length_Bx1x1 - jnp.arange(keys)  # T - k + 1
  mean = lambda sums: jnp.where(rows_seeing_k > 0, sums / jnp.maximum(rows_seeing_k, 1), jnp.nan)
  length_Bx1 = length_Bx1x1[..., 0]
  if entropies is not None:
    uniform_Bx1 = _uniform_entropy(spec, jnp.arange(length), length_Bx1)
    entropies = (entropies + 1e-9) / (uniform_Bx1 + 1e-9)  # 1 where every row sees one key
  return Importance(
    mean(raw),
    mean(normalized),
    None if extra is None else extra / length_Bx1,
    None if extra is None else (1 + extra) / (length_Bx1 + 1),
    entropies,
  )


def _block_sums(
  rows: reference.Rows, real_Bx1xL: jax.Array, count: int, entropy: bool
) -> tuple[jax.Array | None, ...]:
  """Sums over a block of rows: weights and proxies of the first `count` keys (B, H, count).

  After them the extra key's proxy and the entropy (B, H), or None. Rows of padding do not count.
  """
  proxy, extra_proxy = rows.proxy_BxHxLxT, rows.extra_proxy_BxHxL
  columns = lambda a: jnp.sum(jnp.where(real_Bx1xL[..., None], a[..., :count], 0), axis=-2)
  mass = lambda a_BxHxL: jnp.sum(jnp.where(real_Bx1xL, a_BxHxL, 0), axis=-1)
  of_extra = 0 if extra_proxy is None else entr(extra_proxy)
  return (
    columns(rows.weights_BxHxLxT),
    columns(proxy),
    None if extra_proxy is None else mass(extra_proxy),
    mass(entr(proxy).sum(-1) + of_extra) if entropy else None,
  )


def _uniform_entropy(spec: AttentionSpec, i_T: jax.Array, length_Bx1: jax.Array) -> jax.Array:
  """The entropy (B, 1) of uniform attention, summed over the rows of each text."""
  visible_BxT = spec.mask.visible(i_T, length_Bx1) + spec.kv_bias.has_extra_key
  log_BxT = jnp.log(jnp.maximum(visible_BxT, 1))
  return jnp.where(i_T < length_Bx1, log_BxT, 0).sum(-1, keepdims=True)
