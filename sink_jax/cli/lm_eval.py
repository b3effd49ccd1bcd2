"""python -m sink_jax.lm_eval --checkpoint=Pythia-160M --tasks=lambada_openai,hellaswag --out=scores
python -m sink_jax.lm_eval --workdir=runs/text --tasks=mine.yaml --out=scores

Carries out tasks of lm-evaluation-harness on one model, in JAX: log-likelihoods, rolling ones and
generated texts. Prints the metrics with their standard errors, and writes them with the model, the
options and the versions to OUT/lm_eval.json. Needs the extra `evaluation`, and no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from absl import flags

from sink_jax.analyses.lm_eval_package import imported
from sink_jax.cli import command, entry

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, "A published model: its folder, a name such as Pythia-160M, or "
    "'owner/name' on the Hugging Face hub.")
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a training run instead.')
_TASKS = flags.DEFINE_list(
    'tasks', [], "Of lm-evaluation-harness, separated by commas: tasks, groups, patterns such as "
    "'mmlu_*', or YAML files.")
_INCLUDE_PATH = flags.DEFINE_string('include_path', None,
                                    'A folder with tasks and groups of your own.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write to, a new or an empty one.')
_NUM_FEWSHOT = flags.DEFINE_integer(
    'num_fewshot', None, 'Examples before each question. Default: what the task says.')
_LIMIT = flags.DEFINE_integer('limit', None, 'Questions of each task. Default: all.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Sequences at a time. Default: what fits.')
_MAX_LENGTH = flags.DEFINE_integer(
    'max_length', None, 'Tokens that the model reads at most. Default: those of its training.')
_BOS = flags.DEFINE_string('bos', 'tokenizer', 'How contexts begin: tokenizer (as it begins a '
                           'text, or the training of a run did), none or force (one BOS).')
_DTYPE = flags.DEFINE_string('dtype', 'float32',
                             'Of parameters and activations: float32, bfloat16.')
_FSDP = flags.DEFINE_integer('fsdp', 1, 'Devices to split the parameters over.', lower_bound=1)

command.answer_help(__name__)  # the imports below take seconds
if entry.running == __name__:  # and without the harness they would be for nothing
  try:
    imported()
  except ValueError as missing:
    command.stop(missing)

import jax

from sink_jax.analyses import runner
from sink_jax.analyses.lm_eval_tasks import TaskOptions, find_tasks
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.cli.score_tasks import new_folder, score
from sink_jax.io import compile_cache
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import quiet_logs


def main(argv: Sequence[str]) -> None:
  """Carries out the tasks; one line instead of a traceback for what cannot be done."""
  quiet_logs()
  try:
    command.no_arguments(argv)
    text, path = _score()
  except (ValueError, CheckpointError, OSError) as error:
    command.stop(error)
  except jax.errors.JaxRuntimeError as error:
    command.stop(f'{runner.in_one_line(error)}. Where the memory of the device is full: '
                 '--batch_size=1, a smaller --max_length, --dtype=bfloat16, or --fsdp over several '
                 'devices.')
  print(text, path, sep='\n')


def _score():
  checkpoint, workdir = _CHECKPOINT.value, _WORKDIR.value
  if (checkpoint is None) == (workdir is None):
    raise ValueError('name a model: either --checkpoint or --workdir.')
  if _FSDP.value > 1 and workdir is not None:
    raise ValueError('--fsdp is for published models; a run is loaded onto one device.')
  options = TaskOptions(num_fewshot=_NUM_FEWSHOT.value, limit=_LIMIT.value, bos=_BOS.value,
                        batch_size=_BATCH_SIZE.value, max_length=_MAX_LENGTH.value,
                        dtype=_DTYPE.value)
  # What takes milliseconds comes first, then the index of tasks, and the model last.
  folder = new_folder(_OUT.value)
  tasks = find_tasks(_TASKS.value, _INCLUDE_PATH.value)
  compile_cache.enable()
  if checkpoint is not None:
    model = LoadedModel.of_checkpoint(checkpoint, options.dtype, _FSDP.value)
  else:
    assert workdir is not None  # one of the two is given, see above
    model = LoadedModel.of_workdir(os.path.expanduser(workdir), options.dtype)
  return score(model, tasks, options, folder, say=_say)


def _say(line: str) -> None:
  # On stderr, so that stdout holds the table and the name of the file alone.
  print(line, file=sys.stderr, flush=True)


def start() -> None:
  command.run(main)
