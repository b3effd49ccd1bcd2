"""Tasks of lm-evaluation-harness by name or file, carried out on one model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sink_jax.analyses.interface import Result
from sink_jax.analyses.lm_eval_adapter import language_model, learned_positions
from sink_jax.analyses.lm_eval_generation import settings
from sink_jax.analyses.lm_eval_package import imported
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.analyses.options import TaskOptions
from sink_jax.arguments import did_you_mean
from sink_jax.models.run import Run
from sink_jax.pretrained.files import read_object
from sink_jax.train.workdir import is_workdir, read_config

# Resamples of metrics whose standard error has no closed form, such as perplexity: it is then known
# to 1 / sqrt(2 * 1000), two per cent of itself.
_BOOTSTRAP = 1000
# Names of the context of published models in their config.json.
_CONTEXT = ('max_position_embeddings', 'n_positions')
_FALLBACK = 2048  # tokens, as in the harness


@dataclasses.dataclass(frozen=True)
class Tasks:
  """Names of tasks, groups and tags, or YAML files, and the harness's manager that knows them."""

  names: tuple[str, ...]
  manager: Any


def find_tasks(names: Sequence[str], include_path: str | None = None) -> Tasks:
  """Finds tasks by their names; nothing is downloaded.

  Args:
    names: of tasks, groups or tags of the harness, patterns such as 'mmlu_*', or YAML files.
    include_path: a folder with more of them, as the harness's option of this name.

  Raises:
    ValueError: there is no such task, with the nearest name, or no such folder; or lm_eval is not
      installed.
  """
  imported()
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  optional
  if not names:
    raise ValueError('--tasks is needed: names of tasks of lm-evaluation-harness, separated by '
                     'commas, or YAML files, such as --tasks=lambada_openai,hellaswag.')
  if include_path is not None and not Path(include_path).expanduser().is_dir():
    raise ValueError(f'--include_path={include_path}: no such folder.')
  is_file = lambda name: name.endswith(('.yaml', '.yml'))
  # The index of the harness's own tasks takes seconds, and files need none.
  manager = TaskManager(include_path=include_path and Path(include_path).expanduser(),
                        include_defaults=not all(map(is_file, names)))
  found: list[str] = []
  for name in names:
    if is_file(name):
      if not Path(name).expanduser().is_file():
        raise ValueError(f'--tasks={name}: no such file.')
      found.append(str(Path(name).expanduser()))
      continue
    matched = manager.match_tasks([name])
    if not matched:
      hint = did_you_mean(name, manager.all_tasks)
      raise ValueError(f'--tasks={name}: lm-evaluation-harness {imported().__version__} has no '
                       f'such task.{hint} `lm-eval ls tasks` lists all; a task of your own is '
                       'given as its YAML file, or by --include_path=FOLDER.')
    found += matched
  return Tasks(tuple(dict.fromkeys(found)), manager)


def context_length(run: Run) -> int:
  """The tokens that a model was made to read: those of its training, or 2,048 where none is known.

  Of learned positions there are no more than that, and other encodings were trained no further.
  """
  if (learned := learned_positions(run)) is not None:
    return learned
  if run.folder is None:
    return _FALLBACK
  if is_workdir(run.folder):
    return int(read_config(run.folder)['data']['context'])
  config = read_object(Path(run.folder, 'config.json'), 'Download the model again.')
  known = (config.get(name) for name in _CONTEXT)
  return next((n for n in known if type(n) is int and n > 1), _FALLBACK)


