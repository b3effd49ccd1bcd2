"""Writes a run as a checkpoint that transformers loads."""

from __future__ import annotations

from sink_jax.cli.options import Export
from sink_jax.pretrained.export import export_workdir


def main(options: Export) -> None:
  """Exports the run, and prints what was written and why."""
  print(*export_workdir(options.workdir, options.out, dtype=options.dtype, target=options.target),
        sep='\n')
