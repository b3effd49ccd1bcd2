"""Attention maps of single heads (Figures 25 and 26, of Jamba)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sink_jax.analyses.angles import choose_heads
from sink_jax.analyses.blocks import check_layers_and_heads
from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.plots import HeadMaps, head_maps
from sink_jax.models.run import Run

_DIGITS = 4  # decimals of a map in a result
_PANELS = 12  # heads of a model in one picture, at most
_COLUMNS = 4


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures attention maps (T, T) of some heads of one model, of at most 64 tokens.

  `angles.choose_heads` chooses them: the two strongest and the two weakest by default, others by
  options.layers and options.heads. The activations are float32.

  Returns:
    heads: a list of {layer, head, importance, map, raw_map}. Layer and head count from 0; the
    importance is that of the first token. The rows of map, a mean over sequences, sum to one.
    Where attention itself has other rows, raw_map holds the weights that multiply the values.

  Raises:
    ValueError: a block without attention, a head that there is not, or more than 12 heads.
  """
  check_layers_and_heads(run.config, options.layers, options.heads)
  layers = list(run.config.attention_layers)
  blocks = None if options.layers is None else [layers.index(i) for i in options.layers]
  maps = head_maps(run, inputs.tokens)
  chosen = choose_heads(maps.importance, blocks, options.heads)
  if len(chosen) > _PANELS:
    raise ValueError(f'--layers and --heads: these are {len(chosen)} heads, and one picture holds '
                     f'{_PANELS}; name fewer.')
  return {'model': run.name, 'inputs': inputs.description, 'sequences': maps.sequences,
          'length': maps.raw.shape[-1],
          'heads': [_head(maps, n, layers[n], head) for n, head in chosen]}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws a panel per head, queries down and keys across, up to four in a row (PNG).

  Each model begins a new row, and so do its raw maps.
  """
  columns = min(_COLUMNS, max(len(result['heads']) for result in results))
  rows = [(result, key, result['heads'][i:i + columns]) for result in results
          for key in ('map', 'raw_map') if key in result['heads'][0]
          for i in range(0, len(result['heads']), columns)]
  figure, axes = plots.canvas(1.0 + 3.9 * columns, 4.1 * len(rows), len(rows), columns)
  for line, (result, key, heads) in zip(axes, rows):
    proxy = 'raw_map' in result['heads'][0]
    kind = 'raw weights' if key == 'raw_map' else 'rows made to sum to 1' if proxy else 'attention'
    for ax, head in zip(line, heads):
      plots.attention_panel(ax, head[key], f'{model_name(result)}: block {head["layer"] + 1}, '
                            f'head {head["head"] + 1}\nimportance of the first token '
                            f'{head["importance"]:.2f}', kind)
    for ax in line[len(heads):]:
      ax.set_axis_off()
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates the importance of the first token in every head that is drawn."""
  return [['model', 'block', 'head', 'importance'],
          *([model_name(result), str(head['layer'] + 1), str(head['head'] + 1),
             f'{head["importance"]:.3f}'] for result in results for head in result['heads'])]


def _head(maps: HeadMaps, n: int, layer: int, head: int) -> dict[str, Any]:
  """The entry of one head in a result; n counts the blocks with attention, layer all blocks."""
  entry = {'layer': layer, 'head': head, 'importance': float(maps.importance[n, head]),
           'map': np.round(maps.normalized[n, head], _DIGITS).tolist()}
  if maps.proxy:
    entry['raw_map'] = np.round(maps.raw[n, head], _DIGITS).tolist()
  return entry
