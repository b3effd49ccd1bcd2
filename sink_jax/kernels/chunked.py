"""Attention in plain XLA with memory linear in T: the definition, one block of queries at a time.

The queries are cut into a few spans, each with the static range of keys that it can see, so that
masked work is skipped. Within a span a loop runs over blocks of rows, each by the definition in
`attention.reference`. The backward pass computes a block again from its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, LayerParams
from sink_jax.kernels.epilogue import ATTENTION

BLOCK = 64  # query rows at a time; twice as many take as long on a CPU, and more memory
_SPANS = 8  # at most; a causal mask then skips 7/16 of the scores


def attend(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  params: LayerParams,
) -> jax.Array:
  """Attention output (B, T, H, Dh) of transformed queries and keys, in the dtype of the queries."""

  @functools.partial(jax.checkpoint, prevent_cse=False)  # needless within a loop
  def block(
    i_L: jax.Array,
    q_BxLxHxDh: jax.Array,
    keys_BxHkvxDhxT: jax.Array,
    values_BxHkvxTxDh: jax.Array,
    j_T: jax.Array,
    params: LayerParams,
  ) -> jax.Array:
    keys, values = jnp.moveaxis(keys_BxHkvxDhxT, 3, 1), jnp.moveaxis(values_BxHkvxTxDh, 2, 1)
    rows = reference.rows(spec, q_BxLxHxDh, keys, params, i_L, j_T)
    # As in every kernel, the weights are rounded to the dtype of the values for the product with
    # them.
    rows = rows._replace(weights_BxHxLxT=rows.weights_BxHxLxT.astype(values.dtype))
    return reference.mixed(spec, rows, values, params).astype(q_BxLxHxDh.dtype)

  parts = []
  for first, last, lo, hi in spans(spec, q_BxTxHxDh.shape[1]):

    @jax.checkpoint  # otherwise a copy of the keys of every span would be kept
    def span(q: jax.Array, k: jax.Array, v: jax.Array, params: LayerParams) -> jax.Array:
      # In the layouts of the products: XLA would copy them again for every block.
      keys, values = jnp.moveaxis(k[:, lo:hi], 1, 3), jnp.moveaxis(v[:, lo:hi], 1, 2)
      out_NxBxLxHxDh = jax.lax.map(
        lambda rows: block(*rows, keys, values, jnp.arange(lo, hi), params),
        query_blocks(q[:, first:last], first),
      )
      return jnp.moveaxis(out_NxBxLxHxDh, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])

    parts.append(span(q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params)[:, : last - first])
  # The name lets a rematerialisation policy keep the output.
  return checkpoint_name(jnp.concatenate(parts, 1), ATTENTION)


def spans(spec: AttentionSpec, length: int) -> Iterator[tuple[int, int, int, int]]:
  """(first query, last query, first key, last key) of each span, half-open."""
  blocks = -(-length // BLOCK)
  size = -(-blocks // _SPANS) * BLOCK
  for first in range(0, length, size):
    last = min(first + size, length)
    yield first, last, *spec.mask.key_range(first, last - 1, length)


def query_blocks(
  q_BxTxHxDh: jax.Array,
  first: int,
  size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Positions (N, L) from `first` on and queries (N, B, L, H, Dh) of blocks of up to `size` rows.

  The last block is padded with queries of zeros, at positions past the last one.
  """
  batch, length, *rest = q_BxTxHxDh.shape
  size = min(size or BLOCK, length)
  count = -(-length // size)
  q = jnp.pad(q_BxTxHxDh, ((0, 0), (0, count * size - length), (0, 0), (0, 0)))
  positions = first + jnp.arange(count * size).reshape(count, size)
  return positions, jnp.moveaxis(q.reshape(batch, count, size, *rest), 1, 0)
