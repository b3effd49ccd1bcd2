"""Attention of the last of many queries to the first token (StreamingLLM, Appendix F)."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from sink_jax.analyses.models import Model, check_length
from sink_jax.analyses.pictures import Row, lines
from sink_jax.analyses.runner import analysis
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import record


@analysis('StreamingLLM, Figure 12', partial(lines, x='layer', y='attention', by=('model',), panel=(),
                                             error='deviation', style='o'), sequences=16, length=4096)
def last_query(model: Model) -> list[Row]:
  """Attention of the last query to the first token, by layer, which counts from 0 as in its paper.

  Rows of the mean over sequences and heads, and the standard deviation over heads of the means over
  sequences. Scores other than softmax are divided by the sum of their row; an extra key has its share.
  StreamingLLM takes 256 sequences; texts are documents one after the other.
  """
  check_length(model.run, model.options.length)
  tokens_SxT = model.inputs('long text').tokens
  config = dataclasses.replace(model.run.config, dtype=model.options.dtype)
  size = model.options.at_a_time(tokens_SxT.shape[1])
  weights_NxSxH = np.concatenate([np.asarray(
      _weights(config, mesh_of(model.run.params), model.run.params, tokens_SxT[i:i + size]), np.float64)
      for i in range(0, len(tokens_SxT), size)], 1)
  mean_NxH = weights_NxSxH.mean(1)
  return [{'layer': block - 1, 'attention': float(heads.mean()), 'deviation': float(heads.std())}
          for block, heads in zip(model.blocks, mean_NxH)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(config: ModelConfig, mesh: Mesh | None, params: ParamTree, tokens_BxT: jax.Array) -> jax.Array:
  """The weights (N, B, H) of the first token in the last row.

  A program of its own, from which the compiler leaves out what is not returned, such as the importance of
  all keys, which takes as long as attention itself.
  """
  rows_NxBxHxT = record(config, RecordOptions(last_query=True), mesh, params, tokens_BxT).layers.last_query_BxHxT
  assert rows_NxBxHxT is not None
  return rows_NxBxHxT[..., 0]
