"""Carries out tasks of lm-evaluation-harness on one model, in JAX.

    python -m sink_jax lm_eval --checkpoint=Pythia-160M --tasks=lambada_openai --out=scores
    python -m sink_jax lm_eval --workdir=runs/text --tasks=mine.yaml --out=scores

Log-likelihoods, rolling ones and generated texts. Prints the metrics with their standard errors,
and writes them with the model, the options and the versions to OUT/lm_eval.json. Needs the extra
`evaluation`, and no torch.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata

from sink_jax.analyses.lm_eval_package import imported
from sink_jax.analyses.options import TaskOptions
from sink_jax.cli import command
from sink_jax.cli.one_model import ModelOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, TaskOptions):
  """The options of the command, and those of a model and of an evaluation.

  Attributes:
    tasks: of lm-evaluation-harness: tasks, groups, patterns such as 'mmlu_*', or YAML files.
    include_path: a folder with tasks and groups of your own.
    out: folder to write to, a new or an empty one.
  """

  tasks: tuple[str, ...] = ()
  include_path: str | None = None
  out: str | None = None

  def __post_init__(self):
    ModelOptions.__post_init__(self)
    TaskOptions.__post_init__(self)


def main(options: Options) -> None:
  """Carries out the tasks, prints the metrics and writes them."""
  imported()  # without the harness the imports below would be for nothing

  from sink_jax.analyses import runner
  from sink_jax.analyses.lm_eval_tasks import evaluate, find_tasks, rows
  from sink_jax.cli.results import made_folder, write_found
  from sink_jax.io import compile_cache
  from sink_jax.io.tables import text_table
  from sink_jax.models.precision import matmul_precision
  from sink_jax.train.run_dir import read_config

  # What takes milliseconds comes first, then the index of tasks, and the model last.
  path = made_folder(options.out, new=True) / 'lm_eval.json'
  tasks = find_tasks(options.tasks, options.include_path)
  compile_cache.enable()
  model = options.load()
  chosen = TaskOptions(**command.given_of(options, TaskOptions))
  result, run = evaluate(model, tasks, chosen, command.say), model.run
  # Of a run what it was trained by; of a published model its architecture.
  write_found(path, {
      'model': run.name, 'checkpoint': runner.checkpoint(run),
      'config': read_config(options.workdir) if options.workdir else repr(run.config),
      'matmul_precision': matmul_precision(run.config.dtype), **result},
              lm_eval=result['harness'].pop('version'), datasets=metadata.version('datasets'))
  head, *shown = rows(result['metrics'])
  print(run.name, *text_table(head, shown, left=(0, 1, 4)), path, sep='\n')
