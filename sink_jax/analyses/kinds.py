"""Sink_1 on text, on random tokens and on one repeated token (Table 1 left).

Random tokens have a sink nearly as often as text. A repeated token has none in models with rotary
positions, whose hidden states are then all equal; in models with learned positions it has.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.loaded_models import LoadedModel, make_inputs as usual_inputs
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import KINDS, Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run
from sink_jax.paper.numbers import comparable, same_bos, table_number
from sink_jax.pretrained.hub import known_model


def make_inputs(model: LoadedModel, options: Options) -> Inputs:
  """Makes the sequences of all kinds, one kind after the other.

  Where options.inputs is 'natural', which is the default, these are all kinds, and otherwise the
  one that it names. description['kinds'] lists the descriptions of the kinds.
  """
  kinds = KINDS if options.inputs == 'natural' else (options.inputs,)
  # Each kind has a BOS protocol of its own, which `usual_inputs` chooses where none is given: text
  # as the tokenizer begins it, the others without, as in Section 3.3.
  parts = [usual_inputs(model, dataclasses.replace(options, inputs=kind)) for kind in kinds]
  return dataclasses.replace(
      parts[0], tokens=np.concatenate([part.tokens for part in parts]),
      description=parts[0].description | {'kinds': [part.description for part in parts]})


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Sink_1 of one model by kind of input.

  Returns:
    sink_1 {kind: percent of heads}. mean_importance {kind: of the first token}. paper {kind: the
    paper's number} and difference {kind: sink_1 - paper}, for the models of Table 1 at its
    length, epsilon and BOS.

  Raises:
    ValueError: several epsilons.
  """
  epsilon, length = options.epsilon, inputs.tokens.shape[1]
  report = probe(run, inputs.tokens, dtype=options.dtype, batch_size=options.at_a_time(length))
  # The kinds lie one after the other along the axis of sequences; their descriptions have the same
  # order.
  first_SxNxH, start = report.importance[..., 0], 0
  rates, mean = {}, {}
  for description in inputs.description['kinds']:
    part = first_SxNxH[start:start + description['sequences']]
    start += description['sequences']
    rates[description['kind']] = float(100 * (part > epsilon).mean(dtype=np.float64))
    mean[description['kind']] = float(part.mean(dtype=np.float64))
  published = {}
  model = known_model(run.name)
  if model and comparable(length, epsilon):
    # Table 1 has four models: for any other, or another BOS, there is no number to compare with.
    numbers = {each['kind']: table_number('table-1-left', model.name, f'sink_1_{each["kind"]}')
               for each in inputs.description['kinds'] if same_bos(each)}
    published = {kind: value for kind, value in numbers.items() if value is not None}
  return {'model': run.name, 'inputs': inputs.description, 'epsilon': epsilon, 'sink_1': rates,
          'mean_importance': mean, 'paper': published,
          'difference': {kind: rates[kind] - value for kind, value in published.items()}}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws bars of Sink_1 by kind, a group per model; a line across a bar is the paper's (PNG)."""
  figure, axes = plots.canvas(max(5.0, 2.0 + 1.6 * len(results)), 4.0)
  ax = axes[0, 0]
  for i, kind in enumerate(KINDS):
    for x, result in enumerate(results):
      if kind in result['sink_1']:
        centre = x + 0.26 * (i - 1)
        bar = ax.bar(centre, result['sink_1'][kind], 0.24, color=plots.COLOURS[i])
        ax.bar_label(bar, fmt='%.1f', fontsize=8)
        if kind in result['paper']:
          ax.plot([centre - 0.12, centre + 0.12], [result['paper'][kind]] * 2, color='black',
                  linewidth=2)
    # A bar of no height holds the entry of the legend, also of a kind that no result has.
    ax.bar(0, 0, color=plots.COLOURS[i], label=kind)
  if any(result['paper'] for result in results):
    ax.plot([], [], color='black', linewidth=2, label='the paper')
  ax.set_ylim(0, 108)
  ax.set_xticks(range(len(results)), labels=[model_name(r) for r in results])
  ax.legend(fontsize=9, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
  plots.label(ax, f'ε = {results[0]["epsilon"]:g}, T = {results[0]["inputs"]["length"]}', '',
              f'{plots.SINK_1} (% of heads)')
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Sink_1 in percent, and the paper's in brackets."""
  table = [['Sink_1 in % (the paper)', *KINDS]]
  for result in results:
    cells = []
    for kind in KINDS:
      rate, published = result['sink_1'].get(kind), result['paper'].get(kind)
      cells.append('-' if rate is None else
                   f'{rate:.2f}' + ('' if published is None else f' ({published:.2f})'))
    table.append([model_name(result), *cells])
  return table
