"""How a model marks its first token (P0 sink circuit, arXiv 2603.06591; of GPT-2, 2604.14722)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from sink_jax.analyses.edits import Controls
from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import analysis
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.activations import key_cosines
from sink_jax.evaluate.sinks import random_targets
from sink_jax.models.additions import record_without, streams_and_additions
from sink_jax.models.config import Layer
from sink_jax.models.record import Record, RecordOptions, states
from sink_jax.pictures.charts import lines
from sink_jax.pictures.style import Row

_DRAWS = 100  # of random positions
_TRIED = 2  # additions that are left out: the largest of those that exceed random positions


def _draw(rows: list[Row]) -> Figure:
  added = [row for row in rows if row['part'] == 'addition']
  figure = lines(added, 'block', ('along', 'along_random'), by=('what',), name='component added')
  for ax in figure.axes:  # a second mark can be a hundred times as large as the first
    ax.set_yscale('symlog', linthresh=1)
  return figure


@analysis('how the first token is marked', _draw, sequences=8, length=64)
def marking(model: Model, *, controls: Controls = 4) -> list[Row]:
  """What makes the first token special: additions of each sub-layer, and the sink without them.

  The direction is the mean over texts of the first token's hidden states in the middle of the
  model, each of length 1. Random positions lie in the first half; `*_random` is the 99th percentile
  over 100 of them, of additions the largest of any text's.

  - state, after each block, 0 is the embedding: its component `along` the direction, `appears`:
    first half of that in the middle; `cosine`: mean over texts with different first tokens.
  - addition of each sub-layer: `norm`, component `along` the direction, `exceeds`: in every text
    more than at random positions. `left`: Sink_1 (%) without it at the first token, of the two
    largest that exceed; the controls leave it out at random positions. `marks`: Sink_1 falls by
    more than in every control, and by one head or more.
  - key: mean cosine of the first key with the mean query, in heads with and without a sink;
    `cosine_others`: of other keys in heads with a sink.
  """
  if controls < 1:
    raise ValueError(f'--controls={controls} must be at least 1.')
  tokens_SxT = model.inputs().tokens
  records = _records(model, tokens_SxT, RecordOptions(attention=key_cosines, hidden=states))
  parts = [streams_and_additions(record) for record in records]
  streams_SxPxTxD = np.concatenate([streams for streams, _ in parts])  # P = M + 1
  added_SxMx2xTxD = np.concatenate([added for _, added in parts])
  middle = streams_SxPxTxD.shape[1] // 2
  first_SxD = _unit(streams_SxPxTxD[:, middle, 0])
  direction_D = _unit(first_SxD.mean(0))
  sequences, length = tokens_SxT.shape
  drawn_RxS = random_targets(np.full(sequences, length))[:_DRAWS]
  additions = _additions(model.run.config.blocks, added_SxMx2xTxD, direction_D, drawn_RxS)
  alpha_NxSxH = _importance(records)
  if (alpha_NxSxH > EPSILON).any():  # there is a sink to lose
    exceeding = [row for row in additions if row['exceeds']]
    exceeding.sort(key=lambda row: -row['along'])
    for row in exceeding[:_TRIED]:
      row |= _left(model, tokens_SxT, additions.index(row), _sink_1(records), controls)
  return [
    *_states(streams_SxPxTxD, direction_D, drawn_RxS, tokens_SxT[:, 0]),
    *additions,
    *_keys(records, alpha_NxSxH.mean(1) > EPSILON, model.blocks),
  ]


def _records(
  model: Model,
  tokens_SxT: np.ndarray,
  options: RecordOptions,
  left_out: tuple[int, ...] = (),
) -> list[Record]:
  """Records of batches, without the addition at (block, sub-layer, token), if any, from 0."""
  config = model.config
  left_out_Mx2xT = np.zeros((config.layers, 2, tokens_SxT.shape[1]), bool)
  if left_out:
    left_out_Mx2xT[left_out] = True
  return [
    record_without(config, options, model.run.params, left_out_Mx2xT, batch_BxT)
    for batch_BxT in model.batches(tokens_SxT)
  ]


def _importance(records: Sequence[Record]) -> np.ndarray:
  """alpha_1 (N, S, H)."""
  batches = [record.layers.importance.normalized[..., 0] for record in records]
  return np.concatenate(batches, 1)


def _sink_1(records: Sequence[Record]) -> float:
  return 100 * float((_importance(records) > EPSILON).mean())


def _states(
  streams_SxPxTxD: np.ndarray,
  direction_D: np.ndarray,
  drawn_RxS: np.ndarray,
  first_S: np.ndarray,
) -> list[Row]:
  """A row for each stream; first_S: ids of the first tokens."""
  along_SxPxT = streams_SxPxTxD @ direction_D
  first_P = along_SxPxT[..., 0].mean(0)
  others_P = along_SxPxT[..., 1:].mean((0, 2))
  in_the_middle = first_P[len(first_P) // 2]
  appears = np.argmax(first_P >= in_the_middle / 2)
  cosines = _cosines(_unit(streams_SxPxTxD), drawn_RxS, first_S)
  rows = []
  for block, cosine in enumerate(cosines):
    row = {
      'part': 'state',
      'block': block,
      'along': float(first_P[block]),
      'appears': bool(block == appears),
      'along_others': float(others_P[block]),
    }
    rows.append(row | cosine)
  return rows


def _cosines(
  unit_SxPxTxD: np.ndarray,
  drawn_RxS: np.ndarray,
  first_S: np.ndarray,
) -> list[Row]:
  """For each stream, the mean cosine between texts that begin with different tokens, if any do."""
  texts_S = np.arange(len(first_S))
  different_SxS = first_S[:, None] != first_S
  if not different_SxS.any():
    return [{'cosine': None}] * unit_SxPxTxD.shape[1]

  def mean(at_S: np.ndarray) -> np.ndarray:
    unit_SxPxD = unit_SxPxTxD[texts_S, :, at_S]
    unit_PxSxD = np.swapaxes(unit_SxPxD, 0, 1)
    cosine_PxSxS = unit_PxSxD @ np.swapaxes(unit_PxSxD, 1, 2)
    return cosine_PxSxS[:, different_SxS].mean(1)

  first_P = mean(np.zeros_like(texts_S))
  drawn_RxP = [mean(at_S) for at_S in drawn_RxS]
  random_P = np.percentile(drawn_RxP, 99, axis=0)
  return [
    {'cosine': float(first), 'cosine_random': float(random)}
    for first, random in zip(first_P, random_P)
  ]


def _additions(
  layers: Sequence[Layer],
  added_SxMx2xTxD: np.ndarray,
  direction_D: np.ndarray,
  drawn_RxS: np.ndarray,
) -> list[Row]:
  """A row for each sub-layer."""
  texts_S = np.arange(len(added_SxMx2xTxD))
  rows = []
  for m, i in np.ndindex(len(layers), 2):
    added_SxTxD = added_SxMx2xTxD[:, m, i]
    norm_SxT = np.linalg.norm(added_SxTxD, axis=-1)
    along_SxT = added_SxTxD @ direction_D
    random_S = np.percentile(along_SxT[texts_S, drawn_RxS], 99, axis=0)
    mixer = 'Mamba mixer' if layers[m].mamba else 'attention'
    row = {
      'part': 'addition',
      'block': m + 1,
      'what': (mixer, 'feed-forward network')[i],
      'norm': float(norm_SxT[:, 0].mean()),
      'norm_others': float(norm_SxT[:, 1:].mean()),
      'along': float(along_SxT[:, 0].mean()),
      'along_others': float(along_SxT[:, 1:].mean()),
      'along_random': float(random_S.max()),
      'exceeds': bool((along_SxT[:, 0] > random_S).all()),
    }
    rows.append(row)
  return rows


def _left(
  model: Model,
  tokens_SxT: np.ndarray,
  sub_layer: int,
  sink_1: float,
  controls: int,
) -> Row:
  """Sink_1 without what a sub-layer, of all in their order, adds to the first token."""
  later = np.arange(1, max(2, tokens_SxT.shape[1] // 2))
  drawn = np.random.default_rng(0).permutation(later)[:controls]
  at = divmod(sub_layer, 2)
  without = lambda token: _sink_1(_records(model, tokens_SxT, RecordOptions(), (*at, token)))
  first = without(0)
  controlled = [without(token) for token in drawn]
  one_head = 100 / (len(model.blocks) * model.run.config.heads)
  return {
    'sink_1': sink_1,
    'left': first,
    'control_low': min(controlled),
    'control_high': max(controlled),
    'controls': len(drawn),
    'marks': first < min(controlled) and first <= sink_1 - one_head,
  }


def _keys(
  records: Sequence[Record],
  sink_NxH: np.ndarray,
  blocks: Sequence[int],
) -> list[Row]:
  """A row for each block with attention."""
  cosine_NxSxHxT = np.concatenate([record.layers.attention for record in records], 1)
  mean = lambda cosines: float(cosines.mean()) if cosines.size else None
  rows = []
  for block, sink_H, cosine_SxHxT in zip(blocks, sink_NxH, cosine_NxSxHxT):
    of_sinks = cosine_SxHxT[:, sink_H]
    row = {
      'part': 'key',
      'block': block,
      'heads': int(sink_H.sum()),
      'cosine_without_sink': mean(cosine_SxHxT[:, ~sink_H, 0]),
      'cosine': mean(of_sinks[..., 0]),
      'cosine_others': mean(of_sinks[..., 1:]),
    }
    rows.append(row)
  return rows


def _unit(x: np.ndarray) -> np.ndarray:
  length = np.linalg.norm(x, axis=-1, keepdims=True)
  return x / np.maximum(length, np.finfo(np.float32).tiny)
