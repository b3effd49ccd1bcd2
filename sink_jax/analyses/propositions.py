"""Propositions 1 to 4 (Appendix B.1): attention on one token repeated, and its closed forms.

Hidden states of all positions are then equal. Attention is 1/t without positions, a softmax of only
the bias with a relative bias or ALiBi, and at most e^(2 xi) / (e^(2 xi) + t - 1) with rotary
positions; under a window, t is the number of keys that a query attends to. The importance of the
first token in these forms decides if a sink follows: the premise of Proposition 2 does not hold for
the relative bias of Eq. 6.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from scipy.special import softmax

from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import Epsilon, analysis
from sink_jax.attention.mask import Mask
from sink_jax.attention.per_token import Fixed, Identity
from sink_jax.attention.position import Alibi, Nope, Relative, Rope
from sink_jax.attention.similarity import Exp
from sink_jax.attention.spec import AttentionSpec, TransformedQK
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.sinks import importance
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import (
  LayerRecord,
  Maps,
  RecordOptions,
  Seen,
  maps,
  queries_keys,
  states,
)
from sink_jax.models.run import Run
from sink_jax.models.transformer import init_params
from sink_jax.pictures.charts import lines
from sink_jax.pictures.style import Row

# Relative for hidden states, absolute for weights: above rounding, far below the effect of other
# tokens.
TOLERANCE = 1e-3
_NUMBERS = {Nope: 1, Relative: 2, Alibi: 3, Rope: 4}  # scaled rotations count as rotary


def _maps_and_queries_keys(seen: Seen) -> tuple[Maps, TransformedQK]:
  return maps(seen), queries_keys(seen)


RECORDED = RecordOptions(attention=_maps_and_queries_keys, hidden=states)


def _models() -> list[Run]:
  """Small random models, one for each proposition, and Proposition 2 with the negative of Eq. 6."""
  runs = []
  for position in (Nope(), Relative(), Relative(decreasing=True), Alibi(), Rope()):
    config = ModelConfig(
      layers=2,
      d_model=32,
      heads=4,
      kv_heads=2,
      ffn_hidden=32,
      vocab_size=32,
      attention=AttentionSpec(position=position),
      dtype='float32',
    )
    options = 'decreasing=True' if position == Relative(decreasing=True) else ''
    runs.append(Run(config, init_params(config, 0), f'{type(position).__name__}({options})'))
  return runs


def _draw(rows: list[Row]) -> Figure:
  """Weights of the last query by key, of the first and the last head of each model."""
  points = []
  for model in dict.fromkeys(row['model'] for row in rows):
    heads = [row for row in rows if row['model'] == model]
    holds = sum(row['holds'] for row in heads)
    title = (
      f'Proposition {heads[0]["proposition"]}, {model}:\nholds in {holds} of {len(heads)} heads'
    )
    points += [
      row | {'title': title, 'key': k, 'measured': weight, 'by the form': closed}
      for row in (heads[0], heads[-1])
      for k, (weight, closed) in enumerate(zip(row['weights'], row['closed_weights']), 1)
      if min(weight, closed) > 1e-4
    ]
  return lines(
    points,
    'key',
    ('measured', 'by the form'),
    ('block', 'head'),
    ('title',),
    log='y',
    style=('o', '-'),
    name='weight of the last query',
  )


@analysis('Propositions 1 to 4', _draw, models=_models, inputs='repeat', sequences=2)
def propositions(model: Model, *, epsilon: Epsilon = EPSILON) -> list[Row]:
  """Attention on one repeated token and its derived form; without a model, small random ones.

  A row for each head: `hidden_difference`, the largest |h_t - h_1| / |h_1|; `difference`, the
  largest |A - closed form|, or A - bound; `importance` of the first token and `closed_importance`
  by the form or bound; whether the proposition `holds`, and the `premise` that the bias does not
  increase with the distance; `sink`: whether a sink of the first token follows. float32, one
  sequence at a time.
  """
  run, number, tokens_SxT = model.run, proposition_number(model.run.config), model.inputs().tokens
  if (tokens_SxT != tokens_SxT[:, :1]).any():
    raise ValueError(
      '--inputs: the propositions are about one token repeated: use repeat, and --bos=none.'
    )
  length, position = tokens_SxT.shape[1], run.config.attention.position
  # bfloat16, the kernels and the matrix units of accelerators round more than equality allows.
  run = dataclasses.replace(
    run, config=dataclasses.replace(run.config, dtype='float32', implementation='chunked')
  )
  with jax.default_matmul_precision('highest'):
    found = [compared(run.config, run.record(row, RECORDED).layers) for row in tokens_SxT[:, None]]
  hidden = max(float(one['hidden_difference']) for one in found)
  difference_NxH = np.max([one['difference'] for one in found], 0)
  alpha_NxH, closed_NxH = (
    np.mean([one[name] for one in found], 0) for name in ('importance', 'closed')
  )
  bias = position.distance_bias(np.arange(length)) if position.has_bias else np.zeros(length)
  return [
    {
      'proposition': number,
      'form': 'bound' if isinstance(position, Rope) else 'exact',
      'block': n + 1,
      'head': h + 1,
      'hidden_difference': hidden,
      'difference': float(difference_NxH[n, h]),
      'holds': bool(max(hidden, difference_NxH[n, h]) < TOLERANCE),
      'premise': bool((np.diff(np.asarray(bias)) <= 0).all()),
      'importance': float(alpha_NxH[n, h]),
      'closed_importance': float(closed_NxH[n, h]),
      'sink': 'no'
      if closed_NxH[n, h] <= epsilon
      else 'open'
      if isinstance(position, Rope)
      else 'yes',
      **{name: found[0][name][n, h].tolist() for name in ('weights', 'closed_weights')},
    }
    for n, h in np.ndindex(*alpha_NxH.shape)
  ]


def proposition_number(config: ModelConfig) -> int:
  """The proposition, 1 to 4, that applies to a model; a ValueError gives reasons if none does."""
  spec = config.attention
  number = next((n for kind, n in _NUMBERS.items() if isinstance(spec.position, kind)), None)
  # Appendix B.1 goes from block to block: equal hidden states give equal values, and a mean of
  # equal values is the same at every position. Each of these breaks that step, or the form of the
  # scores.
  reasons = {
    f'{spec.position} gives every position another embedding': number is None,
    f'{spec.similarity} with {spec.normalizer} is not softmax': not (
      isinstance(spec.similarity, Exp) and spec.rows_sum_to_one
    ),
    f'{spec.feature_map} changes queries and keys': not isinstance(spec.feature_map, Identity),
    'an extra key or a learned sink token has a part of every row': bool(config.sink_tokens)
    or spec.kv_bias.has_extra_key,
    f'{spec.temperature} multiplies the queries': isinstance(spec.position, Rope)
    and not isinstance(spec.temperature, Fixed),
    'blocks have position encodings of their own': any(layer.position for layer in config.pattern),
    'Mamba blocks remember how many tokens came before': len(config.attention_layers)
    < config.layers,
  }
  reason = '; '.join(text for text, applies in reasons.items() if applies)
  if number is None or reason:
    raise ValueError(f'Propositions 1 to 4 do not apply to this model: {reason}.')
  return number


def compared(config: ModelConfig, layers: LayerRecord) -> dict[str, Any]:
  """Of a recorded sequence: differences, importances (N, H), the last query's weights (N, H, T)."""
  attention, qk = layers.attention
  maps_NxHxTxT = np.asarray(attention.weights_BxHxTxT, np.float64)[:, 0]
  hidden_NxTxD = np.asarray(layers.hidden, np.float64)[:, 0]
  gap = np.linalg.norm(hidden_NxTxD - hidden_NxTxD[:, :1], axis=-1)
  length, closed = maps_NxHxTxT.shape[-1], []
  bounded = isinstance(config.attention.position, Rope)
  for n, spec in enumerate(config.attention_specs):  # masks may differ by block
    closed.append(
      rotary_bound(_largest_score(qk, n), spec.mask, length)
      if bounded
      else closed_form(spec, config.heads, length)
    )
  closed_NxHxTxT = np.stack(closed)
  difference = maps_NxHxTxT - closed_NxHxTxT
  return {
    'hidden_difference': (gap / np.linalg.norm(hidden_NxTxD[:, :1], axis=-1)).max(),
    # A weight may lie below a bound by any amount.
    'difference': (difference if bounded else np.abs(difference)).max((-1, -2)),
    'importance': importance(maps_NxHxTxT)[..., 0],
    'closed': importance(closed_NxHxTxT, raw=True)[..., 0],  # rows of a bound may exceed one
    'weights': maps_NxHxTxT[..., -1, :],
    'closed_weights': closed_NxHxTxT[..., -1, :],
  }


