"""JSON that every parser accepts and a person can read."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def to_json(value: Any) -> str:
  """A value as indented JSON, what holds no other on one line; numbers that are not finite are null."""
  # Strict parsers, such as those of browsers, refuse the NaN that Python writes.
  text = json.dumps(_mapped(value, lambda x: x if math.isfinite(x) else None), indent=1, allow_nan=False)
  # A bracket at the end of a line opens a list or an object: within quotes JSON has no line break.
  return re.sub(r'([\[{])\n *([^\[\]{}]*)\n *([\]}])',
                lambda found: found[1] + re.sub(r'\n *', ' ', found[2]) + found[3], text) + '\n'


def rounded(value: Any) -> Any:
  """The same with six significant digits, which is more than a float32 result has to say."""
  return _mapped(value, lambda x: float(f'{x:.6g}'))


def _mapped(value: Any, change: Any) -> Any:
  """The same with every float changed, also within dicts, lists and tuples."""
  if isinstance(value, dict):
    return {key: _mapped(item, change) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_mapped(item, change) for item in value]
  return change(value) if isinstance(value, float) else value
