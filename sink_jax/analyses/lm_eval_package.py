"""The optional package lm-evaluation-harness, or the one line that says how to install it.

It imports neither jax nor torch, so that a command can look for the package before anything else.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType

# As pyproject.toml has them: the interface that `lm_eval_adapter` answers to.
_OLDEST, _NEXT = (0, 4, 13), (0, 5)
_INSTALL = "pip install 'sink_jax[evaluation]', or pip install 'lm_eval>=0.4.13,<0.5'"


def imported() -> ModuleType:
  """Returns the module `lm_eval`.

  Raises:
    ValueError: it is not installed, in another version, or lacks a package of its own.
  """
  try:
    lm_eval = importlib.import_module('lm_eval')
  except ImportError as error:
    raise ValueError(f'lm-evaluation-harness is needed ({error}): {_INSTALL}.') from None
  version = str(lm_eval.__version__)
  numbers = tuple(int(number) for number in re.findall(r'\d+', version)[:3])
  if not _OLDEST <= numbers < _NEXT:
    raise ValueError(f'lm-evaluation-harness {version} has another interface: {_INSTALL}.')
  return lm_eval
