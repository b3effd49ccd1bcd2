"""Norms, and maps over queries and keys of single heads: attention and angles.

Why queries attend to the first token (Section 3.1): a score is the cosine of query and key times
the product of their norms, over sqrt(Dh). In a head with a sink the norm product with the first key
is small and the cosine is large. Queries and keys are those that enter the scores, after QK norm,
rotation and feature map.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import Heads, analysis, named_heads
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.activations import query_key_angles
from sink_jax.evaluate.head_maps import head_maps, strongest_and_weakest
from sink_jax.evaluate.sink_report import SinkReport, mean_of_text
from sink_jax.models.record import RecordOptions, queries_keys
from sink_jax.models.run import Run
from sink_jax.pictures.charts import lines
from sink_jax.pictures.maps import attention_maps
from sink_jax.pictures.style import Row

NAMES = ('cosine', 'norm_product', 'score')
_LENGTH = 128  # tokens of a map of angles
_TITLE = '{model}: block {block}, head {head}\nimportance {importance:.2f}, {averaged}'
_DIGITS = 4  # decimals of a map's numbers in a file


def _largest_ratio(rows: list[Row]) -> str:
  row = max((row for row in rows if row['kind'] == 'hidden states'), key=lambda row: row['ratio'])
  return (
    f'after block {row["block"]} the hidden state of the first token is {row["ratio"]:.3g} times '
    'as long as those of the others'
  )


@analysis(
  'Figure 2 (top), Figures 11 to 14',
  partial(
    lines,
    x='block',
    y=('first', 'others'),
    panel=('model', 'kind'),
    log='y',
    name=r'$\ell_2$ norm',
  ),
  finding=_largest_ratio,
)
def norms(model: Model) -> list[Row]:
  """l2 norms of hidden states, keys and values: the first token and the mean of the others."""
  return of_report(model.report(model.inputs().tokens))


def of_report(report: SinkReport) -> list[Row]:
  """Rows with kind, block, first, others and their ratio, means over sequences and key/value heads.

  Hidden states are those between blocks: block 0 is the embedding, and the last one is taken before
  the final norm. Keys are those that enter the scores. The ratio is one of means, as in Figures 7
  and 8.
  """
  rows = []
  for kind, words in (('hidden', 'hidden states'), ('key', 'keys'), ('value', 'values')):
    norms = np.asarray(report.norms[kind], np.float64)  # (S, N, T) or (S, N, H, T)
    axes = tuple(axis for axis in range(norms.ndim - 1) if axis != 1)
    first_N, others_N = norms[..., 0].mean(axes), mean_of_text(norms[..., 1:]).mean(axes)
    blocks = range(len(first_N)) if kind == 'hidden' else report.protocol['blocks']
    rows += [
      {'kind': words, 'block': block, 'first': first, 'others': others, 'ratio': first / others}
      for block, first, others in zip(blocks, first_N.tolist(), others_N.tolist())
    ]
  return rows


@analysis(
  'Figures 25, 26',
  partial(attention_maps, columns=('map', 'raw_map'), title=_TITLE),
  sequences=10,
)
def maps(model: Model, *, heads: Heads = ()) -> list[Row]:
  """Attention maps of four heads, means over sequences; --sequences=1 shows one.

  A map has at most 64 tokens, in float32. Its rows sum to one; where attention itself has other
  rows, raw_map holds the weights that multiply the values.
  """
  chosen, found = named_heads(model, heads), head_maps(model.run, model.inputs().tokens)
  chosen = chosen or strongest_and_weakest(found.importance)
  rounded = lambda map_TxT: np.round(map_TxT, _DIGITS).tolist()
  return [
    {
      'block': model.blocks[n],
      'head': h + 1,
      'importance': float(found.importance[n, h]),
      'averaged': averaged(found.sequences),
      'map': rounded(found.normalized[n, h]),
      **({'raw_map': rounded(found.raw[n, h])} if found.proxy else {}),
    }
    for n, h in chosen
  ]


def averaged(sequences: int) -> str:
  """The words for maps that are means over some number of sequences."""
  return 'one sequence' if sequences == 1 else f'mean of {sequences} sequences'


def _cosines(rows: list[Row]) -> str:
  sinks = [row for row in rows if row['importance'] > EPSILON]
  if not sinks:
    return 'no head has a sink on the first token'
  first, others = (
    np.mean([row[f'cosine_{keys}'] for row in sinks]) for keys in ('first', 'others')
  )
  return (
    f'in the {len(sinks)} of {len(rows)} heads with a sink, the mean cosine of the queries is '
    f'{first:.2f} with the first key and {others:.2f} with the others'
  )


@analysis(
  'Figure 2 (bottom), Figures 15 to 18',
  partial(attention_maps, columns=NAMES, title=_TITLE),
  finding=_cosines,
)
def angles(model: Model, *, heads: Heads = ()) -> list[Row]:
  """Angles between queries and keys: cosines, norm products and scores.

  A row for each head: means of key 1 and of the other keys over sequences and queries. Four heads,
  or those of --heads, have maps as well, means over sequences; --sequences=1 shows one. Only the
  score has 1/sqrt(Dh).
  """
  tokens_SxT = model.inputs().tokens
  run = dataclasses.replace(model.run, config=model.config)
  chosen, means = named_heads(model, heads), {}
  for batch_BxT in model.batches(tokens_SxT):
    layers = run.record(batch_BxT, RecordOptions(attention=query_key_angles)).layers
    measured = layers.attention | {'importance': layers.importance.normalized[..., 0]}
    for name, x_NxBxH in measured.items():
      means[name] = means.get(name, 0) + np.asarray(x_NxBxH, np.float64).sum(1) / len(tokens_SxT)
  chosen = chosen or strongest_and_weakest(means['importance'])
  maps = dict(zip(chosen, pair_maps(model, run, tokens_SxT[:, :_LENGTH], chosen)))
  return [
    {
      'block': model.blocks[n],
      'head': h + 1,
      **{name: float(x[n, h]) for name, x in means.items()},
      **(
        {
          'averaged': averaged(len(tokens_SxT)),
          **{name: np.round(x, _DIGITS).tolist() for name, x in maps[n, h].items()},
        }
        if (n, h) in maps
        else {}
      ),
    }
    for n, h in np.ndindex(*means['importance'].shape)
  ]


def pair_maps(
  model: Model, run: Run, tokens_SxT: np.ndarray, heads: Sequence[tuple[int, int]]
) -> list[dict[str, np.ndarray]]:
  """Maps (T, T) of heads (n, h) by name, means over sequences, zero where the key comes later."""
  dims, length = run.config.dims, tokens_SxT.shape[1]
  maps = [{name: np.zeros((length, length)) for name in NAMES} for _ in heads]
  # One sequence at a time, for the memory of the queries of all heads.
  for row in model.batches(tokens_SxT, 1):
    qk = run.record(row, RecordOptions(attention=queries_keys)).layers.attention
    for found, (n, h) in zip(maps, heads):
      key_head = h // (dims.heads // dims.kv_heads)  # that neighbouring query heads share
      q_BxTxDh = np.asarray(qk.q_BxTxHxDh[n, :, :, h], np.float64)
      k_BxTxDh = np.asarray(qk.k_BxTxHkvxDh[n, :, :, key_head], np.float64)
      product = (
        np.linalg.norm(q_BxTxDh, axis=-1)[:, :, None] * np.linalg.norm(k_BxTxDh, axis=-1)[:, None]
      )
      dot = q_BxTxDh @ k_BxTxDh.swapaxes(1, 2)
      for name, x_BxTxT in (
        ('cosine', dot / np.maximum(product, np.finfo(np.float32).tiny)),
        ('norm_product', product),
        ('score', dot / math.sqrt(q_BxTxDh.shape[-1])),
      ):
        found[name] += np.tril(x_BxTxT).sum(0) / len(tokens_SxT)
  return maps
