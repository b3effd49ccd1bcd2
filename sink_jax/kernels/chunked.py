"""Attention in plain XLA with memory linear in T: one block of query rows at a time.

The queries are cut into a few spans, each with the static range of keys that it can
see, so that masked work is skipped; within a span a loop runs over blocks of rows.
The backward pass recomputes the scores of a block.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from sink_jax.attention.reference import powered, scores
from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.finish import KernelRows

_BLOCK = 128  # query rows at a time
_SPANS = 8  # at most; a causal mask then skips 7/16 of the scores
_MASKED = -1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows(spec: AttentionSpec, q_BxTxHxDh, k_BxTxHxDh, v_BxTxHxDh) -> KernelRows:
  """Rows and statistics of prepared queries and keys; differentiable in q, k and v."""
  return _forward(spec, q_BxTxHxDh, k_BxTxHxDh, v_BxTxHxDh)[0]


def _forward(spec, q, k, v):
  def block(q_block, keys, values, i, j):
    s, keep = _scores(spec, q_block, keys, i, j, q.shape[1])
    f, stat, power_stat = _similarities(spec, s, keep)
    out = jnp.einsum('bhlt,bthd->blhd', f.astype(v.dtype), values,
                     preferred_element_type=jnp.float32)
    return (out, _rows_last(stat), _rows_last(power_stat)), ()

  parts = []
  for first, last, lo, hi in _spans(spec, q.shape[1]):
    see = functools.partial(block, keys=k[:, lo:hi], values=v[:, lo:hi], j=jnp.arange(lo, hi))
    parts.append(_map_blocks(see, first, (q[:, first:last],))[0])
  out, stat, power_stat = (jnp.concatenate(p, 1) for p in zip(*parts))
  result = KernelRows(out, jnp.swapaxes(stat, 1, 2), jnp.swapaxes(power_stat, 1, 2))
  return result, (q, k, v, result)


def _backward(spec, saved, cotangents):
  q, k, v, result = saved
  do = cotangents.out_BxTxHxDh
  # For exp the cotangent of a softmax row needs sum_j P_ij (do.v_j) = do.o; for the
  # additive similarities only the cotangent of the statistic remains.
  row_BxTxH = [jnp.swapaxes(x, 1, 2) for x in (
      result.stat_BxHxT, result.power_stat_BxHxT,
      cotangents.stat_BxHxT, cotangents.power_stat_BxHxT)]
  delta_BxTxH = jnp.sum(do * result.out_BxTxHxDh, -1)
  # In the matmuls the gradient has the dtype of the values, as the weights have.
  per_row = (q, do.astype(v.dtype), delta_BxTxH, *row_BxTxH)
  dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  scale = 1 / math.sqrt(q.shape[-1])

  for first, last, lo, hi in _spans(spec, q.shape[1]):
    keys, values, j = k[:, lo:hi], v[:, lo:hi], jnp.arange(lo, hi)

    def block(q_block, do, delta, stat, power_stat, dstat, dpower_stat, i, keys=keys,
              values=values, j=j):
      s, keep = _scores(spec, q_block, keys, i, j, q.shape[1])
      dp = jnp.einsum('blhd,bthd->bhlt', do, values, preferred_element_type=jnp.float32)
      f, ds = _score_cotangent(spec, s, keep, dp, *map(
          _rows_first, (delta, stat, power_stat, dstat, dpower_stat)))
      ds = ds.astype(keys.dtype)
      product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
      return (product('bhlt,bthd->blhd', ds, keys) * scale,), (
          product('bhlt,blhd->bthd', ds, q_block) * scale,
          product('bhlt,blhd->bthd', f.astype(do.dtype), do))

    zeros = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    (dq_span,), (dk_span, dv_span) = _map_blocks(
        block, first, tuple(x[:, first:last] for x in per_row), zeros)
    dq.append(dq_span)
    dk, dv = dk.at[:, lo:hi].add(dk_span), dv.at[:, lo:hi].add(dv_span)
  return jnp.concatenate(dq, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


rows.defvjp(_forward, _backward)


def _scores(spec, q_block, keys, i, j, length):
  """Scores of a block and which of them count; rows of padding (i >= length) see nothing."""
  keep = spec.mask.keep(i[:, None], j[None, :]) & (i < length)[:, None]
  return scores(spec, q_block, keys, i, j), keep


def _similarities(spec, s, keep):
  """f (B, H, L, T) and the statistics (B, H, L) of a block."""
  power = spec.normalizer.power
  if spec.similarity.exponential:
    s = jnp.where(keep, s, _MASKED)
    lse = jax.nn.logsumexp(s, -1)
    power_lse = lse if power == 1 else jax.nn.logsumexp(power * s, -1)
    return jnp.where(keep, jnp.exp(s - lse[..., None]), 0), lse, power_lse
  f = jnp.where(keep, spec.similarity(s), 0)
  if power is None:
    total = jnp.zeros(f.shape[:-1], f.dtype)
  elif power == 1:
    total = f.sum(-1)
  else:
    total = jnp.where(keep, powered(f, power), 0).sum(-1)
  return f, total, total


def _score_cotangent(spec, s, keep, dp, delta, stat, power_stat, dstat, dpower_stat):
  """f and the cotangent of the scores, given dp = do.v and the rows' cotangents."""
  power = spec.normalizer.power
  if spec.similarity.exponential:
    p = jnp.where(keep, jnp.exp(jnp.where(keep, s, _MASKED) - stat), 0)
    ds = p * (dp - delta + dstat)
    if power == 1:
      return p, ds + p * dpower_stat
    shares = jnp.where(keep, jnp.exp(jnp.where(keep, power * s, _MASKED) - power_stat), 0)
    return p, ds + power * shares * dpower_stat
  f, df = jax.jvp(spec.similarity, (s,), (jnp.ones_like(s),))
  if power is not None:
    density = 1 if power == 1 else power * powered(f, power - 1)
    dp = dp + (dstat + dpower_stat) * density
  return jnp.where(keep, f, 0), jnp.where(keep, df * dp, 0)


