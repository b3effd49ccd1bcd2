"""Reading config.json: a key that is missing or not supported is refused by name and value.

A default is the family's own in transformers, which its config.json may leave out. No key that
would change a result may go unread: a family lists those that it leaves unread, and why.
"""

from __future__ import annotations

import math
from typing import Any


def size(hf: dict[str, Any], key: str) -> int:
  """A size that config.json must have, a positive integer.

  Raises:
    ValueError: it is missing, or is not a positive integer.
  """
  if hf.get(key) is None:
    raise ValueError(f'config.json has no {key}, without which the model is not defined.')
  value = hf[key]
  # `type`, since to isinstance the JSON value true is an integer.
  if type(value) is not int or value < 1:
    raise ValueError(f'config.json: {key} = {value!r} must be a positive integer.')
  return value


def optional_size(hf: dict[str, Any], key: str, default: int | None) -> int | None:
  """A size that may be null, which is not the same as missing: the family's default then.

  Raises:
    ValueError: it is no positive integer.
  """
  if key not in hf:
    return default
  return None if hf[key] is None else size(hf, key)


def number(hf: dict[str, Any], key: str, default: float) -> float:
  """A number, or the family's default where config.json has none.

  Raises:
    ValueError: it is not a finite number.
  """
  value = hf.get(key)
  value = default if value is None else value
  # JSON has integers of any length, which float() may refuse; NaN fails the comparison, too.
  if type(value) not in (int, float) or not abs(value) < 1e300 or not math.isfinite(value):
    raise ValueError(f'config.json: {key} = {value!r} must be a finite number.')
  return float(value)


def flag(hf: dict[str, Any], key: str, default: bool) -> bool:
  """A switch, or the family's default where config.json has none.

  Raises:
    ValueError: it is neither true nor false.
  """
  value = hf.get(key)
  value = default if value is None else value
  if type(value) is not bool:
    raise ValueError(f'config.json: {key} = {value!r} must be true or false.')
  return value


def only(hf: dict[str, Any], key: str, *supported: Any, why: str = '') -> Any:
  """A value out of those that are supported; the first one where config.json has none.

  Raises:
    ValueError: another value; names the key, the value, the supported ones and `why`.
  """
  value = hf.get(key)
  if value is None:
    return supported[0]
  # 1 == True in Python, so types are compared, too; in a list, as the value of a damaged file may
  # be unhashable.
  if (isinstance(value, bool), value) not in [(isinstance(x, bool), x) for x in supported]:
    raise refused(key, value, f'supported: {", ".join(repr(x) for x in supported)}'
                  + (f' ({why})' if why else ''))
  return value


def refused(key: str, value: Any, reason: str) -> ValueError:
  """The error for a key whose value this importer does not support."""
  return ValueError(f'config.json: {key} = {value!r} is not supported: {reason}.')


def not_quantized(hf: dict[str, Any]) -> None:
  """Raises a ValueError where the checkpoint holds quantised weights."""
  quantization = hf.get('quantization_config')
  if quantization:
    method = (quantization.get('quant_method', quantization) if isinstance(quantization, dict)
              else quantization)
    raise refused('quantization_config', method, 'the weights of this family are read as '
                  'float32, float16 or bfloat16; use the checkpoint it was quantised from')


def head_dim(hf: dict[str, Any], default: int | None = None) -> int | None:
  """The size of a head where it is not the width over the number of heads, else None.

  Raises:
    ValueError: config.json gives none, and the heads do not divide the width.
  """
  width, heads = size(hf, 'hidden_size'), size(hf, 'num_attention_heads')
  size_ = optional_size(hf, 'head_dim', default)
  if size_ is None and width % heads:
    raise ValueError(f'config.json: num_attention_heads = {heads} does not divide hidden_size = '
                     f'{width}, and there is no head_dim.')
  # None for the usual size, so that equal models have equal configs.
  return None if size_ is None or size_ * heads == width else size_
