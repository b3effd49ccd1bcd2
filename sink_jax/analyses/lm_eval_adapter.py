"""HellaSwag by lm-evaluation-harness on a model in JAX: no torch, no server.

The harness brings the task, its prompts and its scores; this file answers how probable a text is.
lm_eval is an optional package, so it is imported in the functions that need it.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.analyses.interface import Result
from sink_jax.data.text_tokenizer import TextTokenizer
from sink_jax.evaluate.finite import not_finite
from sink_jax.models.run import Run

_TOKENS_AT_A_TIME = 2048  # whose logits are in memory: 400 MB with GPT-2's vocabulary
_SAY_EVERY = 2000  # endings
_SHORTEST = 32  # tokens; batches are padded to this or to a power of two above it


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
  lm_eval = _lm_eval()
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  if file and not Path(file).expanduser().is_file():
    raise ValueError(f'--hellaswag={file}: no such file.')
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


def language_model(run: Run, tokenizer: TextTokenizer, *, bos: str = 'none',
                   batch_size: int | None = None,
                   say: Callable[[str], None] = lambda line: None) -> Any:
  """Returns the model as an `lm_eval.api.model.LM` that answers `loglikelihood`.

  Texts longer than learned positions lose their beginning. The arguments are those of
  `hellaswag_accuracy`.

  Raises:
    ValueError: lm_eval is not installed, or there is no BOS where one is asked for.
  """
  _lm_eval()
  tokenizer.with_prefix([], bos)  # refuses a BOS that there is not, before the questions are read
  from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]  optional

  class Model(TemplateLM):
    """Only what multiple-choice tasks ask for."""

    @property
    def eot_token_id(self):
      """The token that takes the place of an empty context."""
      return 0 if tokenizer.bos_id is None else tokenizer.bos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
      """Ids of a text."""
      ids = tokenizer.encode(string).tolist()
      return ids if add_special_tokens is False else tokenizer.with_prefix(ids, bos).tolist()

    def _loglikelihood_tokens(self, requests, **kwargs):
      return loglikelihoods(run, [(context, ending) for _, context, ending in requests],
                            batch_size=batch_size, say=say)

    def loglikelihood_rolling(self, requests, **kwargs):
      """Not needed by HellaSwag."""
      raise NotImplementedError('HellaSwag needs `loglikelihood` alone.')

    def generate_until(self, requests, **kwargs):
      """Not needed by HellaSwag."""
      raise NotImplementedError('HellaSwag needs `loglikelihood` alone.')

  return Model()


def loglikelihoods(run: Run, pairs: Sequence[tuple[list[int], list[int]]], *,
                   batch_size: int | None = None,
                   say: Callable[[str], None] = lambda line: None) -> list[tuple[float, bool]]:
  """Computes the log-probability of every ending after its context.

  Texts are sorted by length and padded on the right, where a causal model does not look, to few
  different lengths, each of which is a program to compile.

  Args:
    run: the model.
    pairs: token ids (context, ending), of which neither is empty.
    batch_size: texts at a time; by default as many as 2,048 tokens.
    say: is called with a line of progress.

  Returns:
    For every pair the log-probability in nats, and whether the ending is the greedy one.

  Raises:
    ValueError: a log-probability is not finite.
  """
  most = getattr(run.config.attention.position, 'max_length', None)
  rows = [(context + ending, len(ending)) for context, ending in pairs]
  if most:
    # A model with `most` positions reads as many tokens and predicts as many, so a text may have
    # one token more.
    rows = [(ids[-most - 1:], min(count, most)) for ids, count in rows]
  order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
  results: list[tuple[float, bool]] = [(math.nan, False)] * len(rows)
  start, said = 0, 0
  while start < len(order):
    # The order is by length, so the first text is the longest of its batch and sets the width: the
    # smallest power of two that holds its tokens without the last, which is only predicted.
    width = max(_SHORTEST, 1 << (len(rows[order[start]][0]) - 2).bit_length())
    width = min(width, most) if most else width
    size = batch_size or max(1, _TOKENS_AT_A_TIME // width)
    batch = order[start:start + size]
    tokens, targets = np.zeros((2, size, width), np.int32)  # the last batch is padded as well
    counted = np.zeros((size, width), bool)
    for row, i in enumerate(batch):
      ids, count = rows[i]
      # A position is scored by the token after it. The ending is the last `count` targets.
      tokens[row, :len(ids) - 1], targets[row, :len(ids) - 1] = ids[:-1], ids[1:]
      counted[row, len(ids) - 1 - count:len(ids) - 1] = True
    total, greedy = map(np.asarray, _scores(run.logits(tokens), targets, counted))
    if not np.isfinite(total).all():
      raise not_finite(run, 'the log-probability of an ending', run.config.dtype)
    for row, i in enumerate(batch):
      results[i] = float(total[row]), bool(greedy[row])
    start += size
    if start >= min(said + _SAY_EVERY, len(order)):
      said = start
      say(f'{run.name}: HellaSwag, {min(start, len(order))} of {len(order)} endings')
  return results


@jax.jit
def _scores(logits_BxTxV, targets_BxT, counted_BxT):
  """Summed log-probability (B,) of the counted targets, and whether all are the most likely."""
  chosen_BxT = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], -1)[..., 0]
  log_BxT = chosen_BxT - jax.nn.logsumexp(logits_BxTxV, -1)
  greedy_BxT = jnp.argmax(logits_BxTxV, -1) == targets_BxT
  # Positions that do not count add nothing to a sum, and must not make an ending less than greedy.
  return (jnp.where(counted_BxT, log_BxT, 0).sum(-1),
          jnp.where(counted_BxT, greedy_BxT, True).all(-1))


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


def _lm_eval() -> ModuleType:
  try:
    import lm_eval  # pyright: ignore[reportMissingImports]  optional
  except ImportError as error:
    raise ValueError(f'HellaSwag needs lm-evaluation-harness ({error}): pip install '
                     'lm_eval, or sink_jax[evaluation].') from None
  return lm_eval
