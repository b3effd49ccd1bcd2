"""The paper's rows and figures of open models, with what analyses measured in these models.

Of several results for one number, that with the fewest differences from the paper's protocol is
shown, of these the newest; the files of the others are named.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.paper.analysed import Analysed, Result, listed, printable
from sink_jax.paper.cells import Cell, Entry, OpenNumber
from sink_jax.paper.metrics import METRICS
from sink_jax.paper.numbers import PaperFigure, PaperRow, PaperTable, difference
from sink_jax.paper.open_protocol import (
  PROTOCOLS,
  alike,
  described,
  differences,
  other_model,
  remarks,
)
from sink_jax.paper.pictures import DrawnModel, Figure, Picture
from sink_jax.pretrained.hub import MODELS, known_model
from sink_jax.report.images import with_palette

_MANY = 'Pythia-14M,GPT2'  # of a figure of all models, to begin with
_MESSAGE, _LABEL = 200, 40  # characters
_NOT_RUN = 'not run'
# Fields are checked when a file is read; what they are together is not known before it is drawn.
_UNDRAWABLE = (ValueError, TypeError, KeyError, IndexError, ArithmeticError)


def needs_models(item: PaperTable | PaperFigure, models: Sequence[str] | None = None) -> str:
  """Why a table or figure of open models is not there, and the commands that make it."""
  wanted = models or (item.models if isinstance(item, PaperFigure) else None) or [_MANY]
  names = ','.join(wanted)
  quoted = f'"{names}"' if ' ' in names else names
  options = ' '.join(filter(None, [PROTOCOLS[item.analysis].options, '--out=analyses']))
  return ('not run: needs a published checkpoint, and python -m sink_jax.analyses '
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


def entry_of(table: PaperTable, row: PaperRow, analysed: Analysed
             ) -> tuple[Entry | None, list[str]]:
  """The measured numbers of a row, None if nothing was run for it; its models without a number."""
  cells = {metric: cell for metric, model in models_of(table, row).items()
           if (cell := _cell(table, row, metric, model, analysed))}
  numbers = _numbers(cells)
  there = {number.model for number in numbers}
  models = dict.fromkeys(models_of(table, row).values())
  absent = {model: _absent(table, model, analysed) for model in models if model not in there}
  # A row of models that nobody has run stands in the table as the paper's numbers alone.
  if not cells and set(absent.values()) == {_NOT_RUN}:
    return None, [*absent]
  others = dict.fromkeys(file for number in numbers for file in number.others)
  status = ['measured' if cells else '', *(f'{model} {why}' for model, why in absent.items()),
            f'also in {listed(list(others))}' if others else '']
  return Entry('; '.join(filter(None, status)), cells,
               list(dict.fromkeys(number.file for number in numbers))), [*absent]


def figure_of(figure: PaperFigure, analysed: Analysed) -> Figure:
  """A figure with its picture, or with a status that says why there is none."""
  shown, left_out = _together(figure, analysed)
  if not shown:
    return Figure(figure, [], '; '.join([needs_models(figure), *left_out]))
  module, raw = analysed.analyses[figure.analysis].module, io.BytesIO()
  drawn = [_named(figure, result) for result in shown]
  try:
    module.draw(drawn, raw)
    numbers = module.rows(drawn)
  except _UNDRAWABLE as error:
    files = ', '.join(dict.fromkeys(result.file for result in shown))
    return Figure(figure, [], f'cannot be drawn: the results in {files} do not fit together '
                              f'({printable(error, _MESSAGE)})')
  # The pictures of analyses have no palette yet, as every other picture of the page has.
  there = {result.model.name for result in shown}
  picture = Picture(
      file=f'{figure.key}.png',
      missing=[f'{name} ({_absent(figure, name, analysed)})'
               for name in figure.models or () if name not in there],
      note=_note(shown, left_out), numbers=numbers,
      models=[DrawnModel(result.model.name, result.file, result.checkpoint)
              for result in shown],
      png=with_palette(raw))
  return Figure(figure, [picture], 'drawn')


def _absent(item: PaperTable | PaperFigure, model: str, analysed: Analysed) -> str:
  """Why an analysis has no result of a model."""
  return analysed.failed.get((item.analysis or '', model), _NOT_RUN)


def _cell(table: PaperTable, row: PaperRow, metric: str, model: str, analysed: Analysed
          ) -> Cell | None:
  kind = _kind(table, metric)
  candidates = [(differences(result, kind) + other_model(result), result, value)
                for result in analysed.of(table.analysis, [model]) if result.inputs(kind)
                and (value := _value(table, row, metric, result)) is not None]
  if not candidates:
    return None
  # Fewest differences first, as such a number says most about the paper's; of equal ones the
  # newest.
  apart, shown, value = min(
      candidates, key=lambda candidate: (len(candidate[0]), *candidate[1].rank))
  paper, inputs = row.values.get(metric), shown.inputs(kind)
  number = OpenNumber(
      value=value,
      text=METRICS[metric].text(value),
      model=model,
      file=shown.file,
      checkpoint=shown.checkpoint,
      inputs={key: inputs.get(key) for key in ('kind', 'sequences', 'length', 'source')} | {
          'bos': inputs['bos']['protocol']},
      others=[result.file for _, result, _ in candidates if result is not shown])
  return Cell(
      paper=paper,
      # One difference from the protocol is enough to withhold the comparison; the number is shown
      # all the same.
      difference=None if apart else difference(value, paper),
      agrees=None,
      remark='' if paper is None else '; '.join(apart or remarks(shown, kind)),
      measured=number)


def _numbers(cells: Mapping[str, Cell]) -> list[OpenNumber]:
  return [cell.measured for cell in cells.values() if isinstance(cell.measured, OpenNumber)]


def _value(table: PaperTable, row: PaperRow, metric: str, result: Result) -> float | None:
  """The number of a result that stands for a metric of a row; None where it has none."""
  content = result.content
  if table.analysis == 'kinds':
    return content['sink_1'].get(_kind(table, metric))
  if table.analysis == 'chat':
    return content['sink_1']
  # 'first position vector replaced by the 5th'; without a number the row is of no change.
  position = re.search(r'(\d+)th$', row.setting)
  wanted = (table.half, int(position[1])) if position else ('no', None)
  return next((change.get(metric) for change in content['rows']
               if (change['change'], change.get('position')) == wanted), None)


def _kind(table: PaperTable, metric: str) -> str | None:
  """Of the inputs of a number; None for what is usual in its analysis."""
  if table.analysis != 'kinds':
    return None
  return metric.removeprefix('sink_1_') if metric != 'sink_1' else 'natural'


def _together(figure: PaperFigure, analysed: Analysed) -> tuple[list[Result], list[str]]:
  """The results to draw in one picture, a model each; and words on those that are left out."""
  names, epsilon = figure.models, figure.epsilon
  candidates = analysed.of(figure.analysis, names)
  # A panel of Figure 9 is of one threshold, which the analysis must have used.
  fit = [result for result in candidates
         if epsilon is None or epsilon in result.content['epsilons']]
  groups: dict[tuple, list[Result]] = {}
  for result in fit:
    groups.setdefault(alike(result), []).append(result)
  if not groups:
    return [], [f'{result.file} has no epsilon {epsilon:g}' for result in candidates] + [
        f'{model} {why}' for (analysis, model), why in analysed.failed.items()
        if analysis == figure.analysis and (names is None or model in names)]
  # Results of different protocols never share a picture.
  group = min(groups.values(), key=_group_order)
  shown: dict[str, Result] = {}
  for result in sorted(group, key=lambda result: (len(other_model(result)), *result.rank)):
    # The first of a model: of the right size, then the newest.
    shown.setdefault(result.model.name, result)
  left_out = [result for result in candidates
              if all(result is not other for other in shown.values())]
  # As the paper or the catalogue lists them: colours and legends then do not depend on the order of
  # files.
  order = list(names or MODELS)
  return sorted(shown.values(), key=lambda result: order.index(result.model.name)), [
      f'{result.model.name} of {result.file}' for result in left_out]


def _group_order(group: Sequence[Result]) -> tuple[int, int, float, str]:
  """Of results that are alike: nearest to the protocol, most models, newest first."""
  models = {result.model.name for result in group}
  return (max(len(differences(result)) for result in group), -len(models),
          *min(result.rank for result in group))


def _named(figure: PaperFigure, result: Result) -> dict[str, Any]:
  """A result as its module draws it: with the paper's name, and the thresholds of the figure."""
  name = result.model.name
  content: dict[str, Any] = {**result.content, 'model': name}
  if 'family' in content:
    content['family'] = name.split('-')[0]
  if figure.epsilon is not None:
    index = content['epsilons'].index(figure.epsilon)
    content |= {'epsilons': [figure.epsilon], 'sink_1': [content['sink_1'][index]]}
  if 'domains' in content:  # a dollar begins a formula in a picture
    content['domains'] = [printable(domain, _LABEL).replace('$', r'\$')
                          for domain in content['domains']]
  return content


def _note(shown: Sequence[Result], left_out: Sequence[str]) -> str:
  """The files of a picture, how its inputs were made, and in what that is not the paper's way."""
  files = listed(list(dict.fromkeys(result.file for result in shown)))
  lines = [f'Drawn from {files}: {described(shown[0])}']
  apart = list(dict.fromkeys(words for result in shown for words in differences(result)))
  lines += [f'Not the paper\'s protocol: {", ".join(apart)}'] if apart else []
  lines += [f'{result.model.name}: {words}' for result in shown
            for words in other_model(result)]
  if not apart:
    lines += dict.fromkeys(words for result in shown for words in remarks(result))
  lines += [f'Not drawn with these: {listed(left_out)}'] if left_out else []
  return '. '.join(line[:1].upper() + line[1:] for line in lines) + '.'
