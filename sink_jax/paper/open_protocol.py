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
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.inputs import KINDS
from sink_jax.io.terminal import short
from sink_jax.paper.numbers import LENGTH, PILE, same_bos
from sink_jax.pretrained.hub import Published
from sink_jax.report.jsontext import UNWRITTEN

CRITERION = (
    'Open models are compared where inputs, T, epsilon, the number of sequences, BOS and dtype are '
    "the paper's and the model has its size; what is of other text is marked.")
_TEXT = 'probe_valid_natural.jsonl'
_SIZE = 0.15  # by which the number of parameters may differ from the nominal one
# Bounds that keep a picture drawable and a computation finite, far above what is measured.
_LARGEST = 1e30
_LONGEST = 2048  # entries of a list
_CHARACTERS = 500  # of a text


@dataclasses.dataclass(frozen=True)
class Field:
  """A number from low to high, a text, or nested lists of them.

  axes: a letter per level of lists; levels with the same letter have the same length, one or more,
  or none for X. kind: 'number', 'whole number' or 'text'.
  """

  axes: str = ''
  low: float = -_LARGEST
  high: float = _LARGEST
  kind: str = 'number'


@dataclasses.dataclass(frozen=True)
class Items:
  """A list of at least one and at most `most` objects with these fields."""

  fields: _Fields
  most: int


# By name, dots between those of nested objects; one that ends in '?' may be missing or null.
_Fields: TypeAlias = 'Mapping[str, Field | Items]'


@dataclasses.dataclass(frozen=True)
class Expected:
  """The fields of an analysis's results, and how the paper made its inputs.

  None: any value will do, as where a figure is about it or the paper does not say. options: of the
  command, where its defaults are others.
  """

  fields: _Fields
  kind: str | None = 'natural'
  sequences: int | None = 100
  length: int | None = LENGTH
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
# Of every result.
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
_NORMS = {'hidden': 'M', 'key': 'N', 'value': 'N'}
_RATIO = 1e-30  # its logarithm is taken
# The analyses that a table or figure of the paper is about.
EXPECTED = {
    'kinds': Expected({'epsilon': _share(), 'inputs.kinds': Items(_INPUTS, len(KINDS)),
                       **{f'sink_1.{kind}?': _percent() for kind in KINDS}}, kind=None),
    'chat': Expected(_RATE),
    'positions': Expected({'epsilon': _share(), 'rows': Items(
        {'change': _words(), 'position?': _COUNT, 'sink_1': _percent(), 'sink_t?': _percent()},
        _LONGEST)}, kind='repeat'),
    'lengths': Expected({'lengths': _whole('L', 1, 1e9), 'epsilons': _share('E'),
                         'sink': _percent('ELK')}, length=None),
    'scale': Expected(_SCALE),
    'hellaswag': Expected({
        **_SCALE, **dict.fromkeys(('acc', 'acc_norm', 'acc_stderr', 'acc_norm_stderr'), _percent()),
        'questions': _COUNT, 'hellaswag.bos': _words(), 'hellaswag.limit?': _COUNT}),
    # A domain may have fewer texts than are asked for: `_domains` looks at their numbers.
    'domains': Expected(
        {'epsilons': _share('E'), 'domains': _words('D'), 'missing': _words('X'),
         'sequences': _whole('D', 1, 1e9), 'sink_1': _percent('ED')}, sequences=None,
        options='--source="Jsonl(path=\'pile.jsonl\', domain_field=\'meta.pile_set_name\')"'),
    'heads': Expected({**_RATE, 'layers': _BLOCKS, 'importance': _importance('NH')}),
    'maps': Expected({'heads': Items({**_HEAD, 'map': Field('TT'), 'raw_map?': Field('TT')}, 12)},
                     sequences=None),
    'norms': Expected({'layers': _BLOCKS, **{
        f'{kind}.{name}': Field(axis, low) for kind, axis in _NORMS.items()
        for name, low in (('first', 0), ('others', 0), ('ratio', _RATIO))}}),
    'angles': Expected({
        'layers': _BLOCKS, 'importance': _importance('NH'),
        **{f'{name}_{key}': Field('NH') for name in _ANGLES for key in ('first', 'others')},
        'maps': Items(_HEAD | dict.fromkeys(_ANGLES, Field('TT')), 8)}),
    # Figure 12 of StreamingLLM (Xiao et al. 2023), which the report has beside the paper's own.
    'last_query': Expected(
        {'length': _whole(low=1, high=1e9), 'layers': _BLOCKS, 'sequences': _COUNT,
         'mean': _share('N'), 'deviation': _share('N')}, sequences=256, length=4096,
        options='--sequences=256'),
}