def closed_form(spec: AttentionSpec, heads: int, length: int) -> np.ndarray:
  """Weights (H, T, T) of equal scores, the softmax of the bias: 1/t (Eq. 18), Eq. 20 and Eq. 22."""
  i, j = np.arange(length)[:, None], np.arange(length)[None, :]
  keep, scores_HxTxT = np.asarray(spec.mask.keep(i, j)), np.zeros((heads, length, length))
  if spec.position.has_bias:
    slopes_H = np.asarray(spec.position.slopes(heads), np.float64)
    scores_HxTxT = slopes_H[:, None, None] * np.asarray(
      spec.position.distance_bias(i - j), np.float64
    )
  return softmax(np.where(keep, scores_HxTxT, -np.inf), -1)


def rotary_bound(xi: ArrayLike, mask: Mask, length: int) -> np.ndarray:
  """The bound of Eq. 28 on weights (H, T, T), zero where the mask is.

  xi: |q||k| / sqrt(Dh) of the heads (H,); the paper leaves the scale out. All scores lie in
  [-xi, xi].
  """
  keep = np.asarray(mask.keep(np.arange(length)[:, None], np.arange(length)[None, :]))
  others = keep.sum(-1, keepdims=True) - 1  # the t - 1 of Eq. 28
  # Divided by e^(2 xi), which could overflow.
  return np.where(
    keep, 1 / (1 + others * np.exp(-2 * np.asarray(xi, np.float64)[:, None, None])), 0
  )


def _largest_score(qk: TransformedQK, n: int) -> np.ndarray:
  """xi (H,) of a block, of the largest norms of all positions, which differ by rounding."""
  queries_H, keys_Hkv = (
    np.linalg.norm(np.asarray(x[n, 0], np.float64), axis=-1).max(0) for x in qk
  )
  return (
    queries_H
    * np.repeat(keys_Hkv, len(queries_H) // len(keys_Hkv))
    / math.sqrt(qk.q_BxTxHxDh.shape[-1])
  )
