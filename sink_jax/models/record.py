"""What a model shows of a forward pass when asked."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from sink_jax.kernels.importance import Importance


@dataclasses.dataclass(frozen=True)
class Want:
  """What to record besides importance and norms; both cost memory.

  maps: attention weights and proxy scores, (B, H, T, T) per layer.
  hidden: hidden states, (B, T, D) per layer.
  """

  maps: bool = False
  hidden: bool = False


class LayerRecord(NamedTuple):
  """One layer of a record; every leaf has a leading layer axis in a `Record`.

  T counts tokens without a learned sink token, which is `importance.bias_slot`.
  Norms are l2 norms in float32: of queries and keys after their QK norm, of the
  block's output H^l, and of what enters the last norm of a post-norm block
  (equal to the output in a pre-norm block). sink_token_norm: of the learned sink
  token's own H^l; None without one.
  """

  importance: Importance
  query_norm_BxHxT: jax.Array
  key_norm_BxHxT: jax.Array  # H = key/value heads
  value_norm_BxHxT: jax.Array
  hidden_norm_BxT: jax.Array
  hidden_before_norm_BxT: jax.Array
  sink_token_norm_B: jax.Array | None
  maps_BxHxTxT: jax.Array | None
  proxy_maps_BxHxTxT: jax.Array | None
  hidden_BxTxD: jax.Array | None
  hidden_before_norm_BxTxD: jax.Array | None


class Record(NamedTuple):
  """A forward pass: its layers, and the norms of H^0, the embeddings and the sink token."""

  layers: LayerRecord
  embedding_norm_BxT: jax.Array
  sink_embedding_norm_B: jax.Array | None
