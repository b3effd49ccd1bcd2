"""Errors for arguments and options that cannot be: they name the nearest that can."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar('_T')


def nearest(name: str, choices: Iterable[str]) -> str | None:
  """The choice that was probably meant: one that begins with it, or one of similar letters."""
  choices = list(choices)
  completed = [choice for choice in choices if choice.startswith(name)]
  return next(iter(completed or difflib.get_close_matches(name, choices, n=1, cutoff=0.5)), None)


def did_you_mean(name: str, choices: Iterable[str], form: str = '{}') -> str:
  """' Did you mean NAME?', of the nearest choice; '' where none is near. form: of the name."""
  close = nearest(name, choices) if name else None
  return f' Did you mean {form.format(close)}?' if close else ''


def check_known(name: str, choices: Iterable[str], what: str) -> None:
  """Raises a ValueError, with the nearest choice and all of them, if a name is none of them.

  what: the words before the name, such as 'Unknown trial'.
  """
  choices = list(choices)
  if name not in choices:
    hint = did_you_mean(name, choices)
    raise ValueError(f'{what} {name!r}.{hint} Choices: {", ".join(choices)}.')


def explained(target: _T) -> _T:
  """A function, or a class whose constructor is replaced, with a better error for such arguments.

  TypeError: attend() has no argument 'impl'; did you mean 'implementation'? It takes: ...
  The signature and the docstring stay. A function that takes any keyword is left as it is.
  """
  if not isinstance(target, type):
    return _explained(target)
  _replace_constructor(target)
  return target


def _replace_constructor(cls: type) -> None:
  # A NamedTuple takes its arguments in __new__.
  constructor = '__new__' if issubclass(cls, tuple) else '__init__'
  function = getattr(cls, constructor)
  if not hasattr(function, 'explains'):  # else an earlier call has replaced it
    setattr(cls, constructor, _explained(function, cls.__name__))


def _explained(function, name: str = ''):
  """The function, which errors call `name`, by default what it is called."""
  name = name or function.__name__
  parameters = inspect.signature(function).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return function
  takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
  known = frozenset(takes)

  # `wraps` leaves the signature as it was to `inspect`.
  @functools.wraps(function)
  def checked(*args, **keywords):
    if not known.issuperset(keywords):
      raise TypeError(_message(name, next(key for key in keywords if key not in known), takes))
    return function(*args, **keywords)

  vars(checked)['explains'] = name  # by which `_replace_constructor` knows it
  return checked


def _message(name, wrong, takes):
  # _cls is the first parameter of a NamedTuple's __new__.
  takes = [parameter for parameter in takes if parameter not in ('self', '_cls')]
  close = nearest(wrong, takes)
  hint = f'; did you mean {close!r}?' if close else '.'
  return f'{name}() has no argument {wrong!r}{hint} It takes: {", ".join(takes) or "none"}.'


def check_least(options: object, **least: int | float) -> None:
  """Raises a ValueError that names the first of these options below its least value.

  None, which is no value, passes; of a tuple, of tuples as well, every number counts.
  """
  for name, bound in least.items():
    value = getattr(options, name)
    if value is not None and not all(number >= bound for number in _numbers(value)):
      text = ','.join(map(str, _numbers(value)))
      raise ValueError(f'--{name}={text} must be at least {bound}.')


def _numbers(value):
  if not isinstance(value, tuple):
    return [value]
  return [number for part in value for number in _numbers(part)]


def check_file(options: object, name: str) -> None:
  """Raises a ValueError if the option names a folder, in the place of a file to write."""
  path = getattr(options, name)
  if path is not None and os.path.isdir(path):
    raise ValueError(f'--{name}={path} is a folder: name a file.')


def check_choices(options: object, **choices: Iterable[str]) -> None:
  """Raises a ValueError that names the first of these options with none of its values."""
  for name, allowed in choices.items():
    if getattr(options, name) not in allowed:
      raise ValueError(f'--{name}={getattr(options, name)}: choose '
                       f'{", ".join(filter(None, allowed))}.')
