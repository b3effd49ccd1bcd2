"""Carries out tasks of lm-evaluation-harness on one model, in JAX.

    python -m sink_jax lm_eval --checkpoint=Pythia-160M --tasks=lambada_openai --out=scores
    python -m sink_jax lm_eval --workdir=runs/text --tasks=mine.yaml --out=scores

Log-likelihoods, rolling ones and generated texts. Prints the metrics with their standard errors,
and writes them with the model, the options and the versions to OUT/lm_eval.json. Needs the extra
`evaluation`, and no torch.
"""

from __future__ import annotations

import dataclasses
import os

from sink_jax.analyses.lm_eval_package import imported
from sink_jax.analyses.options import TaskOptions
from sink_jax.arguments import check_least
from sink_jax.cli import command, parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(TaskOptions, parser.CommandOptions):
  """The options of the command, and those of an evaluation.

  Attributes:
    checkpoint: a published model: its folder, a name such as Pythia-160M, or 'owner/name' on the
      Hugging Face hub.
    workdir: folder of a training run instead.
    tasks: of lm-evaluation-harness: tasks, groups, patterns such as 'mmlu_*', or YAML files.
    include_path: a folder with tasks and groups of your own.
    out: folder to write to, a new or an empty one.
    fsdp: devices to split the parameters over.
  """

  checkpoint: str | None = None
  workdir: str | None = None
  tasks: tuple[str, ...] = ()
  include_path: str | None = None
  out: str | None = None
  fsdp: int = 1

  def __post_init__(self):
    super().__post_init__()
    check_least(self, fsdp=1)


def main(options: Options) -> None:
  """Carries out the tasks; one line instead of a traceback for what cannot be done."""
  if (options.checkpoint is None) == (options.workdir is None):
    raise ValueError('name a model: either --checkpoint or --workdir.')
  if options.fsdp > 1 and options.workdir is not None:
    raise ValueError('--fsdp is for published models; a run is loaded onto one device.')
  imported()  # without the harness the imports below would be for nothing

  import jax

  from sink_jax.analyses import runner
  from sink_jax.analyses.lm_eval_tasks import find_tasks
  from sink_jax.analyses.loaded_models import LoadedModel
  from sink_jax.cli.score_tasks import new_folder, score
  from sink_jax.io import compile_cache

  command.quiet_logs()
  # What takes milliseconds comes first, then the index of tasks, and the model last.
  folder = new_folder(options.out)
  tasks = find_tasks(options.tasks, options.include_path)
  compile_cache.enable()
  try:
    if options.checkpoint is not None:
      model = LoadedModel.of_checkpoint(options.checkpoint, options.dtype, options.fsdp)
    else:
      assert options.workdir is not None  # one of the two is given, see above
      model = LoadedModel.of_workdir(os.path.expanduser(options.workdir), options.dtype)
    chosen = TaskOptions(**command.given_of(options, TaskOptions))
    text, path = score(model, tasks, chosen, folder, say=command.say)
  except jax.errors.JaxRuntimeError as error:
    command.stop(f'{runner.in_one_line(error)}. Where the memory of the device is full: '
                 '--batch_size=1, a smaller --max_length, --dtype=bfloat16, or --fsdp over several '
                 'devices.')
  print(text, path, sep='\n')