def _spans(spec, length):
  """(first query, last query, first key, last key) of each span, half open."""
  blocks = -(-length // _BLOCK)
  size = -(-blocks // _SPANS) * _BLOCK
  for first in range(0, length, size):
    last = min(first + size, length)
    yield first, last, *spec.mask.key_range(first, last - 1, length)


def _map_blocks(f, first, arrays, totals=()):
  """Runs `joined, summed = f(*blocks, i=positions)` over blocks of rows (axis 1).

  Returns the joined results, and `totals` plus the sums of the summed ones. The last
  span is padded to whole blocks with rows of zeros, at positions past the last token;
  f lets them see nothing, and their results are cut off.
  """
  length = arrays[0].shape[1]
  count = -(-length // _BLOCK)
  if count == 1:
    joined, summed = f(*arrays, i=first + jnp.arange(length))
    return joined, tuple(map(jnp.add, totals, summed))
  pad = count * _BLOCK - length

  def split(x):
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, _BLOCK, *x.shape[2:]), 1, 0)

  def join(x):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], count * _BLOCK, *x.shape[3:])[:, :length]

  def step(totals, inputs):
    offset, blocks = inputs
    joined, summed = f(*blocks, i=offset + jnp.arange(_BLOCK))
    return tuple(map(jnp.add, totals, summed)), joined

  offsets = first + _BLOCK * jnp.arange(count)
  totals, joined = jax.lax.scan(step, totals, (offsets, tuple(map(split, arrays))))
  return tuple(map(join, joined)), totals


def _rows_last(x_BxHxL):
  return jnp.swapaxes(x_BxHxL, 1, 2)


def _rows_first(x_BxLxH):
  return jnp.swapaxes(x_BxLxH, 1, 2)[..., None]
