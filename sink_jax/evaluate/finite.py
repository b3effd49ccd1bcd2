"""The error for a model whose results are not finite."""

from __future__ import annotations

from sink_jax.models.arrays import first_not_finite
from sink_jax.models.run import Run


class NotFinite(ValueError):
  """A result of a model is not finite; see `not_finite`."""


def not_finite(run: Run, what: str, dtype: str) -> NotFinite:
  """Makes the error for a result, such as 'importance in block 3', with a parameter or a remedy.

  dtype: of the activations.
  """
  if parameter := first_not_finite(run.params):
    reason = f'nor is its parameter {parameter}, so the model cannot be used'
  elif dtype == 'bfloat16':
    reason = ('its parameters are, so activations overflow in bfloat16: use dtype float32 '
              '(--dtype=float32, in a config probe.dtype)')
  else:
    reason = f'its parameters are, so activations overflow in {dtype} on these inputs, or vanish'
  return NotFinite(f'{run.name or "the model"}: {what} is not finite; {reason}.')
