"""Carries out an analysis of models, and writes numbers as JSON, a picture as PNG, and text."""

from __future__ import annotations

import platform
import uuid
from typing import Any

import jax
import numpy as np

import sink_jax
from sink_jax.analyses import registry, runner
from sink_jax.analyses.interface import Result
from sink_jax.analyses.registry import Analysis
from sink_jax.analyses.runner import Failure
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.tables import text_table
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.train.provenance import hardware, provenance


def analyse_models(name: str, checkpoints: list[str], workdirs: list[str],
                   out: str | AnyPath | None, **given: Any
                   ) -> tuple[str, list[AnyPath], list[Failure]]:
  """Carries out an analysis, and writes OUT/NAME.json, after every model, and OUT/NAME.png.

  Args:
    name: of an analysis of `sink_jax.analyses.registry`.
    checkpoints: published models, as `load_pretrained` takes them.
    workdirs: runs trained with sink_jax. Without models, an analysis that has `check_all` makes
      its own.
    out: the folder to write to.
    given: fields of `Options`; None for the default of the analysis.

  Returns:
    The results as a table for a terminal, the paths of the files, and {'model', 'error'} of the
    models that failed among several. There is no picture of no results.

  Raises:
    ValueError: an option, a model or its inputs cannot be used; names it and the remedy.
    CheckpointError: no usable checkpoint in a workdir, where that is the only model.
  """
  analysis = registry.find(name)
  has_models = bool(checkpoints or workdirs)
  if not (has_models or analysis.check_all):
    raise ValueError('name a model: --checkpoint=, published ones, or --workdir=, runs trained '
                     'with sink_jax.')
  takes = (analysis.takes(checkpoints=bool(checkpoints), workdirs=bool(workdirs))
           if has_models else ('length', 'epsilons'))  # of check_all
  options = analysis.options(takes, **given)
  folder = made_folder(out)
  numbers, picture = folder / f'{name}.json', folder / f'{name}.png'
  # After every model: hours of work are not lost where a later model ends the process.
  write = lambda results, failures: write_atomically(
      numbers, to_json(rounded(_record(analysis, results, failures))))
  if analysis.check_all and not has_models:
    results, failures = analysis.check_all(options.length, options.epsilon), []
    write(results, failures)
  else:
    models = runner.loaders(analysis, checkpoints, workdirs, options)
    results, failures = runner.measure_all(analysis, models, options, write)
  # Every model has failed: the file lists the errors, and there is nothing to draw.
  if not results:
    return f'{analysis.figure}: no results', [numbers], failures
  analysis.module.draw(results, picture)
  head, *rows = analysis.module.rows(results)
  text = '\n'.join([f'{analysis.figure}: {analysis.line}', *text_table(head, rows)])
  return text, [numbers, picture], failures


def made_folder(out: str | AnyPath | None) -> AnyPath:
  """Makes the folder to write to, and tries to write, before work that may take hours.

  Raises:
    ValueError: it is not named, or cannot be written to.
  """
  if not out:
    raise ValueError('--out is needed: the folder to write to.')
  folder = to_path(out)
  # A name that no other process takes, in case several try the same folder at once.
  trial = folder / f'.{uuid.uuid4().hex[:12]}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    trial.write_bytes(b'')
    trial.unlink()
  except OSError as error:
    raise ValueError(f'--out={folder} cannot be written to ({error.strerror or error}): name '
                     'another folder, which is made where there is none.') from None
  return folder


def _record(analysis: Analysis, results: list[Result], failures: list[Failure]) -> dict[str, Any]:
  """What NAME.json holds."""
  return {'analysis': analysis.name, 'figure': analysis.figure,
          # The versions have a place of their own below, so provenance is asked for the rest alone.
          **provenance(devices=False), 'hardware': hardware(),
          'versions': {'sink_jax': sink_jax.__version__, 'jax': jax.__version__,
                       'numpy': np.__version__, 'python': platform.python_version()},
          'results': results, 'failed': failures}
