"""Runs one benchmark, or shows the tables of stored ones."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

from sink_jax.benchmark.options import Check, Saved, Show, Trials
from sink_jax.benchmark.records import document_from_json
from sink_jax.benchmark.table import render

_BEGAN = time.monotonic()  # a time limit counts from here: importing JAX takes a while

# PyTorch may have to share the device with JAX, which would take most of its memory at once.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')


def main(options: Saved | Check | Show) -> int:
  """Runs one command; returns its exit code."""
  if isinstance(options, Show):  # without jax
    for path in options.files:
      try:
        print(render(document_from_json(json.loads(Path(path).read_text()))))
      except ValueError as error:
        raise ValueError(f'{path} is no file that a benchmark wrote: {error}') from None
    return 0
  if isinstance(options, Check):  # starts processes that use jax, and has no use for it itself
    from sink_jax.benchmark.check import check

    return check(options)

  from sink_jax.benchmark import commands

  if options.limit:
    # What the imports took is a part of the limit; at least one row begins in any case.
    left = max(0.1, options.limit - (time.monotonic() - _BEGAN))
    options = dataclasses.replace(options, limit=left)
  configs = {}
  if isinstance(options, Trials):
    # It needs what only training does; the other benchmarks run without those packages.
    from sink_jax.sweep.trials import load_trials

    # A trial without a config has no counterpart at its budget.
    configs = {name: trial.config for name, trial in load_trials(options.config).items()
               if trial.config is not None}
  return commands.run(options, configs)
