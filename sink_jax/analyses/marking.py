"""How a model marks its first token (P0 sink circuit, arXiv 2603.06591; of GPT-2, 2604.14722)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from sink_jax.analyses.edits import Controls
from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import analysis
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.activations import key_cosines
from sink_jax.evaluate.probe import probed
from sink_jax.evaluate.sinks import random_targets
from sink_jax.models.additions import record_without, streams_and_additions
from sink_jax.models.record import Record, RecordOptions, states
from sink_jax.pictures.charts import lines
from sink_jax.pictures.style import Row

_DRAWS = 100  # of random positions
_TRIED = 3  # additions that are left out: the largest of those that exceed random positions


def _draw(rows: list[Row]) -> Figure:
  added = [row for row in rows if row['part'] == 'addition']
  return lines(added, 'block', ('along', 'along_random'), by=('what',), name='component added')


@analysis('how the first token is marked', _draw, sequences=16, length=64)
def marking(model: Model, *, controls: Controls = 8) -> list[Row]:
  """What makes the first token special: additions of each sub-layer, and the sink without them.

  The direction is the mean over texts of the first token's hidden states in the middle of the
  model, each of length 1. Random positions lie in the first half; `*_random` is the 99th percentile
  over 100 of them, of additions the largest of any text's.

  - state, after each block, 0 is the embedding: its component `along` the direction, `appears`:
    first half of that in the middle; `cosine`: mean over texts with different first tokens.
  - addition of each sub-layer: `norm`, component `along` the direction, `exceeds`: in every text
    more than at random positions. `left`: Sink_1 (%) without it at the first token, of the three
    largest that exceed; the controls leave it out at random positions. `marks`: Sink_1 falls by
    more than in every control, and by one head or more.
  - key: mean cosine of the first key with the mean query, in heads with and without a sink;
    `cosine_others`: of other keys in heads with a sink.
  """
  if controls < 1:
    raise ValueError(f'--controls={controls} must be at least 1.')
  tokens_SxT = model.inputs().tokens
  options = RecordOptions(attention=key_cosines, hidden=states)
  records, alpha_NxSxH = _records(model, tokens_SxT, options)
  streams, added = (np.concatenate(x) for x in zip(*map(streams_and_additions, records)))
  cosines = np.concatenate([record.layers.attention for record in records], 1)
  middle = streams.shape[1] // 2  # of the M + 1 streams
  direction_D = _unit(_unit(streams[:, middle, 0]).mean(0))
  targets_RxS = random_targets(np.full(len(tokens_SxT), tokens_SxT.shape[1]))[:_DRAWS]
  rows = _states(streams, direction_D, targets_RxS, tokens_SxT[:, 0])
  mixers = ['Mamba mixer' if layer.mamba else 'attention' for layer in model.run.config.blocks]
  additions = [
    {'part': 'addition', 'block': m + 1, 'what': 'feed-forward network' if i else mixer}
    | _numbers(added[:, m, i], direction_D, targets_RxS)
    for m, mixer in enumerate(mixers)
    for i in range(2)
  ]
  sink_1 = 100 * float((alpha_NxSxH > EPSILON).mean())
  _leave_out(model, tokens_SxT, additions, sink_1, controls)
  return [*rows, *additions, *_keys(cosines, alpha_NxSxH.mean(1) > EPSILON, model.blocks)]


def _records(
  model: Model, tokens_SxT: np.ndarray, options: RecordOptions, left_out: tuple[int, ...] = ()
) -> tuple[list[Record], np.ndarray]:
  """Records and alpha_1 (N, S, H), without the addition at (block, sub-layer, token), if any."""
  config, params = probed(model.run.config, model.options.dtype), model.run.params
  left_out_Mx2xT = np.zeros((config.layers, 2, tokens_SxT.shape[1]), bool)
  left_out_Mx2xT[left_out] = bool(left_out)
  records = [
    record_without(config, options, params, left_out_Mx2xT, batch_BxT)
    for batch_BxT in model.batches(tokens_SxT)
  ]
  return records, np.concatenate([x.layers.importance.normalized[..., 0] for x in records], 1)


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
  model: Model, tokens_SxT: np.ndarray, additions: list[Row], sink_1: float, controls: int
) -> None:
  """Adds to the rows of the largest additions Sink_1 without them, if there is a sink to lose."""
  exceeding = [n for n, row in enumerate(additions) if row['exceeds'] and sink_1]
  exceeding.sort(key=lambda n: -additions[n]['along'])
  later = np.arange(1, max(2, tokens_SxT.shape[1] // 2))
  drawn = np.random.default_rng(0).permutation(later)[:controls]
  for n in exceeding[:_TRIED]:
    left = []
    for position in (0, *drawn):
      _, alpha = _records(model, tokens_SxT, RecordOptions(), (*divmod(n, 2), position))
      left.append(100 * float((alpha > EPSILON).mean()))
    first, low, high = left[0], min(left[1:]), max(left[1:])
    one_head = 100 / (len(model.blocks) * model.run.config.heads)
    controlled = {'control_low': low, 'control_high': high, 'controls': len(drawn)}
    marks = first < low and first <= sink_1 - one_head
    additions[n] |= {'sink_1': sink_1, 'left': first, **controlled, 'marks': marks}


def _keys(cosine_NxSxHxT: np.ndarray, sink_NxH: np.ndarray, blocks: list[int]) -> list[Row]:
  rows, mean = [], lambda x: float(x.mean()) if x.size else None
  for block, sink_H, cosine_SxHxT in zip(blocks, sink_NxH, cosine_NxSxHxT):
    row = {'part': 'key', 'block': block, 'heads': int(sink_H.sum())}
    row |= {'cosine_without_sink': mean(cosine_SxHxT[:, ~sink_H, 0])}
    of_sinks = cosine_SxHxT[:, sink_H]
    rows.append(row | {'cosine': mean(of_sinks[..., 0]), 'cosine_others': mean(of_sinks[..., 1:])})
  return rows


def _unit(x: np.ndarray) -> np.ndarray:
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