def check_result(analysis: str, result: Mapping[str, Any]) -> None:
  """Checks the fields of a result of one of the analyses in `EXPECTED`.

  Raises:
    ValueError: a field is missing or out of its range or shape; names the first such field.
  """
  _check(result, {**_SHARED, **EXPECTED[analysis].fields}, {}, '')


def _check(value: Any, field: _Fields | Items | Field, sizes: dict[str, int], where: str) -> None:
  """sizes: {axis: length} as the lists before have it; those of this value are added."""
  if isinstance(field, Mapping):
    for name, inner in field.items():
      *outer, last = name.rstrip('?').split('.')
      holder = value
      for key in outer:
        holder = holder.get(key)
        if not isinstance(holder, dict):
          raise ValueError(f'{where}{key} is no object')
      if holder.get(last) is not None or not name.endswith('?'):
        _check(holder.get(last), inner, sizes, where + name.rstrip('?'))
  elif isinstance(field, Items):
    if not (isinstance(value, list) and 0 < len(value) <= field.most
            and all(isinstance(item, dict) for item in value)):
      raise ValueError(f'{where} is no list of 1 to {field.most} objects')
    for i, item in enumerate(value):
      # The lengths of axes are handed on: all maps of a result have as many tokens.
      _check(item, field.fields, sizes, f'{where}[{i}].')
  elif field.axes:
    axis, least = field.axes[0], 0 if field.axes[0] == 'X' else 1
    if not isinstance(value, list) or not least <= len(value) <= _LONGEST:
      raise ValueError(f'{where} is no list of {least} to {_LONGEST} entries')
    # The first list along an axis decides its length for all others of the result.
    if sizes.setdefault(axis, len(value)) != len(value):
      raise ValueError(f'{where} has {len(value)} entries in place of {sizes[axis]}')
    inner = dataclasses.replace(field, axes=field.axes[1:])
    for item in value:
      _check(item, inner, sizes, where)
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
  """A checked result of an analysis of one of the paper's models, on one kind of inputs.

  file: that it is from. checkpoint, inputs: what the file says of them. content: all of it. date:
  when the file was written, in seconds.
  """

  analysis: str
  file: str
  model: Published
  checkpoint: Mapping[str, Any]
  inputs: Mapping[str, Any]
  content: Mapping[str, Any] = dataclasses.field(metadata=UNWRITTEN)
  date: float = dataclasses.field(metadata=UNWRITTEN)

  @property
  def differences(self) -> list[str]:
    """In what it is not made as the paper's, in words."""
    inputs, options, expected = self.inputs, self.content['options'], EXPECTED[self.analysis]
    compared = [('inputs', inputs['kind'], expected.kind),
                ('sequences', inputs['sequences'], expected.sequences),
                ('T =', inputs['length'], expected.length),
                ('epsilon', self.content.get('epsilon'),
                 EPSILON if 'epsilon' in expected.fields else None),
                ('dtype', options['dtype'], 'float32')]
    words = {f'{name} {printable(actual)} instead of {wanted}':
             wanted is not None and actual != wanted for name, actual, wanted in compared}
    bos, limit = self._asked
    chosen = any(options.get(key) is not None for key in ('layers', 'heads'))
    words |= {
        f'BOS protocol {printable(inputs["bos"])}': not same_bos(self.content['inputs']),
        f'{limit} questions of HellaSwag instead of all': limit is not None,
        f'BOS protocol {printable(bos)} of the questions': bos != 'none',
        'chosen blocks or heads instead of all': chosen and self.analysis == 'last_query'}
    return _that_apply(words | (_domains(self.content) if self.analysis == 'domains' else {}))

  @property
  def other_model(self) -> list[str]:
    """A line where its size shows that the model is not the paper's, whatever its name."""
    size, nominal = self.checkpoint['parameters'], self.model.billions * 1e9
    # A folder may have any name; and the nominal size is a rounded one.
    if size is None or abs(size / nominal - 1) <= _SIZE:
      return []
    return [f'another model of that name: {short(size, 2)} parameters instead of '
            f'{short(nominal, 2)}']

  @property
  def apart(self) -> list[str]:
    """Why it is not compared with the paper's; empty where it is."""
    return self.differences + self.other_model

  @property
  def rank(self) -> tuple[int, float, str]:
    """What says most about the paper's numbers first, and of equals the newest."""
    return len(self.apart), -self.date, self.file

  @property
  def remarks(self) -> list[str]:
    """What is to be said of it if it is made as the paper's."""
    source, checkpoint = self.inputs['source'] or '', self.checkpoint
    return _that_apply({
        # The official repository names this file but does not have it, so that most results are of
        # other text: a remark, and no difference.
        f'other text, {printable(source or "of an unknown source")}':
            self.inputs['kind'] == 'natural' and _TEXT not in source,
        'the file does not say how many parameters the model has': checkpoint['parameters'] is None,
        f'revision {printable(checkpoint["revision"], 12)} of the hub':
            checkpoint['revision'] == self.content['model']})

  @property
  def described(self) -> str:
    """The inputs of a figure in words."""
    inputs, content = self.inputs, self.content
    sequences = (f'up to {max(content["sequences"])} sequences of a domain'
                 if self.analysis == 'domains' else f'{inputs["sequences"]} sequences')
    epsilons = content.get('epsilons') or filter(None, [content.get('epsilon')])
    epsilon = ', '.join(f'{value:g}' for value in epsilons)
    return ', '.join(filter(None, [
        f'{printable(inputs["kind"])} inputs', sequences,
        f'T = {inputs["length"]}' if self.analysis != 'lengths' else '',
        f'epsilon {epsilon}' if epsilon else '',
        f'BOS protocol {printable(inputs["bos"])}', content['options']['dtype']]))

  @property
  def alike(self) -> tuple:
    """Results that are equal in this can be drawn together."""
    # Lines of one picture are compared by eye, so all that the inputs depend on has to agree.
    options = self.content['options']
    return (self.described, self.inputs['source'], self._asked,
            str([self.content.get('lengths'), options.get('layers'), options.get('heads')]))

  @property
  def _asked(self) -> tuple[str, int | None]:
    """The BOS protocol of questions of HellaSwag, and to how many they were limited."""
    if self.analysis != 'hellaswag':
      return 'none', None
    asked = self.content['hellaswag']
    return asked['bos'], asked.get('limit')


