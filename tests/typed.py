"""The type checker for tests that are marked typed."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

# Functions that are not checked, and why.
UNCHECKED = {
  'AttentionSpec.__init__',  # also takes config strings, and turns them into components
}

# An int is accepted where a float is annotated, as in static checkers (PEP 484).
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable) -> Callable:
  """The function with checks of its arguments and its result."""
  if function.__qualname__ in UNCHECKED:
    return function
  try:
    return _checked(function)
  except BeartypeDecorHintPep673Exception:
    # The method returns Self, which beartype knows only in classes that it decorates.
    return function
