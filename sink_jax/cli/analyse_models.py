"""An analysis of some models, written down: numbers as JSON, a picture as PNG, text."""

from __future__ import annotations

import platform
import uuid

import jax
import numpy as np

import sink_jax
from sink_jax.analyses import registry, runner
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import to_path
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.train.provenance import hardware, provenance


def analyse_models(name: str, checkpoints: list[str], workdirs: list[str], out,
                   **given) -> tuple[str, list, list[dict]]:
  """Carries out an analysis, and writes OUT/NAME.json, after every model, and OUT/NAME.png.

  Args:
    name: of `sink_jax.analyses.registry`.
    checkpoints: published models, as `load_pretrained` takes them. workdirs: runs of ours.
      Without any, an analysis that can makes its own models.
    given: fields of `Options`; None for the default of the analysis.

  Returns:
    The results as a table for a terminal, the paths of the files, and {'model', 'error'} of the
    models that failed among several. There is no picture of no results.

  Raises:
    ValueError: an option, a model or its inputs cannot be used; names it and the remedy.
    CheckpointError: no usable checkpoint in a workdir, where that is the only model.
  """
  analysis = registry.find(name)
  module = analysis.module
  check_all = analysis.check_all
  if not (checkpoints or workdirs or check_all):
    raise ValueError('name a model: --checkpoint=, published ones, or --workdir=, runs of ours.')
  takes = (analysis.takes(checkpoints=bool(checkpoints), workdirs=bool(workdirs))
           if checkpoints or workdirs else ('length', 'epsilons'))  # of check_all
  options = analysis.options(takes, **given)
  out = _made(out)
  numbers, picture = out / f'{name}.json', out / f'{name}.png'
  write = lambda results, failed: write_atomically(
      numbers, to_json(rounded(_record(analysis, results, failed))))
  if checkpoints or workdirs:
    models = runner.loaders(analysis, checkpoints, workdirs, options)
    results, failed = runner.measure_all(analysis, models, options, write)
  else:
    results, failed = check_all(options.length, options.epsilon), []
    write(results, failed)
  if not results:
    return f'{analysis.figure}: no results', [numbers], failed
  module.draw(results, picture)
  text = f'{analysis.figure}: {analysis.line}\n{_columns(module.rows(results))}'
  return text, [numbers, picture], failed


def _made(out):
  """The folder to write to, made before the work where that could fail."""
  if not out:
    raise ValueError('--out is needed: the folder to write to.')
  out = to_path(out)
  trial = out / f'.{uuid.uuid4().hex[:12]}'
  try:
    out.mkdir(parents=True, exist_ok=True)
    trial.write_bytes(b'')
    trial.unlink()
  except OSError as error:
    raise ValueError(f'--out={out} cannot be written to ({error.strerror or error}): name another '
                     'folder, which is made where there is none.') from None
  return out


def _record(analysis, results, failed):
  return {'analysis': analysis.name, 'figure': analysis.figure, **provenance(devices=False), 'hardware': hardware(),
          'versions': {'sink_jax': sink_jax.__version__, 'jax': jax.__version__,
                       'numpy': np.__version__, 'python': platform.python_version()},
          'results': results, 'failed': failed}


def _columns(rows):
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join('  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
                   for row in rows)
