"""The files that commands about models and runs leave: numbers as JSON, pages, pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath
from sink_jax.train.provenance import provenance


def write_files(folder: AnyPath, files: Mapping[str, str | bytes]) -> list[AnyPath]:
  """Writes files, {name: content}, into a folder that it makes, and returns their paths."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    write_atomically(folder / name, content)
  return [folder / name for name in files]


def recorded(found: Mapping[str, Any]) -> dict[str, Any]:
  """Numbers as they are stored: with when, where and with which versions they were made.

  They have six significant digits, enough for a float32 result.
  """
  return _mapped({**provenance(), **found}, lambda x: float(f'{x:.6g}'))


def to_json(value: Any) -> str:
  """A value as indented JSON, innermost lists and objects on a line; NaN and infinity: null."""
  # Strict parsers, such as those of browsers, refuse the NaN that Python writes.
  finite = _mapped(value, lambda x: x if math.isfinite(x) else None)
  text = json.dumps(finite, indent=1, allow_nan=False)
  # A bracket at the end of a line opens a list or an object: within quotes JSON has no line break.
  innermost = r'([\[{])\n *([^\[\]{}]*)\n *([\]}])'
  one_line = lambda found: found[1] + re.sub(r'\n *', ' ', found[2]) + found[3]
  return re.sub(innermost, one_line, text) + '\n'


def _mapped(value: Any, change: Any) -> Any:
  """The same with every float changed, also within dicts, lists and tuples."""
  if isinstance(value, dict):
    return {key: _mapped(item, change) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_mapped(item, change) for item in value]
  return change(value) if isinstance(value, float) else value