def results_of(analysis: str, file: str, date: float, model: Published, content: dict[str, Any]
               ) -> list[Result]:
  """The results in a checked content, one for each kind of inputs."""
  parts = [content] if analysis != 'kinds' else [
      content | {'inputs': inputs, 'sink_1': content['sink_1'].get(inputs['kind'])}
      for inputs in content['inputs']['kinds']]
  pick = lambda of, *keys: {key: of.get(key) for key in keys}
  return [Result(
      analysis, file, model,
      pick(part['checkpoint'], 'folder', 'revision', 'dtype', 'parameters'),
      pick(part['inputs'], 'kind', 'sequences', 'length', 'source') | {
          'bos': part['inputs']['bos']['protocol']}, part, date) for part in parts]


def _that_apply(words: Mapping[str, bool]) -> list[str]:
  return [each for each, applies in words.items() if applies]


def _domains(content: Mapping[str, Any]) -> dict[str, bool]:
  """In what the domains of a corpus are not the Pile's, and whether they are not."""
  # 'Pile-CC', 'pile_cc' and 'Pile CC' are one domain.
  key = lambda name: ''.join(filter(str.isalnum, name)).casefold()
  there, least = set(map(key, content['domains'])), min(content['sequences'])
  missing = [name for name in PILE if key(name) not in there]
  # A list of all seventeen would say less than this.
  if len(missing) == len(PILE):
    return {"domains of another corpus than the Pile's": True}
  return {f'without the domains {", ".join(missing)}': bool(missing),
          f'{least} sequences of a domain instead of 100': least < 100}
