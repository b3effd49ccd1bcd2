"""JSON that every parser accepts and a person can read."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar('T')
# The metadata of a field of a dataclass that no JSON has, and no change of leaves reaches.
UNWRITTEN = {'written': False}


def to_json(value: Any) -> str:
  """A value as indented JSON; numbers that are not finite become null.

  A list or an object that holds no other is on one line. A dataclass is an object with its fields
  as keys, less those that are `UNWRITTEN`.
  """
  # Strict parsers, such as those of browsers, refuse the NaN that Python writes.
  text = json.dumps(finite(value), indent=1, allow_nan=False, default=_written)
  # A bracket at the end of a line opens a list or an object: within quotes JSON has no line break,
  # so that this neither matches the brackets of a string nor changes its blanks.
  return re.sub(r'([\[{])\n *([^\[\]{}]*)\n *([\]}])',
                lambda found: found[1] + re.sub(r'\n *', ' ', found[2]) + found[3], text) + '\n'


def from_json(text: str) -> Any:
  """The value of a JSON text, which may come from anywhere and is read strictly.

  Raises:
    ValueError: it is no JSON, nested too deeply, or has a number that is not finite.
  """
  try:
    # parse_constant sees NaN and Infinity by name; parse_float sees numbers such as 1e999, which
    # Python silently reads as infinite.
    return json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
  except RecursionError:
    raise ValueError('nested too deeply') from None


def _finite_number(words: str) -> float:
  number = float(words)
  if not math.isfinite(number):
    raise ValueError(f'{words} is not a finite number')
  return number


def finite(value: T) -> T:
  """The same with None in place of numbers that are not finite."""
  return mapped(value, lambda leaf: (
      None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf))


def rounded(value: T) -> T:
  """The same with six significant digits, which is more than a float32 result has to say."""
  return mapped(value, lambda leaf: float(f'{leaf:.6g}') if isinstance(leaf, float) else leaf)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
  """The same with every leaf changed: of dicts, lists, tuples and written fields of dataclasses."""
  if isinstance(value, dict):
    return {key: mapped(item, change) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    items = [mapped(item, change) for item in value]
    return items if isinstance(value, list) else tuple(items)
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return dataclasses.replace(value, **mapped(_written(value), change))
  return change(value)


def _written(value: Any) -> dict[str, Any]:
  """The fields of a dataclass that JSON has, by name."""
  return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)
          if field.metadata != UNWRITTEN}
