"""Every claim of the paper, in its order."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.paper import claims_architecture, claims_training

CLAIMS = claims_training.CLAIMS + claims_architecture.CLAIMS


def trials_of(keys: Sequence[str]) -> list[str]:
  """Names of the trials that some claims need, without repetition, in the order of the keys.

  Raises:
    ValueError: no claim has that key; lists the choices.
  """
  by_key = {claim.key: claim for claim in CLAIMS}
  for key in keys:
    if key not in by_key:
      raise ValueError(f'there is no claim {key!r}. Choices: {", ".join(by_key)}.')
  return list(dict.fromkeys(trial for key in keys for trial in by_key[key].trials))
