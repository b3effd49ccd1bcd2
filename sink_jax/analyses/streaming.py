"""Long texts (StreamingLLM): perplexity with caches of one size, and attention of the last query.

A window of W tokens forgets the first ones, and with them the sink; a cache that keeps the first s
tokens and W - s recent ones does not. The paper writes them 0 + W and s + (W - s).
"""

from __future__ import annotations

import functools
import math
from typing import Annotated

import jax
import numpy as np
import tyro
from jax.sharding import Mesh
from matplotlib.figure import Figure

from sink_jax.analyses.cache import cached_losses
from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import analysis
from sink_jax.evaluate.activations import not_finite
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.decode import CachePolicy, check_policy, state_bytes
from sink_jax.models.record import RecordOptions, last_row
from sink_jax.models.run import record
from sink_jax.pictures.charts import lines
from sink_jax.pictures.style import Row

CacheSize = Annotated[int, tyro.conf.arg(help='tokens that a cache keeps.')]
Sinks = Annotated[int, tyro.conf.arg(help='how many of them are the first tokens of the text.')]
_PARTS = 32  # points of a curve


def _draw(rows: list[Row]) -> Figure:
  """Perplexity by tokens read, from the size of the caches on: before it they all hold the same."""
  size, curve = min(row['size'] for row in rows), [row for row in rows if row['part'] == 'curve']
  return lines(
    [row for row in curve if row['start'] >= size] or curve,
    'tokens',
    'perplexity',
    ('cache',),
    log='y',
    style='-',
  )


def _with_and_without(rows: list[Row]) -> str:
  return 'perplexity ' + ', '.join(
    f'{row["perplexity"]:.3g} with {row["cache"]}'
    for row in rows
    if row['part'] == 'all'
    and row['perplexity']
    and (row['positions'] == 'cache' or row['cache'] == 'all tokens')
  )


@analysis('StreamingLLM, Figure 3', _draw, finding=_with_and_without, sequences=1, length=2048)
def streaming(model: Model, *, cache_size: CacheSize = 64, sinks: Sinks = 4) -> list[Row]:
  """Perplexity of a long text: a window, the first tokens and a window, all tokens.

  Rows of a cache and a part: 'all' of the text, its 'last quarter', and the 'curve', up to 32 parts
  of equal length that end at `tokens`. A cache that the model cannot use is a row with the reason.
  """
  if not 0 <= sinks < cache_size:
    raise ValueError(f'--sinks={sinks} must be at least 0 and less than --cache_size={cache_size}.')
  run, tokens_SxT = model.run, model.inputs('long text').tokens
  length, first = tokens_SxT.shape[1], f'first {sinks} and last {cache_size - sinks}'
  # StreamingLLM counts positions in the cache. The same cache with the positions of the text shows
  # what that changes. The cache of all tokens has entries for learned sink tokens too.
  caches = {
    f'last {cache_size}': CachePolicy(cache_size),
    first: CachePolicy(cache_size, sinks),
    f'{first}, text positions': CachePolicy(cache_size, sinks, 'text'),
    'all tokens': CachePolicy(length + run.config.sink_tokens, positions='text'),
  }
  summaries, curves, reasons = [], [], []
  for name, policy in caches.items():
    row = {'cache': name, 'size': policy.size, 'sinks': policy.sinks, 'positions': policy.positions}
    try:
      check_policy(run.config, policy, length)
    except ValueError as error:
      reasons.append(row | {'part': 'not possible', 'reason': str(error)})
      continue
    losses = cached_losses(model, tokens_SxT, policy).mean(0)
    if not np.isfinite(losses).all():
      raise not_finite(run, f'the loss of a text with the cache {name}', run.config.dtype)
    memory = {'bytes': state_bytes(run.config, policy, len(tokens_SxT))}
    late = losses[-max(1, len(losses) // 4) :]
    summaries += [
      row | {'part': 'all', 'perplexity': _exp(losses.mean())} | memory,
      row | {'part': 'last quarter', 'perplexity': _exp(late.mean())},
    ]
    # Points at equal distances; rounding may give one of them twice. Token n + 1 has the n-th loss.
    ends = np.unique(np.linspace(0, len(losses), min(_PARTS, len(losses)) + 1)[1:].astype(int))
    starts = [0, *ends[:-1]]
    curves += [
      row
      | {
        'part': 'curve',
        'start': int(start) + 1,
        'tokens': int(end) + 1,
        'perplexity': _exp(losses[start:end].mean()),
      }
      for start, end in zip(starts, ends)
    ]
  if not summaries:
    raise ValueError(f'--cache_size={cache_size}: {reasons[0]["reason"]}')
  return [*summaries, *reasons, *curves]


def _exp(loss: float) -> float | None:
  """A perplexity; None if it is beyond float64."""
  return math.exp(loss) if loss < 700 else None


def _strongest_layer(rows: list[Row]) -> str:
  row = max(rows, key=lambda row: row['attention'])
  share, layer = row['attention'], row['layer']
  return f'the last token gives the first {share:.0%} of its attention in layer {layer}'


@analysis(
  'StreamingLLM, Figure 12',
  functools.partial(
    lines, x='layer', y='attention', by=('model',), panel=(), error='deviation', style='o'
  ),
  finding=_strongest_layer,
  sequences=16,
  length=4096,
)
def last_query(model: Model) -> list[Row]:
  """Attention of the last query to the first token, by layer, which counts from 0 as in its paper.

  Means over sequences and heads, and the standard deviation over heads of the means over sequences.
  Scores other than softmax are divided by the sum of their row. StreamingLLM takes 256 sequences.
  """
  tokens_SxT = model.inputs('long text').tokens
  weights_NxSxH = np.concatenate(
    [
      np.asarray(
        _weights(model.config, mesh_of(model.run.params), model.run.params, batch_BxT), np.float64
      )
      for batch_BxT in model.batches(tokens_SxT)
    ],
    1,
  )
  mean_NxH = weights_NxSxH.mean(1)
  return [
    {'layer': block - 1, 'attention': float(heads.mean()), 'deviation': float(heads.std())}
    for block, heads in zip(model.blocks, mean_NxH)
  ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(
  config: ModelConfig, mesh: Mesh | None, params: ParamTree, tokens_BxT: jax.Array
) -> jax.Array:
  """The weights (N, B, H) of the first token in the last row.

  It is a separate program, so that the compiler leaves out all other results, such as the
  importance of all keys, which takes as long as attention itself.
  """
  options = RecordOptions(attention=last_row)
  rows_NxBxHxT = record(config, options, mesh, params, tokens_BxT).layers.attention
  return rows_NxBxHxT[..., 0]
