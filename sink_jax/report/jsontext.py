"""JSON that every parser accepts and a person can read."""

from __future__ import annotations

import json
import math
import re


def to_json(value) -> str:
  """Indented, with lists of numbers on one line; what is not finite becomes null."""
  text = json.dumps(finite(value), indent=1, allow_nan=False)
  return re.sub(r'\[([^\[\]{}"]*)\]', lambda found: '[' + ' '.join(found[1].split()) + ']',
                text) + '\n'


def from_json(text: str):
  """What a JSON text holds; strict, since it may come from anywhere.

  Raises:
    ValueError: it is no JSON, nested too deeply, or has a number that is not finite.
  """
  try:
    return json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
  except RecursionError:
    raise ValueError('nested too deeply') from None


def _finite_number(words):
  number = float(words)
  if not math.isfinite(number):
    raise ValueError(f'{words} is not a finite number')
  return number


def finite(value):
  """The same with None in place of numbers that are not finite."""
  if isinstance(value, dict):
    return {key: finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [finite(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value):
  """The same with six significant digits, which is more than a float32 result has to say."""
  if isinstance(value, dict):
    return {key: rounded(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [rounded(item) for item in value]
  return float(f'{value:.6g}') if isinstance(value, float) else value
