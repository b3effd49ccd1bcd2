"""The record of a forward pass, and the report of a graft.

N counts layers, B or S sequences, T tokens without a learned sink token, H heads. Arrays are
float32; a `LayerRecord` inside of a `Record` has a leading layer axis on every leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from sink_jax.kernels.importance import Importance
from sink_jax.models.arrays import ArrayTree

_LATER: Any = None  # a placeholder: attention fills its fields of a record, then its block fills the others


@dataclasses.dataclass(frozen=True)
class RecordOptions:
  """The parts of a record that are optional; importance and norms are always recorded.

  Attributes:
    entropy: the entropy of attention by head, see `Importance`.
    maps: attention weights and proxy scores, (B, H, T, T) per layer.
    hidden: hidden states, (B, T, D) per layer.
    queries_keys: queries and keys as the scores use them, after QK norm, temperature, rotation and
      feature map, (B, T, H, Dh) and (B, T, Hkv, Dh) per layer.
    last_query: the normalised (proxy) scores of the last query, (B, H, T) per layer.
    angles: the results of a function of queries and keys as `queries_keys` would record them, such
      as `evaluate.activations.query_key_angles`.
    describe_hidden: the results of a function of the hidden states (B, T, D) of the embedding and of
      every block: arrays, or a tree of them, whose shapes do not depend on values.
  """

  entropy: bool = False
  maps: bool = False
  hidden: bool = False
  queries_keys: bool = False
  last_query: bool = False
  angles: Callable[[jax.Array, jax.Array], ArrayTree] | None = None
  describe_hidden: Callable[[jax.Array], ArrayTree] | None = None


class LayerRecord(NamedTuple):
  """The record of one layer, or, in a `Record`, of all layers stacked along a leading axis.

  Blocks with a Mamba mixer record only hidden states and their norms: the leading axis of all
  other leaves counts only the blocks with attention (`ModelConfig.attention_layers`).

  The weight that learned sink tokens receive together is `importance.bias_slot`. Norms are l2 norms:
  of queries and keys after their QK norm and before the temperature, of values as attention mixes
  them, of the heads' outputs before W_O, of the block's output H^l (`hidden_norm`), of what enters
  the last norm of a post-norm block (`hidden_before_norm`; elsewhere it equals the output), and the
  largest of the learned sink tokens (`sink_token_norm`). `hidden_description` is what
  `describe_hidden` returns for the output. Fields that the options leave out are None.
  """

  importance: Importance = _LATER
  query_norm_BxHxT: jax.Array = _LATER
  key_norm_BxHxT: jax.Array = _LATER  # H = key/value heads
  value_norm_BxHxT: jax.Array = _LATER  # H = key/value heads
  head_norm_BxHxT: jax.Array = _LATER
  maps_BxHxTxT: jax.Array | None = None
  proxy_maps_BxHxTxT: jax.Array | None = None
  last_query_BxHxT: jax.Array | None = None
  angles: ArrayTree | None = None
  queries_BxTxHxDh: jax.Array | None = None
  keys_BxTxHkvxDh: jax.Array | None = None
  hidden_norm_BxT: jax.Array = _LATER
  hidden_before_norm_BxT: jax.Array = _LATER
  sink_token_norm_B: jax.Array | None = None
  hidden_BxTxD: jax.Array | None = None
  hidden_description: ArrayTree | None = None


class Record(NamedTuple):
  """The record of one forward pass: its layers, and the embeddings H^0 that enter the first of them."""

  layers: LayerRecord  # of all layers, stacked along a leading axis
  embedding_norm_BxT: jax.Array  # l2 norms
  embedding_BxTxD: jax.Array | None  # None unless hidden states are recorded
  sink_embedding_norm_B: jax.Array | None  # the largest norm of the learned sink tokens, if any
  embedding_description: ArrayTree | None  # what `describe_hidden` returns for H^0


@dataclasses.dataclass(frozen=True)
class GraftReport:
  """The changes that `sink_jax.graft` made to a model, and the loss before and after.

  Attributes:
    changed: the changes, one line each: 'attention.head: PlainOutput() -> HeadGate()'.
    new: the names of new parameters, such as 'blocks/attention/head_kernel'.
    removed: the names of removed parameters. A parameter with another shape is both removed and new.
    start: how new parameters were to start, 'identity' or 'random'.
    exact: whether the model computes the same function as the source by construction, up to rounding.
    loss_before, loss_after: the mean cross-entropy of the source, and of the grafted model before any
      training, on the batch, in nats per token.
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
    parts = [*self.changed, *(f'{label}: {", ".join(paths)}' for label, paths in (
        ('new', self.new), ('removed', self.removed), ('as in a fresh model', self.fresh)) if paths)]
    return (f'graft: {"; ".join(parts)}; start: {start}; loss before any training: '
            f'{self.loss_before:.4f} -> {self.loss_after:.4f} nats '
            f'({self.loss_after - self.loss_before:+.2e})')
