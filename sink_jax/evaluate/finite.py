"""The error for a model whose results are not finite, with the reason where it can be seen."""

from __future__ import annotations

import math

from sink_jax.models.arrays import first_not_finite
from sink_jax.models.run import Run


class NotFinite(ValueError):
  """The error for a result of a model that is not finite; see `not_finite`."""


def not_finite(run: Run, what: str, dtype: str) -> NotFinite:
  """Makes the error for a result that is not finite, which names a parameter or a remedy.

  Args:
    what: the result, such as 'importance in block 3, head 2'.
    dtype: of the activations.
  """
  parameter = first_not_finite(run.params)
  # The parameter comes first: with one that is not finite no dtype would help.
  if parameter:
    reason = f'nor is its parameter {parameter}, so the model cannot be used'
  elif dtype == 'bfloat16':
    reason = ('its parameters are, so activations overflow in bfloat16: use dtype float32 '
              '(--dtype=float32, in a config probe.dtype)')
  else:
    reason = f'its parameters are, so activations overflow in {dtype} on these inputs, or vanish'
  return NotFinite(f'{run.name or "the model"}: {what} is not finite; {reason}.')


def find_not_finite(value: object) -> tuple[str | int, ...] | None:
  """The keys that lead to the first float that is not finite, in a tree of dicts and lists.

  They are such as ('sink', 0, 3), for value['sink'][0][3]; None where all are finite.
  """
  if isinstance(value, float):
    return None if math.isfinite(value) else ()
  items = (value.items() if isinstance(value, dict) else
           enumerate(value) if isinstance(value, (list, tuple)) else ())
  for key, item in items:
    if (inside := find_not_finite(item)) is not None:
      return key, *inside
  return None
