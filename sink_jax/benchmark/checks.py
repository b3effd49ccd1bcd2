"""How many checks of correctness passed; read also where JAX is not used."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.benchmark.records import CorrectnessRow


def failures(rows: Sequence[CorrectnessRow]) -> list[CorrectnessRow]:
  """The rows of the checks that failed."""
  return [row for row in rows if row.verdict == 'FAILED']


def passed(rows: Sequence[CorrectnessRow]) -> bool:
  """Whether anything was checked, and no check failed."""
  return bool(rows) and not failures(rows)


def count_passed(rows: Sequence[CorrectnessRow], not_run: int) -> str:
  """A sentence about the checks, and one about the combinations that had to be left out."""
  late = f' {not_run} combinations were not run: the time was up.' if not_run else ''
  return f'{len(rows) - len(failures(rows))} of {len(rows)} checks passed.{late}'
