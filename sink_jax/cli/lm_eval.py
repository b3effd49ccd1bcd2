"""Carries out tasks of lm-evaluation-harness on one model, and writes what it has found."""

from __future__ import annotations

from importlib import metadata

from sink_jax.analyses import lm_eval_package

lm_eval_package.imported()  # without the harness the imports below would be for nothing

from sink_jax.analyses import runner
from sink_jax.analyses.lm_eval_tasks import evaluate, find_tasks, rows
from sink_jax.analyses.options import TaskOptions
from sink_jax.cli.command import say
from sink_jax.cli.model_options import LmEval
from sink_jax.cli.results import load, made_folder, write_found
from sink_jax.io import compile_cache
from sink_jax.io.tables import text_table
from sink_jax.models.precision import matmul_precision
from sink_jax.train.run_dir import read_config


def main(options: LmEval) -> None:
  """Carries out the tasks, prints the metrics and writes them."""
  # What takes milliseconds comes first, then the index of tasks, and the model last.
  path = made_folder(options.out, new=True) / 'lm_eval.json'
  tasks = find_tasks(options.tasks, options.include_path)
  compile_cache.enable()
  model = load(options)
  result, run = evaluate(model, tasks, TaskOptions(**options.given_of(TaskOptions)), say), model.run
  # Of a run what it was trained by; of a published model its architecture.
  write_found(path, {
      'model': run.name, 'checkpoint': runner.checkpoint(run),
      'config': read_config(options.workdir) if options.workdir else repr(run.config),
      'matmul_precision': matmul_precision(run.config.dtype), **result},
              lm_eval=result['harness'].pop('version'), datasets=metadata.version('datasets'))
  head, *shown = rows(result['metrics'])
  print(run.name, *text_table(head, shown, left=(0, 1, 4)), path, sep='\n')
