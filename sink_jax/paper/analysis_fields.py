"""What a result of an analysis must contain before a report reads or draws it.

A file of results may come from anywhere, so that every number is checked for its range, and
every list for its shape, before anything is computed from it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from sink_jax.data.inputs import KINDS

# Bounds that keep a picture drawable and a computation finite, far above what is measured.
_LARGEST = 1e30
_LONGEST = 2048  # entries of a list
_CHARACTERS = 500  # of a text


@dataclasses.dataclass(frozen=True)
class Numbers:
  """A number from low to high, or nested lists of such numbers.

  axes: a letter per level of lists; levels with the same letter have the same length, one or more.
  """

  axes: str = ''
  low: float = -_LARGEST
  high: float = _LARGEST
  whole: bool = False
  least: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class Words:
  """A text, or a list of at least so many texts; axes as in `Numbers`."""

  axes: str = ''
  least: int = 1


@dataclasses.dataclass(frozen=True)
class Items:
  """A list of at least one and at most `most` objects with these fields."""

  fields: Mapping[str, Numbers | Words | Items]
  most: int


_percent = functools.partial(Numbers, low=0, high=100.001)  # 100 * a mean in float32 may round up
_share = functools.partial(Numbers, low=0, high=1)
_importance = functools.partial(Numbers, low=0, high=_LONGEST)  # late keys of short texts: above 1
_COUNT = Numbers(low=0, high=1e15, whole=True)
_NAMES = Words('D')
_BLOCKS = Numbers('N', 0, 1e6, whole=True)
_INPUTS = {'kind': Words(), 'sequences': _COUNT, 'length': _COUNT, 'bos.protocol': Words(),
           'source?': Words()}
# Of every result. A name that ends in '?' may be missing or null, one with dots is nested.
_SHARED = {**{f'inputs.{name}': field for name, field in _INPUTS.items()},
           'checkpoint.folder?': Words(), 'checkpoint.step?': _COUNT,
           'checkpoint.parameters?': _COUNT, 'checkpoint.revision?': Words(),
           'checkpoint.dtype': Words(), 'options.dtype': Words()}
_SCALE = {'epsilon': _share(), 'parameters': Numbers(low=1, high=1e15, whole=True),
          'sink_1': _percent()}
# Axes: N blocks, M hidden states (one more, of the embedding), H heads, T tokens, L lengths,
# E thresholds, K positions, D domains, X domains that are missing.
_HEAD = {'layer': _COUNT, 'head': _COUNT, 'importance': _importance()}
_NORMS = Numbers('N', 0, _LARGEST)
_HIDDEN = Numbers('M', 0, _LARGEST)
_RATIO = 1e-30  # its logarithm is taken
# Of the analyses that a table or figure of the paper is about.
FIELDS = {
    'kinds': {'epsilon': _share(), 'inputs.kinds': Items(_INPUTS, len(KINDS)),
              **{f'sink_1.{kind}?': _percent() for kind in KINDS}},
    'chat': {'epsilon': _share(), 'sink_1': _percent()},
    'positions': {'epsilon': _share(), 'rows': Items(
        {'change': Words(), 'position?': _COUNT, 'sink_1': _percent(), 'sink_t?': _percent()},
        _LONGEST)},
    'lengths': {'lengths': Numbers('L', 1, 1e9, whole=True), 'epsilons': _share('E'),
                'sink': _percent('ELK')},
    'scale': _SCALE,
    'hellaswag': {**_SCALE, **dict.fromkeys(
        ('acc', 'acc_norm', 'acc_stderr', 'acc_norm_stderr'), _percent()),
                  'questions': _COUNT, 'hellaswag.bos': Words(), 'hellaswag.limit?': _COUNT},
    'domains': {'epsilons': _share('E'), 'domains': _NAMES, 'missing': Words('X', 0),
                'sequences': Numbers('D', 1, 1e9, whole=True), 'sink_1': _percent('ED')},
    'heads': {'epsilon': _share(), 'sink_1': _percent(), 'layers': _BLOCKS,
              'importance': _importance('NH')},
    'maps': {'heads': Items({**_HEAD, 'map': Numbers('TT'), 'raw_map?': Numbers('TT')}, 12)},
    'norms': {'layers': _BLOCKS, **{f'{kind}.{name}': field for kind, field in (
        ('hidden', _HIDDEN), ('key', _NORMS), ('value', _NORMS)) for name, field in (
            ('first', field), ('others', field),
            ('ratio', dataclasses.replace(field, low=_RATIO)))}},
    'angles': {'layers': _BLOCKS, 'importance': _importance('NH'),
               **{f'{name}_{key}': Numbers('NH') for name in ('cosine', 'norm_product', 'score')
                  for key in ('first', 'others')},
               'maps': Items({**_HEAD, 'cosine': Numbers('TT'), 'norm_product': Numbers('TT'),
                              'score': Numbers('TT')}, 8)},
    'last_query': {'length': Numbers(low=1, high=1e9, whole=True), 'layers': _BLOCKS,
                   'sequences': _COUNT, 'mean': _share('N'), 'deviation': _share('N')},
}


def check_result(analysis: str, result: Mapping[str, Any]) -> None:
  """Checks the fields of a result of one of the analyses in `FIELDS`.

  Raises:
    ValueError: a field is missing or out of its range or shape; names the first such field.
  """
  _check(result, _SHARED | FIELDS[analysis], {}, prefix='')


def _check(result: Mapping[str, Any], fields: Mapping[str, Numbers | Words | Items],
           sizes: dict[str, int], prefix: str) -> None:
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
    if isinstance(field, Items):
      if not (isinstance(value, list) and 0 < len(value) <= field.most
              and all(isinstance(item, dict) for item in value)):
        raise ValueError(f'{where} is no list of 1 to {field.most} objects')
      for i, item in enumerate(value):
        # The lengths of axes are handed on: all maps of a result have as many tokens.
        _check(item, field.fields, sizes, f'{where}[{i}].')
    else:
      _check_nested(value, field, field.axes, sizes, where)


def _check_nested(value: object, field: Numbers | Words, axes: str, sizes: dict[str, int],
                  where: str) -> None:
  if axes:
    if not isinstance(value, list) or not field.least <= len(value) <= _LONGEST:
      raise ValueError(f'{where} is no list of {field.least} to {_LONGEST} entries')
    # The first list along an axis decides its length for all others of the result.
    if sizes.setdefault(axes[0], len(value)) != len(value):
      raise ValueError(f'{where} has {len(value)} entries in place of {sizes[axes[0]]}')
    for item in value:
      _check_nested(item, field, axes[1:], sizes, where)
  elif isinstance(field, Words):
    if not isinstance(value, str) or len(value) > _CHARACTERS:
      raise ValueError(f'{where} is no text of at most {_CHARACTERS} characters')
  elif (isinstance(value, bool)  # which is an int to Python
        or not isinstance(value, int if field.whole else (int, float))
        or not field.low <= value <= field.high):
    kind = 'whole number' if field.whole else 'number'
    raise ValueError(f'{where} is no {kind} from {field.low:g} to {field.high:g}')
