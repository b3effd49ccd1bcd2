"""The paper's rows and figures of open models, with what analyses measured in these models.

Of several results for one number or line, that with the fewest differences from the paper's is
shown, of these the newest; the files of the others are named.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sink_jax.paper.analysed import Analysed, listed
from sink_jax.paper.numbers import PaperFigure, PaperRow, PaperTable
from sink_jax.paper.open_protocol import EXPECTED, Result, printable
from sink_jax.paper.pictures import Figure, Picture
from sink_jax.pretrained.hub import MODELS, known_model
from sink_jax.report.images import with_palette
from sink_jax.report.markup import upper

_MANY = 'Pythia-14M,GPT2'  # of a figure of all models, to begin with
_MESSAGE, _LABEL = 200, 40  # characters
# Fields are checked when a file is read; what they are together is not known before it is drawn.
_UNDRAWABLE = (ValueError, TypeError, KeyError, IndexError, ArithmeticError)


def needs_models(item: PaperTable | PaperFigure, models: Iterable[str]) -> str:
  """Why a table or figure of open models is not there, and the commands that make it."""
  names = ','.join(dict.fromkeys(models)) or _MANY
  quoted = f'"{names}"' if ' ' in names else names
  options = f'{EXPECTED[item.analysis].options} --out=analyses'.lstrip()
  return ('not run: needs a published checkpoint, and python -m sink_jax analyses '
          f'{item.analysis} --checkpoint={quoted} {options}; then --analyses=analyses here')


def models_of(table: PaperTable, row: PaperRow) -> dict[str, str]:
  """{metric: name in the catalogue} of a row of a table of open models."""
  if table.analysis == 'positions':
    return dict.fromkeys(table.metrics, 'GPT2-XL')
  # Tables of chat models name a family, whose base model is called '... Base' in the catalogue.
  base = known_model(row.setting) or known_model(f'{row.setting} Base')
  assert base is not None, f'{row.setting} is not in the catalogue'
  chat = base.counterpart or base.name
  return {metric: chat if metric == 'sink_1_chat' else base.name for metric in table.metrics}


def figure_of(figure: PaperFigure, analysed: Analysed) -> Figure:
  """A figure with its picture, or with a status that says why there is none."""
  shown, left_out = _together(figure, analysed)
  if not shown:
    return Figure(figure, [], '; '.join([needs_models(figure, figure.models or ()), *left_out]))
  module, raw = analysed.modules[figure.analysis], io.BytesIO()
  drawn = [_named(figure, result) for result in shown]
  try:
    module.draw(drawn, raw)
    numbers = module.rows(drawn)
  except _UNDRAWABLE as error:
    files = ', '.join(dict.fromkeys(result.file for result in shown))
    return Figure(figure, [], f'cannot be drawn: the results in {files} do not fit together '
                              f'({printable(error, _MESSAGE)})')
  absent = analysed.absent(figure.analysis, figure.models or (), shown)
  picture = Picture(
      file=f'{figure.key}.png',
      missing=[f'{name} ({why})' for name, why in absent.items()],
      note=_note(shown, left_out), numbers=numbers, models=shown,
      # The pictures of analyses have no palette yet, as every other picture of the page has.
      png=with_palette(raw))
  return Figure(figure, [picture], 'drawn')


def value_of(table: PaperTable, row: PaperRow, metric: str, result: Result) -> float | None:
  """The number of a result that stands for a metric of a row; None where it has none."""
  content = result.content
  if table.analysis == 'kinds':
    kind = metric.removeprefix('sink_1_') if metric != 'sink_1' else 'natural'
    return content['sink_1'] if kind == content['inputs']['kind'] else None
  if table.analysis == 'chat':
    return content['sink_1']
  # 'first position vector replaced by the 5th'; without a number the row is of no change.
  position = re.search(r'(\d+)th$', row.setting)
  wanted = (table.half, int(position[1])) if position else ('no', None)
  return next((change.get(metric) for change in content['rows']
               if (change['change'], change.get('position')) == wanted), None)


def _together(figure: PaperFigure, analysed: Analysed) -> tuple[list[Result], list[str]]:
  """The results to draw in one picture, a model each; and words on those that are left out."""
  names, epsilon = figure.models, figure.epsilon
  candidates = analysed.of(figure.analysis, names)
  groups: dict[tuple, dict[str, Result]] = {}
  for result in sorted(candidates, key=lambda result: result.rank):
    # A panel of Figure 9 is of one threshold, which the analysis must have used.
    if epsilon is None or epsilon in result.content['epsilons']:
      groups.setdefault(result.alike, {}).setdefault(result.model.name, result)
  if not groups:
    return [], [f'{result.file} has no epsilon {epsilon:g}' for result in candidates] + [
        f'{model} {why}' for (analysis, model), why in analysed.failed.items()
        if analysis == figure.analysis and (names is None or model in names)]
  # Results of different protocols never share a picture: that nearest to the paper's is drawn, of
  # these the one with most models.
  shown = min(groups.values(), key=lambda group: (
      max(len(result.differences) for result in group.values()), -len(group)))
  left_out = [f'{result.model.name} of {result.file}' for result in candidates
              if result is not shown.get(result.model.name)]
  # As the paper or the catalogue lists them: colours and legends then do not depend on the order of
  # files.
  return [shown[name] for name in names or MODELS if name in shown], left_out


def _named(figure: PaperFigure, result: Result) -> dict[str, Any]:
  """A result as its module draws it: with the paper's name, and the thresholds of the figure."""
  name = result.model.name
  content = {**result.content, 'model': name, 'family': name.split('-')[0]}
  if figure.epsilon is not None:
    index = content['epsilons'].index(figure.epsilon)
    content |= {'epsilons': [figure.epsilon], 'sink_1': [content['sink_1'][index]]}
  if result.analysis == 'domains':  # a dollar begins a formula in a picture
    content['domains'] = [printable(domain, _LABEL).replace('$', r'\$')
                          for domain in content['domains']]
  return content


def _note(shown: Sequence[Result], left_out: Sequence[str]) -> str:
  """The files of a picture, how its inputs were made, and in what that is not the paper's way."""
  files = dict.fromkeys(result.file for result in shown)
  apart = dict.fromkeys(words for result in shown for words in result.differences)
  lines = [f'Drawn from {listed(list(files))}: {shown[0].described}']
  lines += [f'Not the paper\'s protocol: {", ".join(apart)}'] if apart else []
  lines += [f'{result.model.name}: {words}' for result in shown
            for words in result.other_model]
  if not apart:
    lines += dict.fromkeys(words for result in shown for words in result.remarks)
  lines += [f'Not drawn with these: {listed(left_out)}'] if left_out else []
  return '. '.join(map(upper, lines)) + '.'
