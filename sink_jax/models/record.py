"""The record of a forward pass: which parts it has, and the functions that one passes for others.

    run.record(tokens, sj.RecordOptions(attention=sj.maps)).layers.attention.weights_BxHxTxT

N counts layers, B or S sequences, T tokens without a learned sink token, H heads. Arrays are
float32; a `LayerRecord` inside of a `Record` has a leading layer axis on every leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, LayerParams, TransformedQK
from sink_jax.kernels import chunked
from sink_jax.kernels.importance import Importance
from sink_jax.models.arrays import ArrayTree

_LATER: Any = None  # a placeholder: attention fills its fields, then its block fills the others


class Seen(NamedTuple):
  """The inputs of the attention of one layer, of which a function for `RecordOptions` makes arrays.

  qk: queries and keys as the scores use them, after QK norm, temperature, rotation and feature map.
  params: of the layer's components. sink_tokens: how many positions, the first ones, are learned
  sink tokens.
  """

  spec: AttentionSpec
  qk: TransformedQK
  params: LayerParams
  sink_tokens: int = 0

  def of_tokens(self) -> TransformedQK:
    """Queries and keys of the tokens, without those of learned sink tokens."""
    return TransformedQK(*(x[:, self.sink_tokens :] for x in self.qk))


class Maps(NamedTuple):
  """Attention weights, and row-normalised proxy scores, which are the same for softmax."""

  weights_BxHxTxT: jax.Array
  proxy_BxHxTxT: jax.Array


def maps(seen: Seen) -> Maps:
  """The attention maps of all heads, in the memory of T x T."""
  rows = reference.maps(seen.spec, seen.qk, seen.params)
  tokens = slice(seen.sink_tokens, None)
  return Maps(rows.weights_BxHxLxT[..., tokens, tokens], rows.proxy_BxHxLxT[..., tokens, tokens])


def last_row(seen: Seen) -> jax.Array:
  """The normalised (proxy) scores (B, H, T) of the last query."""
  row_BxHxT = reference.last_row(seen.spec, seen.qk, seen.params)
  return row_BxHxT[..., seen.sink_tokens :]


def queries_keys(seen: Seen) -> TransformedQK:
  """Queries (B, T, H, Dh) and keys (B, T, Hkv, Dh) as the scores use them."""
  return TransformedQK(*(x.astype(jnp.float32) for x in seen.of_tokens()))


def largest_logit(seen: Seen) -> jax.Array:
  """The largest score (B, H) that a query sees, with its bias and cap, in memory linear in T."""
  spec, (q_BxTxHxDh, k_BxTxHkvxDh) = seen.spec, seen.qk
  batch, length, heads, _ = q_BxTxHxDh.shape
  largest_BxH = jnp.full((batch, heads), -jnp.inf)
  for first, last, lo, hi in chunked.spans(spec, length):

    def with_block(largest_BxH, block):
      i_L, q_BxLxHxDh = block
      j_T = jnp.arange(lo, hi)
      visible_LxT = spec.mask.keep(i_L[:, None], j_T) & (i_L < length)[:, None]
      scores = reference.scores(spec, q_BxLxHxDh, k_BxTxHkvxDh[:, lo:hi], i_L, j_T)
      largest_of_block = jnp.where(visible_LxT, scores, -jnp.inf).max((-2, -1))
      return jnp.maximum(largest_BxH, largest_of_block), None

    blocks = chunked.query_blocks(q_BxTxHxDh[:, first:last], first)
    largest_BxH, _ = jax.lax.scan(with_block, largest_BxH, blocks)
  return largest_BxH


def states(h_BxTxD: jax.Array) -> jax.Array:
  """The hidden states themselves."""
  return h_BxTxD.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class RecordOptions:
  """The parts of a record that are optional; importance and norms are always recorded.

  Functions return an array or a tree of arrays, whose shapes do not depend on values. Equal options
  share a compiled program, so give functions of a module, not a new lambda for every call.

  Attributes:
    entropy: the entropy of attention by head, see `Importance`.
    attention: a function of what the attention of a layer sees, such as `maps`, `last_row`,
      `queries_keys` and `largest_logit` of `sink_jax.models.record`, or
      `evaluate.activations.query_key_angles`.
    hidden: a function of the hidden states (B, T, D) of the embedding and of every block, such as
      `states`, or `evaluate.activations.describe`.
  """

  entropy: bool = False
  attention: Callable[[Seen], ArrayTree] | None = None
  hidden: Callable[[jax.Array], ArrayTree] | None = None


class LayerRecord(NamedTuple):
  """The record of one layer, or, in a `Record`, of all layers stacked along a leading axis.

  Blocks with a Mamba mixer record only hidden states and their norms: the leading axis of all
  other leaves counts only the blocks with attention (`ModelConfig.attention_layers`).

  The weight that learned sink tokens receive together is `importance.extra_key`. Norms are l2
  norms: of queries and keys after their QK norm and before the temperature, of values as attention
  mixes them, of the heads' outputs before W_O, of the block's output H^l (`hidden_norm`), of what
  enters the last norm of a post-norm block (`hidden_before_norm`; elsewhere it equals the output),
  and the largest of the learned sink tokens (`sink_token_norm`). `attention` and `hidden` are what
  the functions of the options return, and None without them.
  """

  importance: Importance = _LATER
  query_norm_BxHxT: jax.Array = _LATER
  key_norm_BxHxT: jax.Array = _LATER  # H = key/value heads
  value_norm_BxHxT: jax.Array = _LATER  # H = key/value heads
  head_norm_BxHxT: jax.Array = _LATER
  attention: ArrayTree = None
  hidden_norm_BxT: jax.Array = _LATER
  hidden_before_norm_BxT: jax.Array = _LATER
  sink_token_norm_B: jax.Array | None = None
  hidden: ArrayTree = None


class Record(NamedTuple):
  """The record of one forward pass: its layers, and the embeddings H^0 that enter the first."""

  layers: LayerRecord  # of all layers, stacked along a leading axis
  embedding_norm_BxT: jax.Array  # l2 norms
  sink_embedding_norm_B: jax.Array | None  # the largest norm of the learned sink tokens, if any
  embedding: ArrayTree  # what the function `hidden` of the options returns for H^0


@dataclasses.dataclass(frozen=True)
class GraftReport:
  """The changes that `sink_jax.graft` made to a model, and the loss before and after.

  Attributes:
    changed: the changes, one line each: 'attention.head: PlainOutput() -> HeadGate()'.
    new: the names of new parameters, such as 'blocks/attention/head_kernel'.
    removed: the names of removed parameters. A parameter with another shape is both removed and
      new.
    start: how new parameters were to start, 'identity' or 'random'.
    exact: whether the model computes the same function as the source by construction, up to
      rounding.
    loss_before, loss_after: the mean cross-entropy of the source, and of the grafted model before
      any training, on the batch, in nats per token.
    fresh: the names in `new` of parameters that start as in a fresh model.
  """

  changed: tuple[str, ...]
  new: tuple[str, ...]
  removed: tuple[str, ...]
  start: str
  exact: bool
  loss_before: float
  loss_after: float
  fresh: tuple[str, ...] = ()

  def __str__(self) -> str:
    start = self.start if self.exact or self.start == 'random' else 'no identity start exists'
    lists = {'new': self.new, 'removed': self.removed, 'as in a fresh model': self.fresh}
    changes = [f'{label}: {", ".join(paths)}' for label, paths in lists.items() if paths]
    difference = self.loss_after - self.loss_before
    return (
      f'graft: {"; ".join([*self.changed, *changes])}; start: {start}; '
      f'loss before any training: {self.loss_before:.4f} -> {self.loss_after:.4f} nats '
      f'({difference:+.2e})'
    )
