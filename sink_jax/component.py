"""Components: values of a config, written as frozen dataclasses.

The `repr` of a component is its config string, and a class is a choice as soon as it is defined:
there is no table to register it in.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sink_jax.arguments import check_known, explained

# What several components make together.
_NO_COMPONENTS = {'softmax': "softmax is similarity 'Exp()' with normalizer 'RowSum()', which are "
                             'the defaults of attention.'}


@typing.dataclass_transform(frozen_default=True)
class Component:
  """One choice of an experiment: a similarity, a mask, a tokenizer, a data source ...

  A subclass is a frozen dataclass without saying so. A direct subclass is a kind of component, the
  base of its choices. Its fields are plain numbers, strings, booleans, tuples of them, or
  components: `repr(component)` is then its config string, and
  `from_string(Base, repr(component)) == component`. A class that only stands for its
  subclasses sets `abstract = True` in its body.
  """

  def __init_subclass__(cls, **options: Any) -> None:
    super().__init_subclass__(**options)
    dataclasses.dataclass(frozen=True)(cls)


C = TypeVar('C', bound=Component)


def option(default: Any, about: str, *, where: bool = False, least: float | None = None,
           most: float | None = None, choices: Collection[str] = ()) -> Any:
  """A field of a dataclass that is a section of a config: the one declaration of a config key.

  Args:
    about: what the key means, in a few words.
    where: whether it decides only where and how fast a run computes, or what it records, so that a
      run may be resumed with another value.
    least, most: the range of a number, which must be finite, too. choices: the texts that it takes.
  """
  return dataclasses.field(default=default, metadata=dict(
      about=about, where=where, least=least, most=most, choices=choices))


def registry(base: type[C]) -> dict[str, type[C]]:
  """The concrete classes below `base`, by name."""
  classes = {}
  for cls in base.__subclasses__():
    # `vars`, since an attribute would be inherited by the concrete ones.
    classes |= registry(cls) if vars(cls).get('abstract') else {cls.__name__: cls} | registry(cls)
  # By name, since the order of subclasses is that in which modules were imported.
  return dict(sorted(classes.items()))


def components_in(folder: Path) -> dict[str, str]:
  """{class: file without its ending} of the concrete components that a folder's files define.

  The files are parsed and not imported, so that asking for the names of components that run on
  JAX does not import JAX. A class counts whose bases, by name, lead to a kind: a direct
  subclass of `Component`.
  """
  bases, home = {}, {}
  for path in sorted(folder.glob('*.py')):
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.ClassDef):
        bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        home[node.name] = path.stem

  def is_component(name: str) -> bool:
    return name == Component.__name__ or any(map(is_component, bases.get(name, ())))

  return {name: home[name] for name, its_bases in bases.items()
          if Component.__name__ not in its_bases and is_component(name)}


def short_text(component: Component) -> str:
  """The config string of a component, without the arguments that are at their defaults."""
  given = [f'{field.name}={value!r}' for field in dataclasses.fields(component)
           if (value := getattr(component, field.name)) != field.default]
  return f'{type(component).__name__}({", ".join(given)})'


@explained
def from_string(base: type[C], text: str | Component) -> C:
  """Returns the component that a config string names: `from_string(Mask, 'Window(size=32)')`.

  The string is parsed with `ast` and never evaluated: a class name, then literals.

  Raises:
    ValueError: the class or an argument is unknown, and the message lists the choices; or an
      argument has the wrong type, or is a number that is not finite.
  """
  if isinstance(text, base):
    _check_finite(text)
    return text
  # A concrete class names itself alone.
  known = registry(base) or {base.__name__: base}
  kind = base.__name__
  name, keywords = _parse(text, kind, known)
  if name not in known and name.casefold() in _NO_COMPONENTS:
    raise ValueError(f'Unknown {kind} {name!r}: {_NO_COMPONENTS[name.casefold()]} Choices: '
                     f'{", ".join(known)}.')
  check_known(name, known, f'Unknown {kind}')
  cls = known[name]
  fields = {f.name: f for f in dataclasses.fields(cls)}
  # Annotations are strings in modules with `from __future__ import annotations`; this resolves
  # them.
  hints = typing.get_type_hints(cls)
  for key, value in keywords.items():
    if key not in fields:
      takes = ', '.join(fields) or 'no arguments'
      raise ValueError(f'{name} has no argument {key!r}; it takes: {takes}.')
    keywords[key] = _typed(name, key, value, hints[key])
  required = {field.name for field in fields.values() if field.default is dataclasses.MISSING}
  if missing := required - set(keywords):
    raise ValueError(f'{name} needs {", ".join(sorted(missing))}.')
  component = cls(**keywords)
  _check_finite(component)
  return component


def _check_finite(component: Component) -> None:
  """Raises a ValueError that names a number of a component that is infinite or none."""
  for field in dataclasses.fields(component):
    value = getattr(component, field.name)
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f'{component}: {field.name} must be finite.')


def check_types(section: Any, name: str) -> None:
  """Raises a ValueError that names the first field of a dataclass that has not its type.

  An int becomes a float where the annotation says so. name: what stands before the field's.
  """
  for key, hint in typing.get_type_hints(type(section)).items():
    object.__setattr__(section, key, _typed(name, key, getattr(section, key), hint))


def check_integers(component: object, *names: str) -> None:
  """Raises a ValueError unless these fields hold whole numbers."""
  for name in names:
    value = getattr(component, name)
    if type(value) is not int:  # True is an int to isinstance
      raise ValueError(
          f'{type(component).__name__}({name}={value!r}): {name} must be a whole number.')


def _parse(text: object, kind: str, known: Mapping[str, type]) -> tuple[str, dict[str, Any]]:
  """Class name and keyword arguments of a config string."""
  example = f'a {kind} is written like {next(iter(known), kind)}()'
  if not isinstance(text, str):
    raise ValueError(f'{kind} must be a config string, not {text!r}: {example}.')
  try:
    node = ast.parse(text.strip(), mode='eval').body
    if isinstance(node, ast.Name):  # 'Exp' is read as 'Exp()'
      return node.id, {}
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
      raise ValueError('not a call')
    if node.args or any(k.arg is None for k in node.keywords):
      raise ValueError('arguments must be written name=value')
    # A component in a component is read later, by the annotation of its field.
    keywords = {str(k.arg): ast.unparse(k.value) if isinstance(k.value, ast.Call)
                else ast.literal_eval(k.value) for k in node.keywords}
    if len(keywords) < len(node.keywords):  # ast.parse lets it pass
      raise ValueError('an argument is given twice')
    return node.func.id, keywords
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
    raise ValueError(
        f'Cannot read {kind} {text[:80]!r} ({error}): {example}, '
        f'with arguments as name=value. Choices: {", ".join(known)}.') from None


def _typed(name: str, key: str, value: Any, hint: Any) -> Any:
  """The value of an argument as its annotation has it; an int may stand for a float."""
  options = (typing.get_args(hint)
             if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
             else (hint,))
  # tuple[int, ...] is checked as a tuple; what its elements have to be is for the class to check.
  plain = tuple(typing.get_origin(option) or option for option in options)
  for option in plain:
    if issubclass(option, Component) and isinstance(value, (str, option)):
      return from_string(option, value)
  if type(value) is list and tuple in plain:
    value = tuple(value)
  if type(value) is int and float in plain and int not in plain:
    try:
      value = float(value)
    except OverflowError:
      raise ValueError(f'{name}.{key} is too large for a number with a point.') from None
  # Not isinstance, to which True is an int.
  if type(value) not in plain:
    wanted = ' or '.join(getattr(p, '__name__', str(p)) for p in plain)
    raise ValueError(f'{name}.{key} = {value!r} must be {wanted}.')
  return value
