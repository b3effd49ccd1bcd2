"""Components: values of a config, written as frozen dataclasses and as config strings."""

from __future__ import annotations

import ast
import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterator
from typing import Any, ClassVar, TypeVar

from sink_jax.arguments import check_known


@typing.dataclass_transform(frozen_default=True)
class Component:
  """One choice of an experiment: a similarity, a mask, a tokenizer, a data source ...

  Every subclass becomes a frozen dataclass. A direct subclass is the base class of some choices; a
  class that is not itself a choice sets `abstract = True`. Fields are plain numbers, strings,
  booleans, tuples of them or components: `from_string(Base, repr(component)) == component`.
  """

  __dataclass_fields__: ClassVar[dict[str, Any]]  # shows type checkers that it is a dataclass

  def __init_subclass__(cls, **options: Any) -> None:
    super().__init_subclass__(**options)
    dataclasses.dataclass(frozen=True)(cls)


C = TypeVar('C', bound=Component)


class UnknownComponent(ValueError):
  """A text names a component that no imported module defines."""

  key = ''  # of the config that has the text


def option(
  default: Any,
  about: str,
  *,
  where: bool = False,
  least: float | None = None,
  most: float | None = None,
  choices: Collection[str] = (),
) -> Any:
  """Declares a config key, as a field of the dataclass of its section.

  about: its meaning. where: the key decides only where and how fast a run computes, or what it
  records, so a run may be resumed with another value. least, most: bounds of a number, which must
  also be finite.
  """
  return dataclasses.field(
    default=default,
    metadata=dict(about=about, where=where, least=least, most=most, choices=choices),
  )


def registry(base: type[C]) -> dict[str, type[C]]:
  """The concrete subclasses of `base` by name, from the modules imported so far.

  A class replaces an earlier one of its name, as when a notebook's cell runs again.

  Raises:
    ValueError: a class of another package has the name of one of this package, which stored runs
      mean.
  """
  classes: dict[str, type[C]] = {}
  for cls in _concrete(base):
    earlier = classes.setdefault(cls.__name__, cls)
    if _is_ours(earlier) != _is_ours(cls):
      theirs = cls if _is_ours(earlier) else earlier
      raise ValueError(
        f'{theirs.__module__} defines {cls.__name__}, which is the name of a class of sink_jax: '
        'give it another name, and start again.'
      )
    classes[cls.__name__] = cls
  return dict(sorted(classes.items()))  # not in the order of imports


def _concrete(base: type[C]) -> Iterator[type[C]]:
  """The subclasses of `base` that are choices, in the order of their definition."""
  for cls in base.__subclasses__():
    # `vars`, since concrete subclasses would inherit an attribute.
    if not vars(cls).get('abstract'):
      yield cls
    yield from _concrete(cls)


def _is_ours(cls: type) -> bool:
  return cls.__module__.partition('.')[0] == __package__


def short_text(component: Component) -> str:
  """The config string of a component, without arguments that have their default values."""
  given = [
    f'{field.name}={value!r}'
    for field in dataclasses.fields(component)
    if (value := getattr(component, field.name)) != field.default
  ]
  return f'{type(component).__name__}({", ".join(given)})'


def from_string(base: type[C], text: str | Component) -> C:
  """Returns the component that a config string names: `from_string(Mask, 'Window(size=32)')`.

  The string is parsed with `ast` and never evaluated: a class name, then literals.

  Raises:
    ValueError: the class or an argument is unknown, and the message lists the choices; or an
      argument has the wrong type, or is not finite.
  """
  component = text if isinstance(text, base) else _parsed(base, text)
  for field in dataclasses.fields(component):
    value = getattr(component, field.name)
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f'{component}: {field.name} must be finite.')
  return component


def check_types(section: Any, name: str) -> None:
  """Raises a ValueError that names the first field whose value does not have the annotated type.

  An int becomes a float where the annotation is float. name: of the section, for the message.
  """
  for key, hint in typing.get_type_hints(type(section)).items():
    object.__setattr__(section, key, typed(f'{name}.{key}', getattr(section, key), hint))


def _parsed(base: type[C], text: object) -> C:
  kind, known = base.__name__, registry(base) or {base.__name__: base}  # or a concrete class itself
  try:
    if not isinstance(text, str):
      raise ValueError('must be a config string')
    call = ast.parse(text.strip(), mode='eval').body
    if isinstance(call, ast.Name):  # 'Exp' is read as 'Exp()'
      call = ast.Call(call, [], [])
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
      raise ValueError('not a name with name=value in brackets')
    # A component in a component is read later, by the annotation of its field.
    given = [
      (
        str(word.arg),
        ast.unparse(word.value)
        if isinstance(word.value, ast.Call)
        else ast.literal_eval(word.value),
      )
      for word in call.keywords
    ]
    if len(dict(given)) < len(given):  # ast.parse lets it pass
      raise ValueError('an argument is given twice')
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
    raise ValueError(
      f'Cannot read {kind} {str(text)[:80]!r} ({error}): write {next(iter(known))}(), with '
      f'arguments as name=value. Choices: {", ".join(known)}.'
    ) from None
  name = call.func.id
  if name.casefold() == 'softmax':
    raise ValueError(
      f"Unknown {kind} {name!r}: softmax is similarity 'Exp()' with normalizer 'RowSum()', "
      f'the defaults. Choices: {", ".join(known)}.'
    )
  try:
    check_known(name, known, f'Unknown {kind}')
  except ValueError as error:
    raise UnknownComponent(str(error)) from None
  hints = typing.get_type_hints(known[name])  # annotations may be strings
  fields = {field.name: field.default for field in dataclasses.fields(known[name])}
  if wrong := [key for key, _ in given if key not in fields]:
    takes = ', '.join(fields) or 'no arguments'
    raise ValueError(f'{name} has no argument {wrong[0]!r}; it takes: {takes}.')
  if missing := [
    key
    for key, default in fields.items()
    if default is dataclasses.MISSING and key not in dict(given)
  ]:
    raise ValueError(f'{name} needs {", ".join(missing)}.')
  return known[name](**{key: typed(f'{name}.{key}', value, hints[key]) for key, value in given})


def typed(name: str, value: Any, hint: Any) -> Any:
  """Returns a value of the annotated type, which is made from a text for a component, an int for a
  float, a list for a tuple; name: of the value, for a ValueError about another type.
  """
  allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
  # tuple[int, ...] is checked only as a tuple; the class checks its elements.
  allowed = [typing.get_origin(one) or one for one in allowed]
  for one in allowed:
    if issubclass(one, Component) and isinstance(value, (str, one)):
      return from_string(one, value)
  if type(value) is list and tuple in allowed:
    value = tuple(value)
  if type(value) is int and float in allowed and int not in allowed:
    value = float(value) if abs(value) < 1e308 else math.inf
  if type(value) not in allowed:  # not isinstance, to which True is an int
    words = ' or '.join(one.__name__ for one in allowed)
    raise ValueError(f'{name} = {value!r} must be {words}.')
  return value
