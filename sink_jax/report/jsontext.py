"""JSON that every parser accepts and a person can read."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def to_json(value: Any) -> str:
  """A value as indented JSON, lists of numbers on one line; what is not finite becomes null."""
  text = json.dumps(finite(value), indent=1, allow_nan=False)
  # A pair of brackets without brackets, braces or quotes between them is a list of numbers.
  return re.sub(r'\[([^\[\]{}"]*)\]', lambda match: '[' + ' '.join(match[1].split()) + ']',
                text) + '\n'


def from_json(text: str) -> Any:
  """The value of a JSON text, which may come from anywhere and is read strictly.

  Raises:
    ValueError: it is no JSON, nested too deeply, or has a number that is not finite.
  """
  try:
    return json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
  except RecursionError:
    raise ValueError('nested too deeply') from None


def _finite_number(words: str) -> float:
  number = float(words)
  if not math.isfinite(number):
    raise ValueError(f'{words} is not a finite number')
  return number


def finite(value: Any) -> Any:
  """The same JSON value with None in place of numbers that are not finite."""
  if isinstance(value, dict):
    return {key: finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [finite(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value: Any) -> Any:
  """The same JSON value with six significant digits, more than a float32 result has to say."""
  if isinstance(value, dict):
    return {key: rounded(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [rounded(item) for item in value]
  return float(f'{value:.6g}') if isinstance(value, float) else value
