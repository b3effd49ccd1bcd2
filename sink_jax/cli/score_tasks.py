"""Scores a model on tasks of lm-evaluation-harness, and writes the metrics as JSON and text."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata

import jax
import numpy as np

import sink_jax
from sink_jax.analyses import runner
from sink_jax.analyses.lm_eval_tasks import TaskOptions, Tasks, evaluate, rows
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.cli.analyse_models import made_folder
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.tables import text_table
from sink_jax.models.precision import matmul_precision
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.train.provenance import hardware, provenance
from sink_jax.train.run_dir import is_workdir, read_config


def new_folder(out: str | AnyPath | None) -> AnyPath:
  """Makes the folder to write to.

  Raises:
    ValueError: it is not named, holds something, or cannot be written to.
  """
  if out and (folder := to_path(out)).is_dir():
    held = sorted(path.name for path in folder.iterdir())
    if held:
      raise ValueError(f'--out={folder} holds {held[0]}: name a new folder, or empty this one.')
  return made_folder(out)


def score(model: LoadedModel, tasks: Tasks, options: TaskOptions, folder: AnyPath,
          say: Callable[[str], None] = lambda line: None) -> tuple[str, AnyPath]:
  """Carries out the tasks and writes FOLDER/lm_eval.json.

  Returns:
    The metrics as a table for a terminal, and the path of the file.

  Raises:
    ValueError: as `evaluate`. OSError: the file cannot be written.
  """
  result, run = evaluate(model, tasks, options, say), model.run
  # Of a run what it was trained by; of a published model its architecture.
  config = repr(run.config)
  if run.folder is not None and is_workdir(run.folder):
    config = read_config(run.folder)
  versions = {'sink_jax': sink_jax.__version__, 'jax': jax.__version__, 'numpy': np.__version__,
              'python': platform.python_version(), 'lm_eval': result['harness'].pop('version'),
              'datasets': metadata.version('datasets')}
  record = {
      # The versions have a place of their own below, so provenance is asked for the rest alone.
      **provenance(devices=False), 'hardware': hardware(), 'versions': versions,
      'model': run.name, 'checkpoint': runner.checkpoint(run),
      'config': config,
      'matmul_precision': matmul_precision(run.config.dtype), **result}
  path = folder / 'lm_eval.json'
  write_atomically(path, to_json(rounded(record)))
  head, *shown = rows(result['metrics'])
  return '\n'.join([str(run.name), *text_table(head, shown)]), path
