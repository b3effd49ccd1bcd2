"""Carries out tasks of lm-evaluation-harness on one model, and writes what it has found."""

from __future__ import annotations

import dataclasses
from importlib import metadata

from sink_jax.analyses import lm_eval_package

lm_eval_package.imported()  # without the harness the imports below would be for nothing

from sink_jax.analyses import runner
from sink_jax.analyses.lm_eval_tasks import evaluate, find_tasks, rows
from sink_jax.analyses.options import TaskOptions
from sink_jax.cli.main import say
from sink_jax.cli.results import Model, load, writable_folder, write_found
from sink_jax.io import compile_cache
from sink_jax.io.tables import text_table
from sink_jax.models.precision import matmul_precision
from sink_jax.train.workdir import read_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Model, TaskOptions):
  """Carries out tasks of lm-evaluation-harness on one model, in JAX.

      python -m sink_jax lm_eval --checkpoint=Pythia-160M --tasks=lambada_openai --out=scores
      python -m sink_jax lm_eval --workdir=runs/text --tasks=mine.yaml --out=scores

  Prints the metrics with their standard errors, and writes them with the model, the options and the
  versions to OUT/lm_eval.json. Needs the extra `evaluation`, and no torch.
  """

  #: of lm-evaluation-harness: tasks, groups, patterns such as 'mmlu_*', or YAML files.
  tasks: tuple[str, ...] = ()
  include_path: str | None = None  # a folder with tasks and groups of your own.
  out: str | None = None  # folder to write to.

  def __post_init__(self):
    Model.__post_init__(self)
    TaskOptions.__post_init__(self)


def main(options: Options) -> None:
  """Carries out the tasks, prints the metrics and writes them."""
  # What takes milliseconds comes first, then the index of tasks, and the model last.
  path = writable_folder(options.out) / 'lm_eval.json'
  tasks = find_tasks(options.tasks, options.include_path)
  compile_cache.enable()
  model, chosen = load(options), TaskOptions(**{
      field.name: getattr(options, field.name) for field in dataclasses.fields(TaskOptions)})
  result, run = evaluate(model, tasks, chosen, say), model.run
  # Of a run what it was trained by; of a published model its architecture.
  write_found(path, {
      'model': run.name, 'checkpoint': runner.checkpoint(run),
      'config': read_config(options.workdir) if options.workdir else repr(run.config),
      'matmul_precision': matmul_precision(run.config.dtype), **result},
              lm_eval=result['harness'].pop('version'), datasets=metadata.version('datasets'))
  head, *shown = rows(result['metrics'])
  print(run.name, *text_table(head, shown, left=(0, 1, 4)), path, sep='\n')
