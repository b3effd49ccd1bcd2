"""What the paper did with open models, and in what a result of ours differs from it.

Section 3: 100 sequences of 64 tokens, epsilon 0.3, float32 (the release loads models in the
default of PyTorch), text as the tokenizer begins it, and other tokens without BOS. Its text is
the file below; rates of other text are compared all the same, and marked.
"""

from __future__ import annotations

import dataclasses

from sink_jax.evaluate.sinks import EPSILON
from sink_jax.paper.analysed import Result, printable
from sink_jax.paper.numbers import LENGTH, PILE, same_bos

CRITERION = (
    'Open models are compared where inputs, T, epsilon, the number of sequences, BOS and dtype are '
    "the paper's and the model has its size; what is of other text is marked.")
_TEXT = 'probe_valid_natural.jsonl'
_DTYPE = 'float32'
_SIZE = 0.15  # by which the number of parameters may differ from the nominal one
_SOURCE = 80  # characters


@dataclasses.dataclass(frozen=True)
class Protocol:
  """None: whatever the result has, as where a figure is about it or the paper does not say."""

  kind: str = 'natural'
  sequences: int | None = 100
  length: int | None = LENGTH
  epsilon: float | None = EPSILON
  options: str = ''  # of the command, where its defaults are others


PROTOCOLS = {
    'kinds': Protocol(), 'chat': Protocol(), 'scale': Protocol(), 'hellaswag': Protocol(),
    'heads': Protocol(), 'positions': Protocol('repeat'), 'norms': Protocol(epsilon=None),
    'angles': Protocol(epsilon=None), 'lengths': Protocol(length=None, epsilon=None),
    'domains': Protocol(sequences=None, epsilon=None, options=(
        '--source="Jsonl(path=\'pile.jsonl\', domain_field=\'meta.pile_set_name\')"')),
    'maps': Protocol(sequences=None, epsilon=None),
    'last_query': Protocol(sequences=256, length=4096, epsilon=None, options='--sequences=256'),
}


def inputs_of(result: Result, kind: str | None) -> dict | None:
  """How the inputs of a kind were made; None where the result has none of that kind."""
  inputs = result.content['inputs']
  if result.analysis != 'kinds':
    return inputs
  return next((own for own in inputs['kinds'] if own['kind'] == kind), None)


def checkpoint_of(result: Result) -> dict:
  """Which checkpoint a result is of: folder, revision, dtype and number of parameters."""
  own = result.content['checkpoint']
  return {key: own.get(key) for key in ('folder', 'revision', 'dtype', 'parameters')}


def differences(result: Result, kind: str | None = None) -> list[str]:
  """In what a result is not made as the paper's, in words; kind: of the inputs, if not usual."""
  protocol, inputs = PROTOCOLS[result.analysis], inputs_of(result, kind)
  expected = dataclasses.replace(protocol, kind=kind or protocol.kind)
  content = result.content
  found = [f'{name} {_value(own)} instead of {_value(theirs)}' for name, own, theirs in (
      ('inputs', inputs['kind'], expected.kind),
      ('sequences', inputs['sequences'], expected.sequences),
      ('T =', inputs['length'], expected.length),
      ('epsilon', content.get('epsilon'), expected.epsilon),
      ('dtype', content['options']['dtype'], _DTYPE)) if theirs is not None and own != theirs]
  if not same_bos(inputs):
    found.append(f'BOS protocol {_value(inputs["bos"]["protocol"])}')
  return found + _OF_ANALYSES.get(result.analysis, lambda result: [])(result)


def other_model(result: Result) -> list[str]:
  """Says that a model is not the paper's, whatever its name, where its size shows that."""
  size, nominal = result.content['checkpoint'].get('parameters'), result.published.billions * 1e9
  if size is None or abs(size / nominal - 1) <= _SIZE:
    return []
  return [f'another model of that name: {short(size)} parameters instead of {short(nominal)}']


def remarks(result: Result, kind: str | None = None) -> list[str]:
  """What is to be said of a result that is made as the paper's."""
  inputs, own, found = inputs_of(result, kind), result.content['checkpoint'], []
  source = inputs.get('source') or ''
  if inputs['kind'] == 'natural' and _TEXT not in source:
    found.append(f'other text, {printable(source or "of an unknown source", _SOURCE)}')
  if own.get('parameters') is None:
    found.append('the file does not say how many parameters the model has')
  if own.get('revision') == result.content.get('model'):
    found.append(f'revision {printable(own["revision"], 12)} of the hub')
  return found


def described(result: Result) -> str:
  """The inputs of a figure in words."""
  inputs, content = result.content['inputs'], result.content
  epsilons = content.get('epsilons') or [content.get('epsilon')]
  sequences = (f'up to {max(content["sequences"])} sequences of a domain'
               if result.analysis == 'domains' else f'{inputs["sequences"]} sequences')
  parts = [f'{_value(inputs["kind"])} inputs', sequences,
           f'T = {inputs["length"]}' if result.analysis != 'lengths' else '',
           f'epsilon {", ".join(f"{e:g}" for e in epsilons)}' if epsilons[0] else '',
           f'BOS protocol {_value(inputs["bos"]["protocol"])}', content['options']['dtype']]
  return ', '.join(filter(None, parts))


def alike(result: Result) -> tuple:
  """Results that are equal in this can be drawn together."""
  content = result.content
  own = content.get('hellaswag', {})
  return (described(result), content['inputs'].get('source'), str(content.get('lengths')),
          str(own.get('bos')), str(own.get('limit')),
          str(content['options'].get('layers')), str(content['options'].get('heads')))


def short(number: float) -> str:
  """1557611200 -> '1.6 B'."""
  for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if number >= size:
      return f'{number / size:.2g} {letter}' if number < 100 * size else (
          f'{number / size:.0f} {letter}')
  return f'{number:.0f}'


def _value(value):
  return printable(value, _SOURCE)


def _hellaswag(result):
  own, found = result.content['hellaswag'], []
  if own.get('limit') is not None:
    found.append(f'{own["limit"]} questions of HellaSwag instead of all')
  if own['bos'] != 'none':
    found.append(f'BOS protocol {_value(own["bos"])} of the questions')
  return found


def _domains(result):
  content, key = result.content, lambda name: ''.join(filter(str.isalnum, name)).casefold()
  own = set(map(key, content['domains']))
  missing = [name for name in PILE if key(name) not in own]
  if len(missing) == len(PILE):
    return ["domains of another corpus than the Pile's"]
  found = [f'without the domains {", ".join(missing)}'] if missing else []
  if min(content['sequences']) < 100:
    found.append(f'{min(content["sequences"])} sequences of a domain instead of 100')
  return found


def _last_query(result):
  options = result.content['options']
  chosen = options.get('layers') is not None or options.get('heads') is not None
  return ['chosen blocks or heads instead of all'] if chosen else []


_OF_ANALYSES = {'hellaswag': _hellaswag, 'domains': _domains, 'last_query': _last_query}
