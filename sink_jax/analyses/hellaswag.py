"""Sink_1 beside the accuracy of HellaSwag, by family and scale (Figure 10).

Within a family both grow with the model; across families, more sinks do not mean a better
model.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from sink_jax.analyses import scale
from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.lm_eval_adapter import language_model
from sink_jax.analyses.lm_eval_package import imported
from sink_jax.analyses.options import Options
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.models.run import Run


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Sink_1 as `scale.measure` does, and the accuracy of HellaSwag.

  Questions begin without BOS, as in the version of lm-evaluation-harness that the paper's time had,
  unless options.bos asks for one; the inputs of Sink_1 have another default.

  Returns:
    The result of `scale.measure`, that of `hellaswag_accuracy`, and 'hellaswag', its protocol:
    bos, file and limit.

  Raises:
    ValueError: no tokenizer, no lm_eval, or no questions; several epsilons.
  """
  if inputs.tokenizer is None:
    raise ValueError(f'{run.name}: HellaSwag is text, and the model has no tokenizer for it.')
  answers = hellaswag_accuracy(run, inputs.tokenizer, bos=options.bos or 'none',
                               file=options.hellaswag, limit=options.limit, say=options.say)
  # The name of the file alone, since results are published and the paths of a machine are not.
  protocol = {'bos': options.bos or 'none', 'file': Path(options.hellaswag).name,
              'limit': options.limit}
  return scale.measure(run, inputs, options) | answers | {'hellaswag': protocol}


def check_first(options: Options) -> None:
  """Raises a ValueError where lm_eval, or the file of questions, is not here."""
  _harness(options.hellaswag)


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws Sink_1, acc and acc_norm against the number of parameters, a line per family (PNG)."""
  figure, axes = plots.canvas(12.0, 4.0, columns=3)
  for ax, key, title, y in zip(
      axes[0], ('sink_1', 'acc', 'acc_norm'),
      (f'Sink, ε = {results[0]["epsilon"]:g}', 'HellaSwag', 'HellaSwag, normalised by length'),
      (f'{plots.SINK_1} (% of heads)', 'Acc (%)', 'Acc_Norm (%)')):
    scale.panel(ax, results, key, title, y)
    if key != 'sink_1':
      ax.axhline(25, color='#777777', linewidth=1, linestyle=':')  # one of four by chance
  axes[0, 0].legend(fontsize=9, frameon=False)
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Sink_1 and both accuracies with their standard errors, with a row per model."""
  return [['model', 'parameters', 'Sink_1 in %', 'acc in %', 'acc_norm in %', 'questions'],
          *([model_name(r), f'{r["parameters"]:,}', f'{r["sink_1"]:.2f}',
             f'{r["acc"]:.2f} ± {r["acc_stderr"]:.2f}',
             f'{r["acc_norm"]:.2f} ± {r["acc_norm_stderr"]:.2f}', str(r['questions'])]
            for r in results)]


def hellaswag_accuracy(run: Run, tokenizer: TextTokenizer, *, bos: str = 'none', file: str = '',
                       limit: int | None = None, batch_size: int | None = None,
                       say: Callable[[str], None] = lambda line: None) -> Result:
  """Measures the accuracy of HellaSwag, zero-shot.

  Args:
    run: the model.
    tokenizer: of the model.
    bos: how every context begins: 'none', 'tokenizer' (as it begins a text) or 'force' (one
      BOS). The harness of the paper's time had none.
    file: a local .jsonl with ctx_a, ctx_b, activity_label, endings and label in each line, as
      the authors publish it; '' downloads the validation split.
    limit: how many questions; None for all.
    batch_size: sequences at a time; by default as many as 2,048 tokens.
    say: is called with a line of progress.

  Returns:
    acc: in percent, by the log-likelihood of an ending. acc_norm: in percent, by the log-likelihood
    over the number of characters. acc_stderr, acc_norm_stderr: their standard errors. questions:
    how many. harness: its version.

  Raises:
    ValueError: lm_eval is not installed, or the questions cannot be read or downloaded.
  """
  lm_eval = _harness(file)
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  try:
    task = _task(lm_eval, Path(file).expanduser().resolve() if file else None)
  except Exception as error:  # of the harness, of datasets, of the network: types of their own
    raise ValueError(
        f'HellaSwag cannot be read ({" ".join(str(error).split())[:300]}). Without a connection, '
        'download its validation file elsewhere and give it as --hellaswag=FILE.jsonl.') from error
  model = language_model(run, tokenizer, bos=bos, batch_size=batch_size, say=say)
  # Without a seed of torch, which the harness would have to import for it.
  evaluated = lm_eval.simple_evaluate(
      model=model, tasks=[task], limit=limit, num_fewshot=0, bootstrap_iters=0,
      log_samples=False, torch_random_seed=None)
  scores = evaluated['results']['hellaswag']
  percent = lambda key: 100 * float(scores[key])
  questions = evaluated['n-samples']['hellaswag']['effective']
  # As the harness's `mean_stderr` computes it from a sample; with bootstrap_iters=0 it states none.
  error = lambda p: 100 * float(np.sqrt(p * (1 - p) / max(1, questions - 1)))
  return {'acc': percent('acc,none'), 'acc_norm': percent('acc_norm,none'),
          'acc_stderr': error(scores['acc,none']),
          'acc_norm_stderr': error(scores['acc_norm,none']),
          'questions': questions, 'harness': lm_eval.__version__}


def _harness(file: str) -> ModuleType:
  """The module lm_eval, after a look for the file of questions, if there is one to be."""
  lm_eval = imported()
  if file and not Path(file).expanduser().is_file():
    raise ValueError(f'--hellaswag={file}: no such file.')
  return lm_eval


def _task(lm_eval: ModuleType, file: Path | None):
  """The harness's task, with its questions read; from a file where one is given."""
  from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  optional
  folder_of_task = Path(str(lm_eval.__file__)).parent / 'tasks' / 'hellaswag'
  if file is None:
    # The folder of this one task: the default would index the tasks of the whole harness.
    return _only(TaskManager(include_path=str(folder_of_task), include_defaults=False))
  with tempfile.TemporaryDirectory() as folder:
    # The harness's own task, so that prompts and scores stay its own, with other questions. The
    # file has validation questions alone, while the task also names a split for training.
    changes = {'include': str(folder_of_task / 'hellaswag.yaml'), 'task': 'hellaswag',
               'dataset_path': 'json',
               'dataset_kwargs': {'data_files': {'validation': str(file)}},
               'training_split': None}
    Path(folder, 'hellaswag.yaml').write_text(json.dumps(changes))  # JSON is YAML
    return _only(TaskManager(include_path=folder, include_defaults=False))


def _only(manager):
  return manager.load(['hellaswag'])['tasks']['hellaswag']