def evaluate(model: LoadedModel, tasks: Tasks, options: TaskOptions,
             say: Callable[[str], None] = lambda line: None) -> Result:
  """Carries out tasks on a model.

  Args:
    model: the model and its tokenizer.
    tasks: what `find_tasks` has found.
    options: what a person chose.
    say: is called with a line of progress.

  Returns:
    options: as they were used. metrics: a row for each metric of each task, with task, version,
    filter, num_fewshot, samples, metric, value, stderr (None where the harness states none) and
    higher_is_better; values in the units of the harness. harness: its version, and what it draws at
    random with.

  Raises:
    ValueError: no tokenizer, a max_length beyond the learned positions, a task that cannot be read
      or that asks for what is not supported, or numbers that are not finite; with the remedy.
  """
  lm_eval, run = imported(), model.run
  tokenizer = model.text_tokenizer(drawn=False)
  max_length = options.max_length or context_length(run)
  try:
    run.config.attention.position.check_length(max_length)
  except ValueError as error:
    raise ValueError(f'{run.name}, --max_length={max_length}: {error}') from None
  adapter = language_model(run, tokenizer, bos=options.bos, batch_size=options.batch_size,
                           max_length=max_length, say=say)
  items = _loaded(tasks, max_length)
  # The harness prints to stdout, which is for the table; and its bootstrap would fork this process,
  # whose threads of jax a fork does not survive. No seed of torch, which it would have to import.
  with contextlib.redirect_stdout(sys.stderr), _one_process():
    evaluated = lm_eval.simple_evaluate(
        model=adapter, tasks=items, task_manager=tasks.manager, num_fewshot=options.num_fewshot,
        limit=options.limit, bootstrap_iters=_BOOTSTRAP, log_samples=False,
        torch_random_seed=None)
  used = dataclasses.asdict(options) | {'max_length': max_length}
  seeds = ('bootstrap_iters', 'random_seed', 'numpy_seed', 'fewshot_seed')
  return {'options': {'tasks': [_without_folder(name) for name in tasks.names], **used},
          'metrics': list(_metrics(evaluated)),
          'harness': {'version': lm_eval.__version__,
                      **{name: evaluated['config'][name] for name in seeds}}}


def rows(metrics: Iterable[dict[str, Any]]) -> list[list[str]]:
  """Tabulates metrics with their standard errors, with a row per metric."""
  count = lambda n: '' if n is None else str(n)
  # A perplexity may be of any size.
  decimals = lambda x: f'{x:.4f}' if abs(x) < 1e5 else f'{x:.4g}'
  table = [['task', 'filter', 'few-shot', 'samples', 'metric', 'value', 'stderr']]
  for row in metrics:
    error = '' if row['stderr'] is None else f'± {decimals(row["stderr"])}'
    table.append([row['task'], row['filter'], count(row['num_fewshot']), count(row['samples']),
                  row['metric'], decimals(row['value']), error])
  return table


def _loaded(tasks: Tasks, max_length: int) -> list[Any]:
  """The harness's tasks and groups with their data read, each once."""
  try:
    loaded = tasks.manager.load(list(tasks.names))
  except Exception as error:  # of the harness, of datasets, of the network: types of their own
    raise ValueError(
        f'--tasks={",".join(tasks.names)} cannot be read ({" ".join(str(error).split())[:300]}). '
        'Without a connection, a YAML file names local data: dataset_path: json, and '
        'dataset_kwargs: {data_files: {test: FILE.jsonl}}.') from error
  for name, task in loaded['tasks'].items():
    if task.get_config('output_type') == 'generate_until':
      try:
        settings(task.get_config('generation_kwargs') or {}, max_length)
      except ValueError as error:
        raise ValueError(f'{name}: {error}') from None
  inner = {name for children in loaded['group_map'].values() for name in children}
  items = {**loaded['tasks'], **loaded['groups']}
  return [item for name, item in items.items() if name not in inner]


def _metrics(evaluated: dict[str, Any]) -> Iterable[dict[str, Any]]:
  """The numbers of the harness's results, whose keys are 'METRIC,FILTER'."""
  for task, result in evaluated['results'].items():
    samples = evaluated['n-samples'].get(task, {}).get('effective')
    for key, value in result.items():
      metric, comma, name = key.partition(',')
      if not comma or metric.endswith('_stderr') or not isinstance(value, (int, float)):
        continue
      error = result.get(f'{metric}_stderr,{name}')
      yield {'task': task, 'version': evaluated['versions'].get(task), 'filter': name,
             'num_fewshot': evaluated['n-shot'].get(task), 'samples': samples, 'metric': metric,
             'value': float(value),
             # 'N/A' where there is none.
             'stderr': float(error) if isinstance(error, (int, float)) else None,
             'higher_is_better': evaluated['higher_is_better'].get(task, {}).get(metric)}


@contextlib.contextmanager
def _one_process():
  """Keeps the harness from starting processes; the environment is as before when the block ends."""
  name = 'DISABLE_MULTIPROC'
  before = os.environ.get(name)
  os.environ[name] = '1'
  try:
    yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before


def _without_folder(name: str) -> str:
  """A task as results name it, since they are published and the paths of a machine are not."""
  return Path(name).name if name.endswith(('.yaml', '.yml')) else name
