"""The paper's rows and figures of open models, beside what analyses found in them.

Of several results for one number, that with the fewest differences from the paper's protocol is
shown, of these the newest; the files of the others are named.
"""

from __future__ import annotations

import io
import re

from sink_jax.paper import drawing
from sink_jax.paper.analysed import Analysed, Result, listed, printable
from sink_jax.paper.metrics import METRICS
from sink_jax.paper.open_protocol import (
  PROTOCOLS,
  alike,
  checkpoint_of,
  described,
  differences,
  inputs_of,
  other_model,
  remarks,
)
from sink_jax.pretrained.hub import MODELS, known_model

_MANY = 'Pythia-14M,GPT2'  # of a figure of all models, to begin with
_MESSAGE, _LABEL = 200, 40  # characters
_NOT_RUN = 'not run'
_UNDRAWABLE = (ValueError, TypeError, KeyError, IndexError, ArithmeticError)


def needs_models(item: dict, models: list[str] | None = None) -> str:
  """Why a table or figure of open models is not there, and the commands that make it."""
  names = ','.join(models or item.get('models') or [_MANY])
  quoted = f'"{names}"' if ' ' in names else names
  options = ' '.join(filter(None, [PROTOCOLS[item['analysis']].options, '--out=analyses']))
  return ('not run: needs a published checkpoint, and python -m sink_jax.analyses '
          f'{item["analysis"]} --checkpoint={quoted} {options}; then --analyses=analyses here')


def models_of(item: dict, row: dict) -> dict[str, str]:
  """{measure: name in the catalogue} of a row of a table of open models."""
  if item['analysis'] == 'positions':
    return dict.fromkeys(item['measures'], 'GPT2-XL')
  base = known_model(row['setting']) or known_model(f'{row["setting"]} Base')
  return {measure: base.counterpart if measure == 'sink_1_chat' else base.name
          for measure in item['measures']}


def lacking(item: dict, row: dict) -> list[str]:
  """The models of a row that has no number of ours of them."""
  cells = row['ours'][0]['measures'].values() if row['ours'] else ()
  there = {cell['model'] for cell in cells}
  return [model for model in dict.fromkeys(models_of(item, row).values()) if model not in there]


def row_of(item: dict, row: dict, analysed: Analysed) -> dict | None:
  """Our side of a row: status, files, and measures {measure: cell}; None if nothing was run.

  A cell: mean, text, paper, difference (None where the protocol is another), agrees (None),
  remark, model, file, others (files of the same number that are not shown), inputs, checkpoint.
  """
  cells = {}
  for measure, model in models_of(item, row).items():
    if cell := _cell(item, row, measure, model, analysed):
      cells[measure] = cell
  there = {cell['model'] for cell in cells.values()}
  models = dict.fromkeys(models_of(item, row).values())
  absent = {model: _absent(item, model, analysed) for model in models if model not in there}
  if not cells and set(absent.values()) == {_NOT_RUN}:
    return None
  status = ['measured' if cells else '', *(f'{model} {why}' for model, why in absent.items()),
            _beside(cells)]
  return {'status': '; '.join(filter(None, status)), 'measures': cells,
          'files': list(dict.fromkeys(cell['file'] for cell in cells.values()))}


def figure_of(figure: dict, analysed: Analysed) -> tuple[dict | None, bytes, str]:
  """A picture's description and PNG, and the figure's status; (None, b'', status) without one.

  The description: file, name (''), models [{model, file, checkpoint}], missing, note (protocol
  and files), numbers (a table of texts, its header first), panels (none).
  """
  shown, beside = _together(figure, analysed)
  if not shown:
    return None, b'', '; '.join([needs_models(figure), *beside])
  module, raw = analysed.analyses[figure['analysis']].module, io.BytesIO()
  drawn = [_named(figure, result) for result in shown]
  try:
    module.draw(drawn, raw)
    numbers = module.rows(drawn)
  except _UNDRAWABLE as error:
    files = ', '.join(dict.fromkeys(result.file for result in shown))
    return None, b'', (f'cannot be drawn: the results in {files} do not fit together '
                       f'({printable(error, _MESSAGE)})')
  there = {result.published.name for result in shown}
  missing = [f'{name} ({_absent(figure, name, analysed)})'
             for name in figure.get('models', ()) if name not in there]
  content = {
      'file': f'{figure["key"]}.png', 'name': '', 'panels': [], 'missing': missing,
      'note': _note(figure, shown, beside), 'numbers': numbers,
      'models': [{'model': result.published.name, 'file': result.file,
                  'checkpoint': checkpoint_of(result)} for result in shown]}
  return content, drawing.with_palette(raw), 'drawn'


def _absent(item, model, analysed):
  """Why an analysis has no result of a model."""
  failed = [one for one in analysed.failed if one.analysis == item['analysis']
            and one.published and one.published.name == model]
  return f'failed: {failed[0].error} ({failed[0].file})' if failed else _NOT_RUN


