"""What a model shows of a forward pass when asked."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from sink_jax.kernels.angles import Angles
from sink_jax.kernels.importance import Importance


@dataclasses.dataclass(frozen=True)
class RecordOptions:
  """What to record besides importance and norms.

  maps: attention weights and proxy scores, (B, H, T, T) per layer.
  hidden: hidden states, (B, T, D) per layer.
  queries_keys: queries and keys as the scores see them, (B, T, H, Dh) per layer.
  last_query: normalised (proxy) scores of the last query, (B, H, T) per layer.
  angles: cosines and norm products of queries and keys, averaged; a few numbers per head.
  """

  maps: bool = False
  hidden: bool = False
  queries_keys: bool = False
  last_query: bool = False
  angles: bool = False


class LayerRecord(NamedTuple):
  """One layer of a record; every leaf has a leading layer axis in a `Record`.

  Blocks with a Mamba mixer have hidden states and their norms alone: the other leaves
  then count the blocks with attention.

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
  maps_BxHxTxT: jax.Array | None
  proxy_maps_BxHxTxT: jax.Array | None
  last_query_BxHxT: jax.Array | None
  angles: Angles | None
  queries_BxTxHxDh: jax.Array | None
  keys_BxTxHkvxDh: jax.Array | None
  hidden_norm_BxT: jax.Array
  hidden_before_norm_BxT: jax.Array
  sink_token_norm_B: jax.Array | None
  hidden_BxTxD: jax.Array | None
  hidden_before_norm_BxTxD: jax.Array | None


class Record(NamedTuple):
  """A forward pass: its layers, and the norms of H^0, the embeddings and the sink token.

  embedding_BxTxD: H^0 itself where hidden states are wanted.
  """

  layers: LayerRecord
  embedding_norm_BxT: jax.Array
  embedding_BxTxD: jax.Array | None
  sink_embedding_norm_B: jax.Array | None
