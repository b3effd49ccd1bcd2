"""Sink_1 of base models beside their chat versions (Table 1 right).

Tuning on instructions changes it little, so sinks emerge in pre-training. As in the paper, chat
models read plain text, without their template.
"""

from __future__ import annotations

import os

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run
from sink_jax.paper.numbers import comparable, same_bos, table_number
from sink_jax.pretrained.hub import known_model


def companions(names: list[str]) -> list[str]:
  """Adds to each base or chat model of the catalogue the other of its pair.

  A folder brings none, whatever its name; nor does a checkpoint that the catalogue does not know.
  """
  extended = []
  # By the catalogue's name, since a model can be given as a name, as an id on the hub or as a
  # folder.
  given = {model.name for model in map(known_model, names) if model}
  for name in names:
    # A folder may bear the name of a known model, but its counterpart is in no folder: it would be
    # looked up on the hub.
    model = None if os.path.isdir(os.path.expanduser(name)) else known_model(name)
    extended.append(name)
    if model and model.counterpart and model.counterpart not in given:
      extended.append(model.counterpart)
      given.add(model.counterpart)  # a model that is given twice brings it once
  return extended


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Sink_1 of one model.

  Returns:
    sink_1: in percent of heads. mean_importance: of the first token. tuned: whether it is a chat
    model, None where the catalogue does not say. counterpart: the other of its pair, or None.
    paper: the paper's number at the same protocol, and difference, sink_1 - paper; or None.

  Raises:
    ValueError: several epsilons.
  """
  epsilon, length = options.epsilon, inputs.tokens.shape[1]
  report = probe(run, inputs.tokens, dtype=options.dtype, batch_size=options.at_a_time(length))
  model, rate = known_model(run.name), 100 * report.sink_rate(epsilon=epsilon)
  published = None
  natural = inputs.description['kind'] == 'natural' and same_bos(inputs.description)
  if model and natural and comparable(length, epsilon):
    # The table has one row per pair, by the name of the base model without ' Base'.
    base = model.counterpart if model.tuned else model.name
    published = table_number('table-1-right', (base or '').removesuffix(' Base'),
                             'sink_1_chat' if model.tuned else 'sink_1_base')
  return {'model': run.name, 'inputs': inputs.description, 'epsilon': epsilon, 'sink_1': rate,
          'mean_importance': float(report.head_importance().mean()),
          'tuned': model.tuned if model else None,
          'counterpart': model.counterpart if model else None, 'paper': published,
          'difference': None if published is None else rate - published}


def pairs(results: list[Result]) -> list[tuple[Result | None, Result | None]]:
  """Pairs results as (base, chat), with None for one that is missing.

  Models that the catalogue does not know are paired in their order, base first. Of several of
  one name, the first base has the first chat model.
  """
  chats = {i: result for i, result in enumerate(results) if result['tuned']}
  in_order = {}
  for i, base in enumerate(results):
    if base['tuned'] is False:
      # The first chat model that is left: it is taken out, so that a second base of the same name
      # gets the next one.
      mate = next((j for j, chat in chats.items()
                   if _catalogue_name(chat) == base['counterpart']), None)
      in_order[i] = (base, None if mate is None else chats.pop(mate))
  in_order |= {i: (None, chat) for i, chat in chats.items()}
  # The None behind the odd ones is the chat model of a last base that has none; with an even number
  # `zip` leaves it out.
  unknown = [result for result in results if result['tuned'] is None]
  return [in_order[i] for i in sorted(in_order)] + list(zip(unknown[::2], [*unknown[1::2], None]))


def _catalogue_name(result: Result) -> str | None:
  model = known_model(result['model'])
  return model and model.name


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws bars of Sink_1, base beside chat; a line across a bar is the paper's number (PNG)."""
  couples = pairs(results)
  figure, axes = plots.canvas(max(5.0, 2.2 + 1.5 * len(couples)), 4.0)
  ax = axes[0, 0]
  for i, kind in enumerate(('base', 'chat')):
    # A bar of no height holds the entry of the legend, also of a kind that no result has.
    ax.bar(0, 0, color=plots.COLOURS[i], label=kind)
    for x, couple in enumerate(couples):
      if (result := couple[i]) is not None:
        centre = x + 0.36 * (i - 0.5)
        bar = ax.bar(centre, result['sink_1'], 0.34, color=plots.COLOURS[i])
        ax.bar_label(bar, fmt='%.1f', fontsize=8)
        if result['paper'] is not None:
          ax.plot([centre - 0.17, centre + 0.17], [result['paper']] * 2, color='black',
                  linewidth=2)
  if any(result['paper'] is not None for result in results):
    ax.plot([], [], color='black', linewidth=2, label='the paper')
  ax.set_ylim(0, 108)
  ax.set_xticks(range(len(couples)), labels=['\n'.join(model_name(r) for r in c if r)
                                             for c in couples], fontsize=9)
  ax.legend(fontsize=9, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
  plots.label(ax, f'ε = {results[0]["epsilon"]:g}, T = {results[0]["inputs"]["length"]}', '',
              f'{plots.SINK_1} (% of heads)')
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Sink_1 in percent, the paper's in brackets, with a row per pair."""
  table = [['base', 'Sink_1 in % (the paper)', 'chat', 'Sink_1 in %']]
  for couple in pairs(results):
    row = []
    for result in couple:
      if result is None:
        row += ['-', '-']
        continue
      published = '' if result['paper'] is None else f' ({result["paper"]:.2f})'
      row += [model_name(result), f'{result["sink_1"]:.2f}{published}']
    table.append(row)
  return table
