"""How the paper measured open models, and in what a result differs from that.

Section 3: 100 sequences of 64 tokens, epsilon 0.3, float32 (the official implementation,
sail-sg/Attention-Sink, loads models in the default of PyTorch), text as the tokenizer begins it,
and other tokens without BOS. Its text is the file below; rates of other text are compared all the
same, and marked.
"""

from __future__ import annotations

import dataclasses
import functools

from sink_jax.evaluate.threshold import EPSILON
from sink_jax.io.tables import short
from sink_jax.paper.analysed import Result, printable
from sink_jax.paper.numbers import LENGTH, PILE, same_bos

CRITERION = (
    'Open models are compared where inputs, T, epsilon, the number of sequences, BOS and dtype are '
    "the paper's and the model has its size; what is of other text is marked.")
_TEXT = 'probe_valid_natural.jsonl'
_DTYPE = 'float32'
_SIZE = 0.15  # by which the number of parameters may differ from the nominal one
_value = functools.partial(printable, most=80)  # characters of what a file says


@dataclasses.dataclass(frozen=True)
class Protocol:
  """How the paper made the inputs of an analysis.

  None: any value will do, as where a figure is about it or the paper does not say.
  """

  kind: str = 'natural'
  sequences: int | None = 100
  length: int | None = LENGTH
  epsilon: float | None = EPSILON
  options: str = ''  # of the command, where its defaults are others


PROTOCOLS = {
    'kinds': Protocol(), 'chat': Protocol(), 'scale': Protocol(), 'hellaswag': Protocol(),
    'heads': Protocol(), 'positions': Protocol('repeat'), 'norms': Protocol(epsilon=None),
    'angles': Protocol(epsilon=None), 'lengths': Protocol(length=None, epsilon=None),
    # A domain may have fewer texts than are asked for: `_domains` looks at their numbers.
    'domains': Protocol(sequences=None, epsilon=None, options=(
        '--source="Jsonl(path=\'pile.jsonl\', domain_field=\'meta.pile_set_name\')"')),
    'maps': Protocol(sequences=None, epsilon=None),
    # Figure 12 of StreamingLLM (Xiao et al. 2023), which the report has beside the paper's own.
    'last_query': Protocol(sequences=256, length=4096, epsilon=None, options='--sequences=256'),
}


def differences(result: Result, kind: str | None = None) -> list[str]:
  """In what a result is not made as the paper's, in words; kind: of the inputs, if not usual."""
  expected, inputs, content = PROTOCOLS[result.analysis], result.inputs(kind), result.content
  words = [f'{name} {_value(actual)} instead of {_value(wanted)}' for name, actual, wanted in (
      ('inputs', inputs['kind'], kind or expected.kind),
      ('sequences', inputs['sequences'], expected.sequences),
      ('T =', inputs['length'], expected.length),
      ('epsilon', content.get('epsilon'), expected.epsilon),
      ('dtype', content['options']['dtype'], _DTYPE)) if wanted is not None and actual != wanted]
  if not same_bos(inputs):
    words.append(f'BOS protocol {_value(inputs["bos"]["protocol"])}')
  return words + _OF_ANALYSES.get(result.analysis, lambda result: [])(result)


def other_model(result: Result) -> list[str]:
  """A line where the size of a model shows that it is not the paper's, whatever its name."""
  size, nominal = result.content['checkpoint'].get('parameters'), result.model.billions * 1e9
  # A folder may have any name; and the nominal size is a rounded one.
  if size is None or abs(size / nominal - 1) <= _SIZE:
    return []
  return [f'another model of that name: {short(size, 2)} parameters instead of {short(nominal, 2)}']


def remarks(result: Result, kind: str | None = None) -> list[str]:
  """What is to be said of a result that is made as the paper's."""
  inputs, checkpoint = result.inputs(kind), result.content['checkpoint']
  lines, source = [], inputs.get('source') or ''
  # The official repository names this file but does not have it, so that most results are of other
  # text: a remark, and no difference.
  if inputs['kind'] == 'natural' and _TEXT not in source:
    lines.append(f'other text, {_value(source or "of an unknown source")}')
  if checkpoint.get('parameters') is None:
    lines.append('the file does not say how many parameters the model has')
  if checkpoint.get('revision') == result.content.get('model'):
    lines.append(f'revision {printable(checkpoint["revision"], 12)} of the hub')
  return lines


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
  questions = content.get('hellaswag', {})
  # Lines of one picture are compared by eye, so all that the inputs depend on has to agree.
  return (described(result), content['inputs'].get('source'), str(content.get('lengths')),
          str(questions.get('bos')), str(questions.get('limit')),
          str(content['options'].get('layers')), str(content['options'].get('heads')))


def _hellaswag(result: Result) -> list[str]:
  questions, lines = result.content['hellaswag'], []
  if questions.get('limit') is not None:
    lines.append(f'{questions["limit"]} questions of HellaSwag instead of all')
  if questions['bos'] != 'none':
    lines.append(f'BOS protocol {_value(questions["bos"])} of the questions')
  return lines


def _domains(result: Result) -> list[str]:
  # 'Pile-CC', 'pile_cc' and 'Pile CC' are one domain.
  content, key = result.content, lambda name: ''.join(filter(str.isalnum, name)).casefold()
  there = set(map(key, content['domains']))
  missing = [name for name in PILE if key(name) not in there]
  # A list of all seventeen would say less than this.
  if len(missing) == len(PILE):
    return ["domains of another corpus than the Pile's"]
  lines = [f'without the domains {", ".join(missing)}'] if missing else []
  if min(content['sequences']) < 100:
    lines.append(f'{min(content["sequences"])} sequences of a domain instead of 100')
  return lines


def _last_query(result: Result) -> list[str]:
  options = result.content['options']
  chosen = options.get('layers') is not None or options.get('heads') is not None
  return ['chosen blocks or heads instead of all'] if chosen else []


# Differences that only some analyses can have.
_OF_ANALYSES = {'hellaswag': _hellaswag, 'domains': _domains, 'last_query': _last_query}
