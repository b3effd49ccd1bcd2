"""Checks of names and options that people type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import numpy as np


def check_known(name: str, choices: Iterable[str], what: str) -> None:
  """Raises a ValueError "WHAT 'nme'. Did you mean name? Choices: ..." if a name is not a choice."""
  choices = list(choices)
  if name in choices:
    return
  near = [choice for choice in choices if name and choice.startswith(name)]
  near += difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
  hint = f' Did you mean {near[0]}?' if near else ''
  raise ValueError(f'{what} {name!r}.{hint} Choices: {", ".join(filter(None, choices))}.')


def check_least(options: object, **least: int | float) -> None:
  """Raises a ValueError that names the first option below its least value; None passes."""
  for name, bound in least.items():
    value = getattr(options, name)
    numbers = [] if value is None else np.ravel(value).tolist()
    if min(numbers, default=bound) < bound:
      raise ValueError(f'--{name}={",".join(map(str, numbers))} must be at least {bound}.')
