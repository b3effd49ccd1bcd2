"""An analysis of some models, written down: numbers as JSON, a picture as PNG, text."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import jax
import numpy as np

import sink_jax
from sink_jax.analyses import frame, table
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.train.provenance import hardware, now


def analyse_models(name: str, checkpoints: list[str], workdirs: list[str], out,
                   **given) -> tuple[str, list[Path]]:
  """Carries out an analysis, and writes OUT/NAME.json and OUT/NAME.png.

  Args:
    name: of `sink_jax.analyses.table`.
    checkpoints: published models, as `load_pretrained` takes them. workdirs: runs of ours.
      Without any, an analysis that can makes its own models.
    given: fields of `Options`; None for the default of the analysis.

  Returns:
    The results as a table for a terminal, and the paths of the two files.

  Raises:
    ValueError: an option, a model or its inputs cannot be used; names it and the remedy.
    CheckpointError: no usable checkpoint in a workdir. OSError: `out` cannot be written.
  """
  analysis = table.find(name)
  check_all = getattr(analysis.module(), 'check_all', None)
  if not (checkpoints or workdirs or check_all):
    raise ValueError('name a model: --checkpoint=, published ones, or --workdir=, runs of ours.')
  if not out:
    raise ValueError('--out is needed: the folder to write to.')
  options = analysis.options(**given)
  out = Path(os.path.expanduser(out))
  out.mkdir(parents=True, exist_ok=True)  # before the work, where it could fail
  if checkpoints or workdirs:
    models = frame.load_all(analysis, checkpoints, workdirs, options)
    results = frame.measure_all(analysis, models, options)
  else:
    results = check_all(options.length, options.epsilon)
  record = {'analysis': analysis.name, 'figure': analysis.figure, **now(), 'hardware': hardware(),
            'versions': {'sink_jax': sink_jax.__version__, 'jax': jax.__version__,
                         'numpy': np.__version__, 'python': platform.python_version()},
            'results': results}
  numbers, picture = out / f'{name}.json', out / f'{name}.png'
  numbers.write_text(to_json(rounded(record)), encoding='utf-8')
  analysis.module().draw(results, picture)
  rows = frame.table_of(analysis, results)
  return f'{analysis.figure}: {analysis.line}\n{_columns(rows)}', [numbers, picture]


def _columns(rows):
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join('  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
                   for row in rows)
