"""How a model marks its first token: by which sub-layer, and whether the sink depends on it.

The first token sees only itself, early feed-forward networks make its hidden state large along one
direction, and the keys of later blocks read it (the P0 sink circuit, arXiv 2603.06591; 2604.14722).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from sink_jax.analyses.edits import Controls
from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, lines
from sink_jax.analyses.runner import analysis
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.activations import key_cosines
from sink_jax.evaluate.probe import probed
from sink_jax.evaluate.sinks import random_targets
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.additions import record_without, streams_and_additions
from sink_jax.models.record import Record, RecordOptions, states

_DRAWS = 100  # of random positions
_TRIED = 3  # additions that are left out: the largest of those that exceed random positions
_ALL = RecordOptions(attention=key_cosines, hidden=states)


def _draw(rows: list[Row]) -> Figure:
  added = [row for row in rows if row['part'] == 'addition']
  label = 'added along the direction of the first token'
  return lines(added, 'block', ('along', 'along_random'), by=('what',), label=label)


def sentence(rows: Sequence[Row]) -> str:
  """The addition that marks the first token; '' where none is shown to."""
  marking = [row for row in rows if row['part'] == 'addition' and row.get('marks')]
  if not marking:
    return ''
  row = min(marking, key=lambda row: row['left'])
  number = lambda x: f'{x:,.0f}' if abs(x) >= 100 else f'{x:.3g}'
  return (
    f"Block {row['block']}'s {row['what']} marks the first token: it adds {number(row['along'])} "
    'along the direction that this token has in the middle of the model (random positions: up to '
    f'{number(row["along_random"])}). Without this addition Sink_1 is {row["left"]:.1f} % instead '
    f'of {row["sink_1"]:.1f} % (without that at a random position: {row["control_low"]:.1f} to '
    f'{row["control_high"]:.1f} %).'
  )


@analysis('how the first token is marked', _draw, finding=sentence, sequences=16, length=64)
def marking(model: Model, *, controls: Controls = 8) -> list[Row]:
  """What makes the first token special: additions of each sub-layer, and the sink without them.

  The direction is the mean over texts of the first token's hidden states in the middle of the
  model, each of length 1. Random positions lie in the first half of a text; `*_random` is the 99th
  percentile over 100 of them, of additions the largest of any text's.

  - state, after each block, from 0, the embedding: the component `along` the direction; the mean
    `cosine` between texts that begin with different tokens, None without such; `appears`: the first
    with half of the component in the middle.
  - addition, of each sub-layer: its `norm`, and its component `along` the direction; `exceeds`: in
    every text more than at random positions. `left` is Sink_1 (%) where it is left out at the first
    token, measured of the three largest that exceed; the controls leave it out at a random
    position. `marks`: Sink_1 falls by more than in every control, and by one head or more.
  - key, of each block with attention: the mean cosine of the first key with the mean query, in
    heads with a sink and in those without; `cosine_others`: of other keys in heads with a sink.
  """
  if controls < 1:
    raise ValueError(f'--controls={controls} must be at least 1.')
  tokens_SxT = model.inputs().tokens
  none_Mx2xT = np.zeros((model.run.config.layers, 2, tokens_SxT.shape[1]), bool)
  records = _records(model, tokens_SxT, none_Mx2xT, _ALL)
  streams, added = (np.concatenate(x) for x in zip(*map(streams_and_additions, records)))
  layers = [record.layers for record in records]
  alpha = np.concatenate([of_batch.importance.normalized[..., 0] for of_batch in layers], 1)
  cosines = np.concatenate([of_batch.attention for of_batch in layers], 1)
  middle_SxD = _unit(streams[:, -(-none_Mx2xT.shape[0] // 2), 0])
  direction_D = _unit(middle_SxD.mean(0))
  targets_RxS = random_targets(np.full(len(tokens_SxT), tokens_SxT.shape[1]))[:_DRAWS]
  mixers = ['Mamba mixer' if layer.mamba else 'attention' for layer in model.run.config.blocks]
  rows = _states(streams, direction_D, targets_RxS, tokens_SxT[:, 0])
  additions = [
    {'part': 'addition', 'block': m + 1, 'what': 'feed-forward network' if i else mixer}
    | _numbers(added[:, m, i], direction_D, targets_RxS)
    for m, mixer in enumerate(mixers)
    for i in range(2)
  ]
  _leave_out(model, tokens_SxT, none_Mx2xT, additions, 100 * (alpha > EPSILON).mean(), controls)
  return [*rows, *additions, *_keys(cosines, alpha.mean(1) > EPSILON, model.blocks)]


def _records(
  model: Model, tokens_SxT: np.ndarray, left_out_Mx2xT: np.ndarray, options: RecordOptions
) -> list[Record]:
  config, params = probed(model.run.config, model.options.dtype), model.run.params
  return [
    record_without(config, options, mesh_of(params), params, left_out_Mx2xT, batch_BxT)
    for batch_BxT in model.batches(tokens_SxT)
  ]


def _states(
  streams: np.ndarray, direction_D: np.ndarray, targets_RxS: np.ndarray, first_S: np.ndarray
) -> list[Row]:
  along_MxSxT, unit = np.moveaxis(streams @ direction_D, 1, 0), _unit(streams)
  first_M = along_MxSxT[..., 0].mean(1)
  appears = (first_M >= first_M[len(first_M) // 2] / 2).argmax()
  texts, different_SxS = np.arange(len(first_S)), first_S[:, None] != first_S
  cosine_PxM = []
  for at_S in (0 * texts, *targets_RxS) if different_SxS.any() else ():
    u_MxSxD = np.moveaxis(unit[texts, :, at_S], 1, 0)
    cosine_PxM.append((u_MxSxD @ np.swapaxes(u_MxSxD, 1, 2))[:, different_SxS].mean(1))
  rows = []
  for m in range(len(first_M)):
    row = {'part': 'state', 'block': m, 'along': float(first_M[m]), 'appears': bool(m == appears)}
    row |= {'along_others': float(along_MxSxT[m, :, 1:].mean()), 'cosine': None}
    if cosine_PxM:
      first, *drawn = (float(cosine_M[m]) for cosine_M in cosine_PxM)
      row |= {'cosine': first, 'cosine_random': float(np.percentile(drawn, 99))}
    rows.append(row)
  return rows


def _numbers(added_SxTxD: np.ndarray, direction_D: np.ndarray, targets_RxS: np.ndarray) -> Row:
  norm_SxT, along_SxT = np.linalg.norm(added_SxTxD, axis=-1), added_SxTxD @ direction_D
  random_S = np.percentile(along_SxT[np.arange(len(along_SxT)), targets_RxS], 99, axis=0)
  return {
    'norm': float(norm_SxT[:, 0].mean()),
    'norm_others': float(norm_SxT[:, 1:].mean()),
    'along': float(along_SxT[:, 0].mean()),
    'along_others': float(along_SxT[:, 1:].mean()),
    'along_random': float(random_S.max()),
    'exceeds': bool((along_SxT[:, 0] > random_S).all()),
  }


def _leave_out(
  model: Model,
  tokens_SxT: np.ndarray,
  none_Mx2xT: np.ndarray,
  additions: list[Row],
  sink_1: float,
  controls: int,
) -> None:
  """Adds to the rows of the largest additions Sink_1 without them, if there is a sink to lose."""
  exceeding = [n for n, row in enumerate(additions) if row['exceeds'] and sink_1]
  exceeding.sort(key=lambda n: -additions[n]['along'])
  later = np.arange(1, max(2, tokens_SxT.shape[1] // 2))
  drawn = np.random.default_rng(0).permutation(later)[:controls]
  for n in exceeding[:_TRIED]:
    left = []
    for position in (0, *drawn):
      left_out = none_Mx2xT.copy()
      left_out[(*divmod(n, 2), position)] = True
      records = _records(model, tokens_SxT, left_out, RecordOptions())
      alpha = np.concatenate([x.layers.importance.normalized[..., 0] for x in records], 1)
      left.append(100 * float((alpha > EPSILON).mean()))
    first, low, high = left[0], min(left[1:]), max(left[1:])
    one_head = 100 / (alpha.shape[0] * alpha.shape[2])
    marks = first < low and first <= sink_1 - one_head
    controlled = {'control_low': low, 'control_high': high, 'controls': len(drawn)}
    additions[n] |= {'sink_1': float(sink_1), 'left': first, **controlled, 'marks': bool(marks)}


def _keys(cosines: np.ndarray, sink_NxH: np.ndarray, blocks: Sequence[int]) -> list[Row]:
  mean = lambda x: float(x.mean()) if x.size else None
  rows = []
  for n, (block, sink_H) in enumerate(zip(blocks, sink_NxH)):
    of_sinks, first = cosines[n, :, sink_H], cosines[n, :, :, 0]
    row = {'part': 'key', 'block': block, 'heads': int(sink_H.sum())}
    row |= {'cosine': mean(of_sinks[..., 0]), 'cosine_without_sink': mean(first[:, ~sink_H])}
    rows.append(row | {'cosine_others': mean(of_sinks[..., 1:])})
  return rows


def _unit(x: np.ndarray) -> np.ndarray:
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
