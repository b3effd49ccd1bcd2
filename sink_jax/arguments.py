"""Keyword arguments that a function does not have: the error names the nearest that it has."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str | None:
  """The choice that was probably meant: one that the name begins, or one of similar letters."""
  choices = list(choices)
  begun = [choice for choice in choices if choice.startswith(name)]
  return next(iter(begun or difflib.get_close_matches(name, choices, n=1, cutoff=0.5)), None)


def explained(target):
  """A function, or in place the constructor of a class, with a better error for such arguments.

  TypeError: attend() has no argument 'impl'; did you mean 'implementation'? It takes: ...
  The signature and the docstring stay. What takes any keyword is left as it is.
  """
  if not isinstance(target, type):
    return _explained(target, target.__name__)
  constructor = '__new__' if issubclass(target, tuple) else '__init__'
  function = getattr(target, constructor)
  if not hasattr(function, '__wrapped__'):  # by an earlier call
    setattr(target, constructor, _explained(function, target.__name__))
  return target


def _explained(function, name):
  parameters = inspect.signature(function).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return function
  takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
  known = frozenset(takes)

  @functools.wraps(function)
  def checked(*args, **keywords):
    if not known.issuperset(keywords):
      raise TypeError(_message(name, next(key for key in keywords if key not in known), takes))
    return function(*args, **keywords)

  return checked


def _message(name, wrong, takes):
  takes = [own for own in takes if own not in ('self', '_cls')]
  close = nearest(wrong, takes)
  hint = f'; did you mean {close!r}?' if close else '.'
  return f'{name}() has no argument {wrong!r}{hint} It takes: {", ".join(takes) or "none"}.'
