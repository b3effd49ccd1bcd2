"""The type checker of tests that are marked typed."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

# What is not checked, and why.
UNCHECKED = {
    'AttentionSpec.__init__',  # takes the strings of configs too, and turns them into components
}

# A whole number is a float where one is annotated, as for static checkers (PEP 484).
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable) -> Callable:
  """The function with checks of its arguments and its result."""
  if function.__qualname__ in UNCHECKED:
    return function
  try:
    return _checked(function)
  except BeartypeDecorHintPep673Exception:
    return function  # a method that returns Self: beartype knows it in classes it decorates alone
