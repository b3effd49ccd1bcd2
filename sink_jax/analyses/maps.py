"""Attention maps of single heads (Figures 25 and 26, of Jamba)."""

from __future__ import annotations

import numpy as np

from sink_jax.analyses.angles import chosen_heads
from sink_jax.analyses.blocks import check_choice
from sink_jax.analyses.options import Options
from sink_jax.data.inputs import Inputs
from sink_jax.evaluate import plots
from sink_jax.evaluate.maps import HeadMaps, head_maps
from sink_jax.models.run import Run

_DIGITS = 4  # decimals of a map in a result
_PANELS = 12  # heads of a model, at most
_COLUMNS = 4


def measure(run: Run, inputs: Inputs, options: Options) -> dict:
  """Maps (T, T) of some heads of one model, means over sequences, of at most 64 tokens.

  heads: [{layer and head (from 0), importance of the first token, map, raw_map}], by default
  the strongest and the weakest head; options.layers and options.heads choose as in
  `angles.chosen_heads`. map has rows that sum to one; raw_map, where that differs, the weights
  of the values. The activations are float32.

  Raises:
    ValueError: a block without attention, a head that there is not, or more than 12 heads.
  """
  check_choice(run.config, options.layers, options.heads)
  layers = list(run.config.attention_layers)
  asked = None if options.layers is None else [layers.index(i) for i in options.layers]
  maps = head_maps(run, inputs.tokens)
  if asked is None and options.heads is None:
    chosen = list(dict.fromkeys([maps.head(strongest=True), maps.head(strongest=False)]))
  else:
    chosen = chosen_heads(maps.importance, asked, options.heads)
  if len(chosen) > _PANELS:
    raise ValueError(f'--layers and --heads: these are {len(chosen)} heads, and one picture holds '
                     f'{_PANELS}; name fewer.')
  return {'model': run.name, 'inputs': inputs.description, 'sequences': maps.sequences,
          'length': maps.raw.shape[-1],
          'heads': [_of(maps, n, layers[n], head) for n, head in chosen]}


def draw(results: list[dict], path) -> None:
  """A panel per head, queries down and keys across, up to four in a row (PNG).

  Each model begins a new row, and so do raw maps.
  """
  columns = min(_COLUMNS, max(len(result['heads']) for result in results))
  rows = [(result, key, result['heads'][i:i + columns]) for result in results
          for key in ('map', 'raw_map') if key in result['heads'][0]
          for i in range(0, len(result['heads']), columns)]
  figure, axes = plots.canvas(1.0 + 3.9 * columns, 4.1 * len(rows), len(rows), columns)
  for line, (result, key, heads) in zip(axes, rows):
    proxy = 'raw_map' in result['heads'][0]
    kind = 'raw weights' if key == 'raw_map' else 'rows made to sum to 1' if proxy else 'attention'
    for ax, own in zip(line, heads):
      plots.attention_panel(figure, ax, own[key],
                            f'{result["model"] or "model"}: block {own["layer"] + 1}, '
                            f'head {own["head"] + 1}\nimportance of the first token '
                            f'{own["importance"]:.2f}', kind)
    for ax in line[len(heads):]:
      ax.set_axis_off()
  plots.save(figure, path)


def rows(results: list[dict]) -> list[list[str]]:
  """Importance of the first token in every head that is drawn."""
  return [['model', 'block', 'head', 'importance'],
          *([r['model'] or 'model', str(own['layer'] + 1), str(own['head'] + 1),
             f'{own["importance"]:.3f}'] for r in results for own in r['heads'])]


def _of(maps: HeadMaps, n, layer, head):
  found = {'layer': layer, 'head': head, 'importance': float(maps.importance[n, head]),
           'map': np.round(maps.normalized[n, head], _DIGITS).tolist()}
  if maps.proxy:
    found['raw_map'] = np.round(maps.raw[n, head], _DIGITS).tolist()
  return found
