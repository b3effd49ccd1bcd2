"""Why queries look at the first token: its angle, not its size (Figure 2 bottom, Figures 15-18).

A score is the cosine of query and key times the product of their norms, over sqrt(Dh). In a sink head the
norm product with k_1 is small and the cosine is large. Queries and keys are those that enter the
scores, after QK norm, rotation and feature map. No number here includes a bias of the scores
(ALiBi, relative positions), and keys outside of a window count like the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from sink_jax.analyses.blocks import check_layers_and_heads
from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.activations import query_key_angles
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.plots import strongest_and_weakest
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import Run

NAMES = {'cosine': 'cosine', 'norm_product': r'$\|q\|\|k\|$',
         'score': r'$q k^\top / \sqrt{d_h}$'}
_LENGTH = 128  # tokens of a T x T map, at most
_DIGITS = 4  # of a map's numbers in the result, which is a file of megabytes otherwise
_HEADS = 8  # with maps, at most: each has a row in the picture
_NUMBERS_AT_A_TIME = 2**24  # of recorded queries, which is 64 MiB in float32


def statistics(run: Run, tokens: ArrayLike, *, dtype: str = 'float32',
               batch_size: int | None = None) -> dict[str, np.ndarray]:
  """Measures cosine, norm product and score of every head.

  Memory is linear in T, since the means are taken inside of the model.

  Args:
    run: the model; N of its blocks have attention, with H query heads each.
    tokens: (S, T), T > 1.
    dtype: of the activations.
    batch_size: sequences at a time; all by default.

  Returns:
    Arrays (N, H). 'cosine_first', 'norm_product_first' and 'score_first' are means over sequences
    and queries t > 1 of key 1; 'cosine_others' and so on are means over the keys 1 < j <= t as
    well. Only the score has the factor 1/sqrt(Dh), as in the paper. 'importance' is that of the first
    token, of rows that sum to one.
  """
  tokens_SxT, means = np.asarray(tokens), {}
  run, size = _in_dtype(run, dtype), batch_size or len(tokens_SxT)
  for i in range(0, len(tokens_SxT), size):
    layers = run.record(tokens_SxT[i:i + size], RecordOptions(angles=query_key_angles)).layers
    assert layers.angles is not None and layers.importance is not None
    recorded = layers.angles | {'importance': layers.importance.normalized[..., 0]}
    for name, x_NxBxH in recorded.items():
      # Each part is divided by the number of all sequences, so that a last part that is smaller
      # than the others gets no larger weight. Axis 1 are the sequences of the part.
      part = np.asarray(x_NxBxH, np.float64).sum(1) / len(tokens_SxT)
      means[name] = means[name] + part if name in means else part
  return means


def pair_maps(run: Run, tokens: ArrayLike, heads: Sequence[tuple[int, int]], *,
              dtype: str = 'float32') -> dict[str, np.ndarray]:
  """Computes maps over queries and keys of single heads, means over sequences.

  Args:
    run: the model.
    tokens: (S, T), of which at most the first 128 of each sequence are used.
    heads: (n, h) from 0, n among the blocks with attention.
    dtype: of the activations.

  Returns:
    'cosine', 'norm_product' and 'score', each (heads, T, T), zero where the key comes after the
    query.
  """
  tokens_SxT = np.asarray(tokens)[:, :_LENGTH]
  run, dims, length = _in_dtype(run, dtype), run.config.dims, tokens_SxT.shape[1]
  # The queries of all heads are recorded, in a large model of a few sequences at a time.
  size = max(1, _NUMBERS_AT_A_TIME // (run.config.layers * length * dims.heads * dims.head_dim))
  # With grouped-query attention, `group` query heads in a row share one key head.
  group = dims.heads // dims.kv_heads
  maps = {name: np.zeros((len(heads), length, length)) for name in NAMES}
  for i in range(0, len(tokens_SxT), size):
    layers = run.record(tokens_SxT[i:i + size], RecordOptions(queries_keys=True)).layers
    assert layers.queries_BxTxHxDh is not None and layers.keys_BxTxHkvxDh is not None
    for row, (n, h) in enumerate(heads):
      q_BxTxDh = np.asarray(layers.queries_BxTxHxDh[n, :, :, h], np.float64)
      k_BxTxDh = np.asarray(layers.keys_BxTxHkvxDh[n, :, :, h // group], np.float64)
      product = np.linalg.norm(q_BxTxDh, axis=-1)[:, :, None] * np.linalg.norm(
          k_BxTxDh, axis=-1)[:, None]
      dot, scale = q_BxTxDh @ k_BxTxDh.swapaxes(1, 2), math.sqrt(q_BxTxDh.shape[-1])
      # A vector of zeros has no direction: its cosine becomes 0 instead of NaN.
      cosine = dot / np.maximum(product, np.finfo(np.float32).tiny)
      pairs = {'cosine': cosine, 'norm_product': product, 'score': dot / scale}
      for name, x_BxTxT in pairs.items():
        # Under a causal mask no query meets a later key.
        maps[name][row] += np.tril(x_BxTxT).sum(0) / len(tokens_SxT)
  return maps


def choose_heads(importance_NxH: ArrayLike, layers: Sequence[int] | None = None,
                 heads: Sequence[int] | None = None) -> list[tuple[int, int]]:
  """Chooses heads by the importance of the first token; returns their (n, h), from 0.

  Args:
    importance_NxH: of the first token, in N blocks with H heads.
    layers: the strongest head of each of these blocks.
    heads: each of these heads in the block where it is strongest. With layers, all pairs of a
      block and a head; with neither, the two strongest heads of the model and the two weakest.
  """
  alpha_NxH = np.asarray(importance_NxH)
  if layers is not None and heads is not None:
    return [(n, h) for n in layers for h in heads]
  if layers is not None:
    return [(n, int(alpha_NxH[n].argmax())) for n in layers]
  if heads is not None:
    return [(int(alpha_NxH[:, h].argmax()), h) for h in heads]
  return strongest_and_weakest(alpha_NxH)


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Figure 2 bottom of one model: statistics of all heads, and maps of chosen ones.

  options.layers and options.heads, from 0, choose the heads that have maps, see `choose_heads`.

  Returns:
    The `statistics` (N, H) by name. layers (N,): which blocks these are, from 0. maps: a list of
    {layer, head, importance, cosine, norm_product, score}, the last three (T, T).

  Raises:
    ValueError: options name a block without attention, a head that there is not, or more than
      8 heads.
  """
  check_layers_and_heads(run.config, options.layers, options.heads)
  layers = list(run.config.attention_layers)
  means = statistics(run, inputs.tokens, dtype=options.dtype,
                     batch_size=options.at_a_time(inputs.tokens.shape[1]))
  # The options number all blocks, while the arrays of `statistics` count those with attention
  # alone: in Jamba, block 4 (from 0) is their entry 0.
  blocks = None if options.layers is None else [layers.index(i) for i in options.layers]
  heads = choose_heads(means['importance'], blocks, options.heads)
  if len(heads) > _HEADS:
    raise ValueError(f'--layers and --heads: {len(heads)} heads would have maps; name at most '
                     f'{_HEADS}, the others are in the statistics all the same.')
  maps = pair_maps(run, inputs.tokens, heads, dtype=options.dtype)
  return {'model': run.name, 'inputs': inputs.description, 'layers': layers,
          **{name: x.tolist() for name, x in means.items()},
          'maps': [{'layer': layers[n], 'head': h, 'importance': float(means['importance'][n, h]),
                    **{name: np.round(x[i], _DIGITS).tolist() for name, x in maps.items()}}
                   for i, (n, h) in enumerate(heads)]}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws, for each model, the statistics over blocks and three maps of each chosen head (PNG)."""
  rows = sum(1 + len(result['maps']) for result in results)
  figure, axes = plots.canvas(12.5, 4.0 * rows, rows, len(NAMES))
  row = iter(axes)
  for result in results:
    panels, blocks = next(row), np.asarray(result['layers']) + 1
    for ax, (name, words) in zip(panels, NAMES.items()):
      for shift, key, colour, text in ((-0.12, 'first', plots.COLOURS[1], 'first key'),
                                       (0.12, 'others', plots.COLOURS[0],
                                        'mean of the other keys')):
        heads_NxH = np.asarray(result[f'{name}_{key}'])
        ax.plot(blocks + shift, heads_NxH, 'o', color=colour, markersize=3.5, alpha=0.35)
        ax.plot(blocks, heads_NxH.mean(1), color=colour, linewidth=2, label=text)
      ax.axhline(0, color='#777777', linewidth=1, linestyle=':')
      ax.xaxis.get_major_locator().set_params(integer=True)
      ax.grid(alpha=0.25)
      plots.label(ax, words, 'block (dots: heads, line: mean)', '')
    panels[0].legend(fontsize=9, frameon=False)
    panels[0].set_title(f'{model_name(result)}: {NAMES["cosine"]}')
    for head in result['maps']:
      for ax, (name, words) in zip(next(row), NAMES.items()):
        plots.attention_panel(ax, head[name], words, '')
        if name == 'cosine':
          ax.set_title(f'block {head["layer"] + 1}, head {head["head"] + 1} '
                       f'(importance {head["importance"]:.2f}): {words}', fontsize=10)
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates the heads that have maps: the first key beside the mean of the others."""
  table = [['angles', 'block', 'head', 'importance',
            *(f'{name} {key}' for name in NAMES for key in ('first', 'others'))]]
  for result in results:
    for head in result['maps']:
      n, h = result['layers'].index(head['layer']), head['head']
      table.append([model_name(result), str(head['layer'] + 1), str(h + 1),
                    f'{head["importance"]:.3f}',
                    *(f'{result[f"{name}_{key}"][n][h]:.3f}'
                      for name in NAMES for key in ('first', 'others'))])
  return table


def _in_dtype(run: Run, dtype: str) -> Run:
  return dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=dtype))
