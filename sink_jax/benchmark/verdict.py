"""What rows of correctness checks amount to; read also where JAX is not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def failures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """The rows of the checks that failed."""
  return [row for row in rows if row['verdict'] == 'FAILED']


def passed(rows: Sequence[dict[str, Any]]) -> bool:
  """Was anything checked, and did none fail?"""
  return bool(rows) and not failures(rows)


def verdict(rows: Sequence[dict[str, Any]], not_run: int) -> str:
  """A sentence about the checks, and one about the combinations that had to be left out."""
  late = f' {not_run} combinations were not run: the time was up.' if not_run else ''
  return f'{len(rows) - len(failures(rows))} of {len(rows)} checks passed.{late}'
