"""Sink_k^epsilon against the length of the inputs (Figure 3).

The rate falls with T, and the faster the larger epsilon is: importance is a mean over all queries,
and late queries look elsewhere too. The paper chose epsilon = 0.3 and T = 64 by this figure.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.loaded_models import LoadedModel, check_length, make_inputs as usual_inputs
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run

_POSITIONS = 10  # k = 1..10, as the official implementation, sail-sg/Attention-Sink, prints


def make_inputs(model: LoadedModel, options: Options) -> Inputs:
  """Makes sequences of the largest of options.lengths.

  Raises:
    ValueError: as `loaded_models.make_inputs`.
  """
  # Shorter inputs are the beginnings of these, so that along a curve the length alone changes.
  return usual_inputs(model, dataclasses.replace(options, length=max(options.lengths)))


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures one model on the first T tokens of the same sequences, for T of options.lengths.

  Memory grows linearly with T: no map is made.

  Returns:
    lengths (L,) and epsilons (E,). sink (E, L, K): percent of heads whose token k = 1..K has an
    importance above epsilon; K is 10, or the shortest length. mean_importance (L,): of the first
    token.

  Raises:
    ValueError: the inputs are shorter than the largest length.
  """
  lengths = sorted(set(options.lengths))
  check_length(run, lengths[-1])
  if lengths[-1] > inputs.tokens.shape[1]:
    raise ValueError(f'--lengths: {lengths[-1]} exceeds the {inputs.tokens.shape[1]} tokens of the '
                     'inputs.')
  # Every length must have all K positions, or `sink` would not be a full array.
  count = min(_POSITIONS, lengths[0])
  sink, mean = [], []
  for length in lengths:
    options.say(f'{run.name}: T = {length}')
    alpha_SxNxHxK = _importance(run, inputs.tokens[:, :length], count, options)
    sink.append([(100 * (alpha_SxNxHxK > epsilon).mean((0, 1, 2))).tolist()
                 for epsilon in options.epsilons])
    mean.append(float(alpha_SxNxHxK[..., 0].mean(dtype=np.float64)))
  # `sink` was collected as (L, E, K); zip turns it into (E, L, K).
  return {'model': run.name, 'inputs': inputs.description, 'lengths': lengths,
          'epsilons': list(options.epsilons), 'sink': [list(rates) for rates in zip(*sink)],
          'mean_importance': mean}


def _importance(run: Run, tokens: np.ndarray, count: int, options: Options) -> np.ndarray:
  """Importance (S, N, H, count) of the first tokens.

  The copies let go of the importance of all other tokens after each part of the sequences.
  """
  size, parts = options.at_a_time(tokens.shape[1]), []
  for i in range(0, len(tokens), size):
    report = probe(run, tokens[i:i + size], dtype=options.dtype)
    parts.append(report.importance[..., :count].copy())
  return np.concatenate(parts)


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws Sink_1 in percent against T, with a line per epsilon and a panel per model (PNG)."""
  columns = min(3, len(results))
  lines = -(-len(results) // columns)
  figure, axes = plots.canvas(1.4 + 4.2 * columns, 3.8 * lines, lines, columns,
                              len(results))
  for ax, result in zip(axes.flat, results):
    for i, (epsilon, rates) in enumerate(zip(result['epsilons'], result['sink'])):
      sink_1 = [by_position[0] for by_position in rates]
      ax.plot(result['lengths'], sink_1, 'o-', linewidth=2, markersize=5,
              color=plots.COLOURS[i % len(plots.COLOURS)], label=f'ε = {epsilon:g}')
    ax.set_xscale('log', base=2)
    ax.set_xticks(result['lengths'], labels=map(str, result['lengths']))
    ax.minorticks_off()
    ax.set_ylim(-4, 104)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=9, frameon=False)
    plots.label(ax, model_name(result), 'T (tokens)', f'{plots.SINK_1} (% of heads)')
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Sink_1 in percent, with a row per model and epsilon."""
  table = [['Sink_1 in %', 'epsilon', *(f'T={t}' for t in results[0]['lengths'])]]
  for result in results:
    for epsilon, rates in zip(result['epsilons'], result['sink']):
      table.append([model_name(result), f'{epsilon:g}', *(f'{r[0]:.2f}' for r in rates)])
  return table
