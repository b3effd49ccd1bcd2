"""Attention with f(s) = s in time linear in T: running sums take the place of T x T.

With f the identity, sum_j (q_i.k_j) v_j is q_i times the running sum of k_j v_j^T. One
block of tokens at a time sees the keys of its own block through their scores and all
earlier keys through that sum, which is kept in float32. The gradients have the same form,
so the backward pass runs three such scans, two of them from the last block to the first.
It starts from q, k and v alone: no sum is stored between the passes, however many blocks
there are, where differentiating the scan would store a Dh x Dh matrix for each.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sink_jax.attention.mask import Causal
from sink_jax.attention.similarity import Linear
from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.epilogue import ATTENTION, PartialAttention

# Tokens at a time. A block costs O(block Dh) per token beside the O(Dh^2) of the running
# sum, so about Dh is best; the usual Dh are 64 to 128, and matrix units want 128.
_BLOCK = 128


def unsupported(spec: AttentionSpec) -> str | None:
  """Why a spec has no linear-time form, in one clause; None if it has one."""
  # Similarity and mask are compared by class: the sums below are written for these two alone.
  if type(spec.similarity) is not Linear:  # a subclass may be another function
    return f'only the similarity Linear() has running sums, {spec.similarity} has not'
  if type(spec.mask) is not Causal:
    return f'the running sums need the mask Causal(), not {spec.mask}'
  if spec.position.has_bias:
    return f'{spec.position} adds a bias to every score, which running sums cannot hold'
  if spec.normalizer.power not in (None, 0, 1):
    return (f'{spec.normalizer} needs a sum of powers of the scores, and running sums give '
            'the sum of the scores alone')
  return None


def rows(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
         v_BxTxHkvxDh: jax.Array) -> PartialAttention:
  """Rows and statistics of transformed queries and keys; differentiable in q, k and v.

  Hkv may divide H: query heads then share the running sums of their group.
  """
  out = _rows(q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh)
  if spec.normalizer.power == 1:
    stat = _row_sums(q_BxTxHxDh, k_BxTxHkvxDh)
  else:
    batch, length, heads = q_BxTxHxDh.shape[:3]
    # Row i sees i keys; without a normalisation nobody reads the statistic.
    count = jnp.arange(1, length + 1) if spec.normalizer.power == 0 else 0
    stat = jnp.broadcast_to(jnp.asarray(count, jnp.float32), (batch, heads, length))
  return checkpoint_name(PartialAttention(out, stat, stat), ATTENTION)


@jax.checkpoint  # else the running sum of the keys would be stored, twice the size of bf16 keys
def _row_sums(q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array) -> jax.Array:
  """sum_j s_ij (B, H, T): products with the running sum of the keys, all in float32.

  Elementwise instead of as a matmul, since a normalizer divides by this and some backends
  round the operands of float32 matmuls.
  """
  batch, length, heads, head_dim = q_BxTxHxDh.shape
  total = jnp.cumsum(k_BxTxHkvxDh.astype(jnp.float32), axis=1)
  q = q_BxTxHxDh.reshape(batch, length, total.shape[2], -1, head_dim).astype(jnp.float32)
  stat_BxTxHkvxG = jnp.sum(q * total[:, :, :, None], -1) / math.sqrt(head_dim)
  return jnp.swapaxes(stat_BxTxHkvxG.reshape(batch, length, heads), 1, 2)


@jax.custom_vjp
def _rows(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """sum_j s_ij v_j (B, T, H, Dh), float32."""
  group, block = q.shape[2] // k.shape[2], min(_BLOCK, q.shape[1])
  out = _scan(_blocks(q, block, group), _blocks(k, block), _blocks(v, block))
  return _joined(out, q.shape) / math.sqrt(q.shape[-1])


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[
    jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
  return _rows(q, k, v), (q, k, v)


def _backward(saved: tuple[jax.Array, jax.Array, jax.Array], do_BxTxHxDh: jax.Array,
              ) -> tuple[jax.Array, ...]:
  """The products of a row: dq_i is sum_j (do_i.v_j) k_j over the keys that i sees, dk_j is
  sum_i (v_j.do_i) q_i and dv_j is sum_i (k_j.q_i) do_i over the queries that see j."""
  q, k, v = saved
  group, block = q.shape[2] // k.shape[2], min(_BLOCK, q.shape[1])
  scale = 1 / math.sqrt(q.shape[-1])
  keys, values = _blocks(k, block), _blocks(v, block)
  queries = _blocks(q, block, group)
  # In the matmuls the gradient has the dtype of the values.
  do = _blocks(do_BxTxHxDh.astype(v.dtype), block, group)
  dq = _joined(_scan(do, values, keys), q.shape)
  dk = _joined(_scan(values, do, queries, reverse=True), k.shape)
  dv = _joined(_scan(keys, queries, do, reverse=True), v.shape)
  return tuple((scale * d).astype(x.dtype) for d, x in zip((dq, dk, dv), saved))


_rows.defvjp(_forward, _backward)


def _scan(a: jax.Array, b: jax.Array, c: jax.Array, reverse: bool = False) -> jax.Array:
  """sum_j (a_i.b_j) c_j over the tokens j <= i, or j >= i; all cut by `_blocks`.

  a may have another number of rows per token than b and c.
  """
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  # A group of query heads lies in the rows of one key head, several per token: row // rows per
  # token is the token.
  tokens = min(a.shape[3], b.shape[3])
  i = jnp.arange(a.shape[3])[:, None] // (a.shape[3] // tokens)
  j = jnp.arange(b.shape[3])[None, :] // (b.shape[3] // tokens)
  keep = i <= j if reverse else i >= j

  def step(total: jax.Array, blocks: tuple[jax.Array, jax.Array, jax.Array],
           ) -> tuple[jax.Array, jax.Array]:
    """Keys of the same block through their scores, all earlier ones through their sum."""
    a, b, c = blocks
    scores = jnp.where(keep, product('bhld,bhtd->bhlt', a, b), 0)
    out = product('bhlt,bhte->bhle', scores.astype(c.dtype), c)
    out += product('bhld,bhde->bhle', a, total.astype(a.dtype))
    return total + product('bhtd,bhte->bhde', b, c), out

  sums = jnp.zeros((*b.shape[1:3], b.shape[-1], c.shape[-1]), jnp.float32)
  return jax.lax.scan(step, sums, (a, b, c), reverse=reverse)[1]


def _blocks(x_BxTxHxDh: jax.Array, block: int, group: int = 1) -> jax.Array:
  """Cut into blocks (N, B, H/group, block * group, Dh): a group is more rows per token.

  The tokens that fill the last block are zeros, which add nothing to any sum.
  """
  batch, length, heads, head_dim = x_BxTxHxDh.shape
  count = -(-length // block)
  x = jnp.pad(x_BxTxHxDh, ((0, 0), (0, count * block - length), (0, 0), (0, 0)))
  x = x.reshape(batch, count, block, heads // group, group, head_dim)
  x = x.transpose(1, 0, 3, 2, 4, 5)
  return x.reshape(count, batch, heads // group, block * group, head_dim)


def _joined(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The inverse of `_blocks`, for an array of this shape."""
  batch, length, heads, head_dim = shape
  count, _, kv_heads, size, _ = x.shape
  group = heads // kv_heads
  x = x.reshape(count, batch, kv_heads, size // group, group, head_dim)
  x = x.transpose(1, 0, 3, 2, 4, 5)
  return x.reshape(batch, -1, heads, head_dim)[:, :length]
