"""Results of analyses of open models: what they must contain, and how they differ from the paper's.

A file of results may come from anywhere, so that every number is checked for its range, and every
list for its shape, before anything is computed from it.

The paper's protocol is that of Section 3: 100 sequences of 64 tokens, epsilon 0.3, float32 (the
official implementation, sail-sg/Attention-Sink, loads models in the default of PyTorch), text as
the tokenizer begins it, and other tokens without BOS. Its text is the file below; rates of other
text are compared all the same, and marked.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Mapping
from typing import Any

from sink_jax.data.inputs import KINDS
from sink_jax.evaluate.threshold import EPSILON
from sink_jax.io.tables import short
from sink_jax.paper.numbers import LENGTH, PILE, same_bos
from sink_jax.pretrained.hub import Published

CRITERION = (
    'Open models are compared where inputs, T, epsilon, the number of sequences, BOS and dtype are '
    "the paper's and the model has its size; what is of other text is marked.")
_TEXT = 'probe_valid_natural.jsonl'
_DTYPE = 'float32'
_SIZE = 0.15  # by which the number of parameters may differ from the nominal one
# Bounds that keep a picture drawable and a computation finite, far above what is measured.
_LARGEST = 1e30
_LONGEST = 2048  # entries of a list
_CHARACTERS = 500  # of a text


@dataclasses.dataclass(frozen=True)
class Field:
  """A number from low to high, a text, or nested lists of them.

  axes: a letter per level of lists; levels with the same letter have the same length, at least
  `least`. kind: 'number', 'whole number' or 'text'.
  """

  axes: str = ''
  low: float = -_LARGEST
  high: float = _LARGEST
  kind: str = 'number'
  least: int = 1


@dataclasses.dataclass(frozen=True)
class Items:
  """A list of at least one and at most `most` objects with these fields."""

  fields: Mapping[str, Field | Items]
  most: int


@dataclasses.dataclass(frozen=True)
class Expected:
  """The fields of an analysis's results, and how the paper made its inputs.

  None: any value will do, as where a figure is about it or the paper does not say. options: of the
  command, where its defaults are others.
  """

  fields: Mapping[str, Field | Items]
  kind: str = 'natural'
  sequences: int | None = 100
  length: int | None = LENGTH
  epsilon: float | None = EPSILON
  options: str = ''


_percent = functools.partial(Field, low=0, high=100.001)  # 100 * a mean in float32 may round up
_share = functools.partial(Field, low=0, high=1)
_importance = functools.partial(Field, low=0, high=_LONGEST)  # late keys of short texts: above 1
_whole = functools.partial(Field, kind='whole number')
_words = functools.partial(Field, kind='text')
_COUNT = _whole(low=0, high=1e15)
_BLOCKS = _whole('N', 0, 1e6)
_INPUTS = {'kind': _words(), 'sequences': _COUNT, 'length': _COUNT, 'bos.protocol': _words(),
           'source?': _words()}
# Of every result. A name that ends in '?' may be missing or null, one with dots is nested.
_SHARED = {**{f'inputs.{name}': field for name, field in _INPUTS.items()},
           'checkpoint.folder?': _words(), 'checkpoint.step?': _COUNT,
           'checkpoint.parameters?': _COUNT, 'checkpoint.revision?': _words(),
           'checkpoint.dtype': _words(), 'options.dtype': _words(),
           'epsilon?': _share(), 'epsilons?': _share('E')}
_RATE = {'epsilon': _share(), 'sink_1': _percent()}
_SCALE = {**_RATE, 'parameters': _whole(low=1, high=1e15)}
# Axes: N blocks, M hidden states (one more, of the embedding), H heads, T tokens, L lengths,
# E thresholds, K positions, D domains, X domains that are missing.
_HEAD = {'layer': _COUNT, 'head': _COUNT, 'importance': _importance()}
_ANGLES = ('cosine', 'norm_product', 'score')
# The analyses that a table or figure of the paper is about.
EXPECTED = {
    'kinds': Expected({'epsilon': _share(), 'inputs.kinds': Items(_INPUTS, len(KINDS)),
                       **{f'sink_1.{kind}?': _percent() for kind in KINDS}}),
    'chat': Expected(_RATE),
    'positions': Expected({'epsilon': _share(), 'rows': Items(
        {'change': _words(), 'position?': _COUNT, 'sink_1': _percent(), 'sink_t?': _percent()},
        _LONGEST)}, 'repeat'),
    'lengths': Expected({'lengths': _whole('L', 1, 1e9), 'epsilons': _share('E'),
                         'sink': _percent('ELK')}, length=None, epsilon=None),
    'scale': Expected(_SCALE),
    'hellaswag': Expected({
        **_SCALE, **dict.fromkeys(('acc', 'acc_norm', 'acc_stderr', 'acc_norm_stderr'), _percent()),
        'questions': _COUNT, 'hellaswag.bos': _words(), 'hellaswag.limit?': _COUNT}),
    # A domain may have fewer texts than are asked for: `_domains` looks at their numbers.
    'domains': Expected(
        {'epsilons': _share('E'), 'domains': _words('D'), 'missing': _words('X', least=0),
         'sequences': _whole('D', 1, 1e9), 'sink_1': _percent('ED')}, sequences=None, epsilon=None,
        options='--source="Jsonl(path=\'pile.jsonl\', domain_field=\'meta.pile_set_name\')"'),
    'heads': Expected({**_RATE, 'layers': _BLOCKS, 'importance': _importance('NH')}),
    'maps': Expected({'heads': Items({**_HEAD, 'map': Field('TT'), 'raw_map?': Field('TT')}, 12)},
                     sequences=None, epsilon=None),
    'norms': Expected({'layers': _BLOCKS, **{
        f'{kind}.{name}': Field(axis, low) for kind, axis in (
            ('hidden', 'M'), ('key', 'N'), ('value', 'N')) for name, low in (
                ('first', 0), ('others', 0), ('ratio', 1e-30))}},  # its logarithm is taken
                      epsilon=None),
    'angles': Expected({
        'layers': _BLOCKS, 'importance': _importance('NH'),
        **{f'{name}_{key}': Field('NH') for name in _ANGLES for key in ('first', 'others')},
        'maps': Items(_HEAD | dict.fromkeys(_ANGLES, Field('TT')), 8)}, epsilon=None),
    # Figure 12 of StreamingLLM (Xiao et al. 2023), which the report has beside the paper's own.
    'last_query': Expected({
        'length': _whole(low=1, high=1e9), 'layers': _BLOCKS, 'sequences': _COUNT,
        'mean': _share('N'), 'deviation': _share('N')},
                           sequences=256, length=4096, epsilon=None, options='--sequences=256'),
}


def check_result(analysis: str, result: Mapping[str, Any]) -> None:
  """Checks the fields of a result of one of the analyses in `EXPECTED`.

  Raises:
    ValueError: a field is missing or out of its range or shape; names the first such field.
  """
  _check(result, {**_SHARED, **EXPECTED[analysis].fields}, {}, prefix='')


def _check(result: Mapping[str, Any], fields: Mapping[str, Field | Items], sizes: dict[str, int],
           prefix: str) -> None:
  """sizes: {axis: length} as the lists before have it; those of this result are added."""
  for name, field in fields.items():
    *outer, last = name.rstrip('?').split('.')
    where, value = prefix + name.rstrip('?'), result
    for key in outer:
      value = value.get(key)
      if not isinstance(value, dict):
        raise ValueError(f'{prefix}{key} is no object')
    value = value.get(last)
    if value is None and name.endswith('?'):
      continue
    if isinstance(field, Field):
      _check_nested(value, field, field.axes, sizes, where)
      continue
    if not (isinstance(value, list) and 0 < len(value) <= field.most
            and all(isinstance(item, dict) for item in value)):
      raise ValueError(f'{where} is no list of 1 to {field.most} objects')
    for i, item in enumerate(value):
      # The lengths of axes are handed on: all maps of a result have as many tokens.
      _check(item, field.fields, sizes, f'{where}[{i}].')


def _check_nested(value: object, field: Field, axes: str, sizes: dict[str, int], where: str
                  ) -> None:
  if axes:
    if not isinstance(value, list) or not field.least <= len(value) <= _LONGEST:
      raise ValueError(f'{where} is no list of {field.least} to {_LONGEST} entries')
    # The first list along an axis decides its length for all others of the result.
    if sizes.setdefault(axes[0], len(value)) != len(value):
      raise ValueError(f'{where} has {len(value)} entries in place of {sizes[axes[0]]}')
    for item in value:
      _check_nested(item, field, axes[1:], sizes, where)
  elif field.kind == 'text':
    if not isinstance(value, str) or len(value) > _CHARACTERS:
      raise ValueError(f'{where} is no text of at most {_CHARACTERS} characters')
  elif (isinstance(value, bool)  # which is an int to Python
        or not isinstance(value, int if field.kind == 'whole number' else (int, float))
        or not field.low <= value <= field.high):
    raise ValueError(f'{where} is no {field.kind} from {field.low:g} to {field.high:g}')


def printable(value: object, most: int = 80) -> str:
  """A text of a file in one line of printable characters, cut to at most so many."""
  # The text may be as large as its file, so it is cut first; to four times the length, as it loses
  # blanks and what cannot be printed.
  words = ' '.join(''.join(c if c.isprintable() else ' ' for c in str(value)[:4 * most]).split())
  return words if len(words) <= most else words[:most - 3] + '...'


@dataclasses.dataclass(frozen=True)
class Result:
  """A checked result of an analysis of one of the paper's models."""

  analysis: str
  file: str
  date: datetime.datetime
  model: Published
  content: Mapping[str, Any]

  @property
  def rank(self) -> tuple[float, str]:
    """Newest first."""
    return -self.date.timestamp(), self.file

  @property
  def checkpoint(self) -> dict[str, Any]:
    """Which checkpoint it is of."""
    return {key: self.content['checkpoint'].get(key)
            for key in ('folder', 'revision', 'dtype', 'parameters')}

  def inputs(self, kind: str | None = None) -> Mapping[str, Any]:
    """How the inputs of a kind were made; {} where the result has none of that kind."""
    inputs = self.content['inputs']
    if self.analysis != 'kinds':
      return inputs
    return next((item for item in inputs['kinds'] if item['kind'] == kind), {})

  def differences(self, kind: str | None = None) -> list[str]:
    """In what it is not made as the paper's, in words; kind: of the inputs, if not usual."""
    inputs, expected = self.inputs(kind), EXPECTED[self.analysis]
    compared = [('inputs', inputs['kind'], kind or expected.kind),
                ('sequences', inputs['sequences'], expected.sequences),
                ('T =', inputs['length'], expected.length),
                ('epsilon', self.content.get('epsilon'), expected.epsilon),
                ('dtype', self.content['options']['dtype'], _DTYPE)]
    words = [f'{name} {printable(actual)} instead of {wanted}' for name, actual, wanted in compared
             if wanted is not None and actual != wanted]
    bos, limit = self._questions
    return words + _that_apply({
        f'BOS protocol {printable(inputs["bos"]["protocol"])}': not same_bos(inputs),
        f'{limit} questions of HellaSwag instead of all': limit is not None,
        f'BOS protocol {printable(bos)} of the questions': bos != 'none',
        'chosen blocks or heads instead of all':
            self.analysis == 'last_query' and self._chosen != (None, None),
    }) + (_domains(self.content) if self.analysis == 'domains' else [])

  def other_model(self) -> list[str]:
    """A line where its size shows that the model is not the paper's, whatever its name."""
    size, nominal = self.checkpoint['parameters'], self.model.billions * 1e9
    # A folder may have any name; and the nominal size is a rounded one.
    if size is None or abs(size / nominal - 1) <= _SIZE:
      return []
    return [f'another model of that name: {short(size, 2)} parameters instead of '
            f'{short(nominal, 2)}']

  def remarks(self, kind: str | None = None) -> list[str]:
    """What is to be said of it if it is made as the paper's."""
    inputs, checkpoint = self.inputs(kind), self.checkpoint
    source = inputs.get('source') or ''
    return _that_apply({
        # The official repository names this file but does not have it, so that most results are of
        # other text: a remark, and no difference.
        f'other text, {printable(source or "of an unknown source")}':
            inputs['kind'] == 'natural' and _TEXT not in source,
        'the file does not say how many parameters the model has': checkpoint['parameters'] is None,
        f'revision {printable(checkpoint["revision"], 12)} of the hub':
            checkpoint['revision'] == self.content['model']})

  @property
  def described(self) -> str:
    """The inputs of a figure in words."""
    content, inputs = self.content, self.content['inputs']
    epsilons = content.get('epsilons') or filter(None, [content.get('epsilon')])
    epsilon = ', '.join(f'{value:g}' for value in epsilons)
    return ', '.join(filter(None, [
        f'{printable(inputs["kind"])} inputs',
        f'up to {max(content["sequences"])} sequences of a domain' if self.analysis == 'domains'
        else f'{inputs["sequences"]} sequences',
        f'T = {inputs["length"]}' if self.analysis != 'lengths' else '',
        f'epsilon {epsilon}' if epsilon else '',
        f'BOS protocol {printable(inputs["bos"]["protocol"])}', content['options']['dtype']]))

  @property
  def alike(self) -> tuple:
    """Results that are equal in this can be drawn together."""
    # Lines of one picture are compared by eye, so all that the inputs depend on has to agree.
    return (self.described, self.content['inputs'].get('source'), self._questions,
            str([self.content.get('lengths'), self._chosen]))

  @property
  def _questions(self) -> tuple[str, int | None]:
    """The BOS protocol of questions of HellaSwag, and to how many they were limited."""
    asked = self.content['hellaswag'] if self.analysis == 'hellaswag' else {'bos': 'none'}
    return asked['bos'], asked.get('limit')

  @property
  def _chosen(self) -> tuple[object, object]:
    """The blocks and heads that were asked for; None: all."""
    return self.content['options'].get('layers'), self.content['options'].get('heads')


def _that_apply(words: Mapping[str, bool]) -> list[str]:
  return [each for each, applies in words.items() if applies]


def _domains(content: Mapping[str, Any]) -> list[str]:
  """In what the domains of a corpus are not the Pile's."""
  # 'Pile-CC', 'pile_cc' and 'Pile CC' are one domain.
  key = lambda name: ''.join(filter(str.isalnum, name)).casefold()
  there, least = set(map(key, content['domains'])), min(content['sequences'])
  missing = [name for name in PILE if key(name) not in there]
  # A list of all seventeen would say less than this.
  if len(missing) == len(PILE):
    return ["domains of another corpus than the Pile's"]
  return _that_apply({f'without the domains {", ".join(missing)}': bool(missing),
                      f'{least} sequences of a domain instead of 100': least < 100})
