"""Sink_1 against the number of parameters, by family (Figure 4 left).

Small models have sinks too, down to Pythia-14M; in the Pythia family larger models have more.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_count
from sink_jax.pretrained.hub import family_of


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Sink_1 of one model, and counts its parameters.

  Returns:
    sink_1: in percent of heads. mean_importance: of the first token. parameters: their number,
    embeddings included. family: by the paper's names, 'other' for a model that it does not have.

  Raises:
    ValueError: several epsilons.
  """
  epsilon = options.epsilon
  report = probe(run, inputs.tokens, dtype=options.dtype,
                 batch_size=options.at_a_time(inputs.tokens.shape[1]))
  return {'model': run.name, 'inputs': inputs.description, 'epsilon': epsilon,
          'parameters': parameter_count(run.config), 'family': family_of(run.name),
          'sink_1': 100 * report.sink_rate(epsilon=epsilon),
          'mean_importance': float(report.head_importance().mean())}


def panel(ax: Axes, results: list[Result], key: str, title: str, y: str) -> None:
  """Plots one number in percent against the number of parameters, with a line per family."""
  families = list(dict.fromkeys(result['family'] for result in results))
  for i, family in enumerate(families):
    # By the number of parameters, or the line of a family would run back and forth.
    points = sorted((r['parameters'], r[key]) for r in results if r['family'] == family)
    # Models of no family have nothing to do with each other: dots without a line.
    # Where the colours begin again, the markers have moved on by one, so no two families look
    # alike.
    style = 'os^Dv<>'[(i + i // len(plots.COLOURS)) % 7] + ('' if family == 'other' else '-')
    ax.plot(*zip(*points), style, color=plots.COLOURS[i % len(plots.COLOURS)], linewidth=2,
            markersize=6, label=family)
  ax.set_xscale('log')
  ax.set_ylim(-4, 104)
  ax.grid(alpha=0.25)
  plots.label(ax, title, 'parameters', y)


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws Sink_1 in percent against the number of parameters, with a line per family (PNG)."""
  figure, axes = plots.canvas(6.0, 4.2)
  panel(axes[0, 0], results, 'sink_1', f'ε = {results[0]["epsilon"]:g}, '
        f'T = {results[0]["inputs"]["length"]}', f'{plots.SINK_1} (% of heads)')
  axes[0, 0].legend(fontsize=9, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates family, parameters and Sink_1, with a row per model."""
  return [['model', 'family', 'parameters', 'Sink_1 in %'],
          *([model_name(r), r['family'], f'{r["parameters"]:,}', f'{r["sink_1"]:.2f}']
            for r in results)]
