"""Why queries look at the first token: its angle, not its size (Figure 2 bottom, Figures 15-18).

A score is the cosine of query and key times the product of their norms. In a sink head the
norm product with k_1 is small and the cosine large. Queries and keys are as the scores see
them, after QK norm, rotation and feature map; a bias on the scores (ALiBi, relative) is not
part of any number here, nor is a window, whose hidden keys count like the others.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from sink_jax.analyses.blocks import check_choice
from sink_jax.analyses.options import Options
from sink_jax.data.inputs import Inputs
from sink_jax.evaluate import plots
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import Run

NAMES = {'cosine': 'cosine', 'norm_product': r'$\|q\|\|k\| / \sqrt{d_h}$',
         'score': r'$q k^\top / \sqrt{d_h}$'}
_LENGTH = 128  # tokens of a T x T map, at most
_HEADS = 8  # with maps, at most: each has a row in the picture
_BUDGET = 2**24  # numbers of recorded queries at a time


def statistics(run: Run, tokens, *, dtype: str = 'float32',
               batch_size: int | None = None) -> dict[str, np.ndarray]:
  """Cosine, norm product and score per head, each (N, H), of tokens (S, T), T > 1.

  'cosine_first' and so on: mean over sequences and queries t > 1 of key 1; 'cosine_others':
  of the mean over the keys 1 < j <= t. Norm product and score have the factor 1/sqrt(Dh).
  'importance': of the first token, row-normalised. Memory is linear in T; N counts the
  blocks with attention, H query heads.
  """
  tokens, found = np.asarray(tokens), {}
  run, size = _in_dtype(run, dtype), batch_size or len(tokens)
  for i in range(0, len(tokens), size):
    layers = run.record(tokens[i:i + size], RecordOptions(angles=True)).layers
    seen = layers.angles._asdict() | {'importance': layers.importance.normalized[..., 0]}
    for name, x_NxBxH in seen.items():
      found[name] = found.get(name, 0) + np.asarray(x_NxBxH, np.float64).sum(1) / len(tokens)
  return found


def pair_maps(run: Run, tokens, heads: list[tuple[int, int]], *,
              dtype: str = 'float32') -> dict[str, np.ndarray]:
  """Maps over queries and keys of single heads, means over sequences, of tokens (S, T).

  heads: (n, h), from 0, n among the blocks with attention. Each of 'cosine', 'norm_product'
  and 'score' is (heads, T, T), zero where the key comes after the query; at most 128 tokens
  of a sequence are used.
  """
  tokens = np.asarray(tokens)[:, :_LENGTH]
  run, dims = _in_dtype(run, dtype), run.config.dims
  # Queries of all heads are recorded, those of a large model a few sequences at a time.
  size = max(1, _BUDGET // (run.config.layers * tokens.shape[1] * dims.heads * dims.head_dim))
  group = dims.heads // dims.kv_heads
  found = {name: np.zeros((len(heads), tokens.shape[1], tokens.shape[1])) for name in NAMES}
  for i in range(0, len(tokens), size):
    layers = run.record(tokens[i:i + size], RecordOptions(queries_keys=True)).layers
    for place, (n, h) in enumerate(heads):
      q_BxTxDh = np.asarray(layers.queries_BxTxHxDh[n, :, :, h], np.float64)
      k_BxTxDh = np.asarray(layers.keys_BxTxHkvxDh[n, :, :, h // group], np.float64)
      product = np.linalg.norm(q_BxTxDh, axis=-1)[:, :, None] * np.linalg.norm(
          k_BxTxDh, axis=-1)[:, None]
      dot, scale = q_BxTxDh @ k_BxTxDh.swapaxes(1, 2), math.sqrt(q_BxTxDh.shape[-1])
      cosine = dot / np.maximum(product, np.finfo(np.float32).tiny)
      own = {'cosine': cosine, 'norm_product': product / scale, 'score': dot / scale}
      for name, x in own.items():
        found[name][place] += np.tril(x).sum(0) / len(tokens)
  return found


def chosen_heads(importance_NxH, layers: list[int] | None = None,
                 heads: list[int] | None = None) -> list[tuple[int, int]]:
  """(n, h) of the heads to look at, from 0: where the first token's importance is largest.

  Neither given: the one such head. layers: the strongest head of each. heads: each where it
  is strongest. Both: all their pairs.
  """
  alpha = np.asarray(importance_NxH)
  if layers is None and heads is None:
    return [tuple(int(x) for x in np.unravel_index(alpha.argmax(), alpha.shape))]
  if heads is None:
    return [(n, int(alpha[n].argmax())) for n in layers]
  if layers is None:
    return [(int(alpha[:, h].argmax()), h) for h in heads]
  return [(n, h) for n in layers for h in heads]


def measure(run: Run, inputs: Inputs, options: Options) -> dict:
  """Figure 2 bottom of one model: statistics of all heads (N, H), and maps of chosen ones.

  layers: which blocks the statistics are of, from 0. maps: a list of {layer, head, importance,
  cosine, norm_product, score}, the last three (T, T). options.layers and options.heads, from
  0, say which heads have maps, see `chosen_heads`.

  Raises:
    ValueError: options name a block without attention, a head that there is not, or more than
      8 heads.
  """
  check_choice(run.config, options.layers, options.heads)
  layers = list(run.config.attention_layers)
  found = statistics(run, inputs.tokens, dtype=options.dtype,
                     batch_size=options.at_a_time(inputs.tokens.shape[1]))
  asked = None if options.layers is None else [layers.index(i) for i in options.layers]
  heads = chosen_heads(found['importance'], asked, options.heads)
  if len(heads) > _HEADS:
    raise ValueError(f'--layers and --heads: {len(heads)} heads would have maps; name at most '
                     f'{_HEADS}, the others are in the statistics all the same.')
  maps = pair_maps(run, inputs.tokens, heads, dtype=options.dtype)
  return {'model': run.name, 'inputs': inputs.description, 'layers': layers,
          **{name: x.tolist() for name, x in found.items()},
          'maps': [{'layer': layers[n], 'head': h, 'importance': float(found['importance'][n, h]),
                    **{name: x[i].tolist() for name, x in maps.items()}}
                   for i, (n, h) in enumerate(heads)]}


def draw(results: list[dict], path) -> None:
  """The statistics over blocks, then three maps of each chosen head, per model (PNG)."""
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
    panels[0].set_title(f'{result["model"] or "model"}: {NAMES["cosine"]}')
    for own in result['maps']:
      for ax, (name, words) in zip(next(row), NAMES.items()):
        plots.attention_panel(figure, ax, own[name], words, '')
        if name == 'cosine':
          ax.set_title(f'block {own["layer"] + 1}, head {own["head"] + 1} '
                       f'(importance {own["importance"]:.2f}): {words}', fontsize=10)
  plots.save(figure, path)


def rows(results: list[dict]) -> list[list[str]]:
  """Statistics of the heads that have maps, of the first key and of the mean of the others."""
  table = [['angles', 'block', 'head', 'importance',
            *(f'{name} {key}' for name in NAMES for key in ('first', 'others'))]]
  for result in results:
    for own in result['maps']:
      at = result['layers'].index(own['layer']), own['head']
      table.append([result['model'] or 'model', str(own['layer'] + 1), str(own['head'] + 1),
                    f'{own["importance"]:.3f}',
                    *(f'{result[f"{name}_{key}"][at[0]][at[1]]:.3f}'
                      for name in NAMES for key in ('first', 'others'))])
  return table


def _in_dtype(run, dtype):
  return dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=dtype))