def _cell(item, row, measure, model, analysed):
  kind = _kind(item, measure)
  found = []
  for result in analysed.results:
    if result.analysis == item['analysis'] and result.published and (
        result.published.name == model) and inputs_of(result, kind):
      if (value := _value(item, row, measure, result)) is not None:
        found.append((differences(result, kind) + other_model(result), result, value))
  if not found:
    return None
  apart, shown, value = min(found, key=lambda one: (len(one[0]), *_newest_first(one[1])))
  paper = row['values'].get(measure)
  words, inputs = apart or remarks(shown, kind), inputs_of(shown, kind)
  return {'mean': value, 'text': METRICS[measure].text(value), 'paper': paper,
          'difference': None if apart or paper is None else value - paper, 'agrees': None,
          'remark': '' if paper is None else '; '.join(words), 'model': model,
          'file': shown.file, 'checkpoint': checkpoint_of(shown),
          'inputs': {key: inputs.get(key) for key in ('kind', 'sequences', 'length', 'source')} | {
              'bos': inputs['bos']['protocol']},
          'others': [result.file for _, result, _ in found if result is not shown]}


def _value(item, row, measure, result):
  """The number of a result that a row's measure asks for; None where it has none."""
  content = result.content
  if item['analysis'] == 'kinds':
    return content['sink_1'].get(_kind(item, measure))
  if item['analysis'] == 'chat':
    return content['sink_1']
  position = re.search(r'(\d+)th$', row['setting'])
  wanted = (item['half'], int(position[1])) if position else ('no', None)
  return next((own.get(measure) for own in content['rows']
               if (own['change'], own.get('position')) == wanted), None)


def _kind(item, measure):
  """Of the inputs of a number; None for what is usual in its analysis."""
  if item['analysis'] != 'kinds':
    return None
  return measure.removeprefix('sink_1_') if measure != 'sink_1' else 'natural'


def _beside(cells):
  others = dict.fromkeys(file for cell in cells.values() for file in cell['others'])
  return f'also in {listed(list(others))}' if others else ''


def _together(figure, analysed):
  """The results to draw in one picture, a model each; and words on those that are left out."""
  names, epsilon = figure.get('models'), figure.get('epsilon')
  found = [result for result in analysed.results
           if result.analysis == figure['analysis'] and result.published
           and (names is None or result.published.name in names)]
  fit = [result for result in found
         if epsilon is None or epsilon in result.content['epsilons']]
  groups = {}
  for result in fit:
    groups.setdefault(alike(result), []).append(result)
  if not groups:
    failed = {one.published.name: _absent(figure, one.published.name, analysed)
              for one in analysed.failed if one.analysis == figure['analysis'] and one.published}
    return [], [f'{result.file} has no epsilon {epsilon:g}' for result in found] + [
        f'{model} {why}' for model, why in failed.items() if names is None or model in names]
  models = lambda group: {result.published.name for result in group}
  group = min(groups.values(), key=lambda group: (
      max(len(differences(result)) for result in group), -len(models(group)), *_newest_first(
          min(group, key=_newest_first))))
  shown = {}
  for result in sorted(group, key=lambda one: (len(other_model(one)), *_newest_first(one))):
    shown.setdefault(result.published.name, result)
  left = [result for result in found if all(result is not one for one in shown.values())]
  order = list(names or MODELS)
  return sorted(shown.values(), key=lambda result: order.index(result.published.name)), [
      f'{result.published.name} of {result.file}' for result in left]


def _newest_first(result: Result):
  return -result.date.timestamp(), result.file


def _named(figure, result):
  """A result as its module draws it: with the paper's name, and the thresholds of the figure."""
  content = result.content | {'model': result.published.name}
  if 'family' in content:
    content['family'] = result.published.name.split('-')[0]
  if 'epsilon' in figure:
    place = content['epsilons'].index(figure['epsilon'])
    content |= {'epsilons': [figure['epsilon']], 'sink_1': [content['sink_1'][place]]}
  if 'domains' in content:  # a dollar begins a formula in a picture
    content['domains'] = [printable(name, _LABEL).replace('$', r'\$')
                          for name in content['domains']]
  return content


def _note(figure, shown, beside):
  files = listed(list(dict.fromkeys(result.file for result in shown)))
  lines = [f'Ours, of {files}: {described(shown[0])}']
  apart = list(dict.fromkeys(words for result in shown for words in differences(result)))
  lines += [f'Not the paper\'s protocol: {", ".join(apart)}'] if apart else []
  lines += [f'{result.published.name}: {words}' for result in shown
            for words in other_model(result)]
  if not apart:
    lines += dict.fromkeys(words for result in shown for words in remarks(result))
  lines += [f'Not drawn with these: {listed(beside)}'] if beside else []
  return '. '.join(line[:1].upper() + line[1:] for line in lines) + '.'
