"""Importance of the first token over blocks and heads (Figures 19 to 24, and 27 for Jamba).

Models differ in where their sinks are; the first blocks have few, and tuning on instructions
moves little. Blocks with a Mamba mixer in the place of attention have no row.
"""

from __future__ import annotations

import numpy as np

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures the importance of the first token in every head of one model.

  Returns:
    importance (N, H): mean over sequences. layers (N,): which blocks these are, from 0. sink_1: in
    percent of heads; the threshold applies to each sequence before the mean over sequences.

  Raises:
    ValueError: several epsilons.
  """
  epsilon = options.epsilon
  report = probe(run, inputs.tokens, dtype=options.dtype,
                 batch_size=options.at_a_time(inputs.tokens.shape[1]))
  return {'model': run.name, 'inputs': inputs.description, 'epsilon': epsilon,
          'sink_1': 100 * report.sink_rate(epsilon=epsilon),
          'layers': list(run.config.attention_layers),
          'importance': report.importance[..., 0].mean(0, dtype=np.float64).tolist()}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws a heat map per model, blocks down and heads across, up to three in a row (PNG)."""
  columns = min(3, len(results))
  lines = -(-len(results) // columns)
  figure, axes = plots.canvas(0.8 + 4.0 * columns, 0.4 + 3.6 * lines, lines, columns,
                              len(results))
  for ax, result in zip(axes.flat, results):
    values = np.asarray(result['importance'])
    # The same colours for all models, over all values of an importance under a causal mask, so that
    # pictures can be compared.
    image = ax.imshow(values, vmin=0, vmax=1, cmap='viridis', aspect='auto',
                      interpolation='nearest')
    blocks = [layer + 1 for layer in result['layers']]
    for axis, names in ((ax.xaxis, list(range(1, values.shape[1] + 1))), (ax.yaxis, blocks)):
      every = -(-len(names) // 8)
      axis.set_ticks(range(0, len(names), every), labels=names[::every])
    bar = figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03)
    # A line across the scale of colours marks the threshold of Sink_1.
    bar.ax.axhline(result['epsilon'], color='white', linewidth=2)
    bar.ax.tick_params(labelsize=8)
    plots.label(ax, f'{model_name(result)}: {plots.SINK_1} = {result["sink_1"]:.1f} %',
                'head', 'block')
  figure.suptitle('Importance of the first token')
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Sink_1, and the strongest and the weakest head of each model."""
  table = [['model', 'Sink_1 in %', 'largest', 'block, head', 'smallest', 'block, head']]
  for result in results:
    values = np.asarray(result['importance'])
    cells = []
    for extreme in (values.argmax(), values.argmin()):
      layer, head = np.unravel_index(extreme, values.shape)
      cells += [f'{values[layer, head]:.3f}', f'{result["layers"][layer] + 1}, {head + 1}']
    table.append([model_name(result), f'{result["sink_1"]:.2f}', *cells])
  return table
