"""The pattern of blocks and the biases of a model, as the text of a config."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from sink_jax.attention.mask import Mask
from sink_jax.attention.position import Position
from sink_jax.component import from_string
from sink_jax.models.config import LARGEST, MOST, Experts, Layer, Mamba

# What the arguments of a Layer are.
_COMPONENTS = {'mask': Mask, 'position': Position}
_SIZES = {'mamba': Mamba, 'experts': Experts}


def pattern_text(pattern: tuple[Layer, ...]) -> str:
  """The text that `pattern_from_text` reads: the reprs of the blocks, separated by ';'."""
  return '; '.join(map(repr, pattern))


def pattern_from_text(text: str) -> tuple[Layer, ...]:
  """The blocks of one period, such as of 'Layer(mask=Window(size=128)); Layer()'.

  The text is parsed and never evaluated.

  Raises:
    ValueError: it is no list of blocks, or an argument is none of a Layer; names the part.
  """
  parts = [part.strip() for part in text.split(';')]
  return tuple(_layer(part) for part in parts)


def biases_from_text(text: str) -> tuple[str, ...]:
  """The groups of linear layers of 'qkv, out, ffn'; ModelConfig says which there are."""
  return tuple(part.strip() for part in text.split(',') if part.strip())


def _layer(text: str) -> Layer:
  example = 'a block is written like Layer(mask=Window(size=128))'
  try:
    node = ast.parse(text, mode='eval').body
    arguments = _arguments(node, 'Layer')
    values: dict[str, Any] = {}
    for name, value in arguments.items():
      if isinstance(value, ast.Constant) and value.value is None:
        continue
      if name in _COMPONENTS:
        values[name] = from_string(_COMPONENTS[name], ast.unparse(value))
      elif name in _SIZES:
        kind = _SIZES[name]
        values[name] = kind(**{key: _size(key, ast.literal_eval(x)) for key, x in
                               _arguments(value, kind.__name__).items()})
      else:
        raise ValueError(f'Layer has no argument {name!r}; it takes: mask, mamba, experts, '
                         'position')
    return Layer(**values)
  except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f'model.pattern: cannot read the block {text[:80]!r} ({error}): {example}, '
                     "and ';' stands between blocks.") from None


def _size(name: str, value: Any) -> Any:
  """The value of an argument of Mamba or Experts, which do not check them."""
  if name == 'renormalize':
    if type(value) is not bool:
      raise ValueError(f'{name} must be True or False, not {value!r}')
  # Experts are objects in memory each, before a tensor is looked at.
  elif type(value) is not int or not 1 <= value <= (MOST if name == 'count' else LARGEST):
    raise ValueError(f'{name} = {str(value)[:50]} cannot be')
  return value


def _arguments(node: ast.expr, name: str) -> Mapping[str, ast.expr]:
  if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
          and not node.args and all(keyword.arg for keyword in node.keywords)):
    raise ValueError(f'it is no {name}(name=value, ...)')
  return {str(keyword.arg): keyword.value for keyword in node.keywords}
