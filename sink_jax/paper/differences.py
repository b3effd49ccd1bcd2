"""When a measured number may be compared with the paper's, and the difference where it may."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sink_jax.data.tokenizer import HuggingFace
from sink_jax.paper import numbers
from sink_jax.report.records import RunRecord

# What a validation loss depends on most: losses with other vocabularies are not comparable.
CONTEXT, VOCABULARY, DOMAIN = 2048, 50432, 'pilecc'
CRITERION = (
    f'A validation loss is compared where the context is {CONTEXT}, model.vocab_size is '
    f'{VOCABULARY}, the tokenizer is a HuggingFace one and there is a validation loss of a domain '
    f'called Pile-CC (its letters are "{DOMAIN}"), which then is the loss compared. Elsewhere the '
    'difference is withheld. Sink rates are compared everywhere, steps at the full budget alone, '
    'and nothing before the last step. Differences are marked where model, data, number of steps '
    'or batch size are not the paper\'s. Sink_* is the share of heads whose mean weight on the '
    'extra key, over queries, exceeds epsilon; the paper\'s code counts a dummy row of weight one '
    'as well, which report.json has as sink_bias_slot_released.')
_STEPS = ('emergence_step', 'overfit_step')


def _same_data(run: RunRecord) -> bool:
  """Whether context, vocabulary and tokenizer are the paper's."""
  experiment = run.known_setup.experiment
  return (experiment.data.context == CONTEXT and experiment.model.vocab_size == VOCABULARY
          and isinstance(experiment.data.tokenizer, HuggingFace))


def comparable_loss(run: RunRecord) -> float | None:
  """The validation loss of the domain that the paper reports; None where it cannot be compared."""
  of_domain = [loss for domain, loss in (run.losses or {}).items()
               if re.sub(r'[^a-z]', '', domain.lower()) == DOMAIN]
  return of_domain[0] if of_domain and _same_data(run) else None


def remark(metric: str, runs: Sequence[RunRecord]) -> tuple[bool, str]:
  """Whether a metric of these runs is compared with the paper's, and what is to be said of it."""
  # A rate needs no vocabulary: it is a share of heads on any text. A loss per token depends on what
  # a token is.
  comparable = metric != 'valid_loss' or all(comparable_loss(run) is not None for run in runs)
  kinds = [] if all(map(_same_model, runs)) else ['model']
  kinds += [] if comparable and all(map(_same_data, runs)) else ['data']
  words = [f'other {" and ".join(kinds)}'] if kinds else []
  words += dict.fromkeys(word for run in runs for word in _training(run))
  # A budget that changes none of these may still have changed something that is not looked at here.
  if not words and any(run.label.budget != 'full' for run in runs):
    words = ['another budget']
  return comparable and not (metric in _STEPS and words), ', '.join(words)


def _same_model(run: RunRecord) -> bool:
  # A width that a config gives replaces that of its size, which is then only a name.
  model, large = run.known_setup.experiment.model, run.label.trial.startswith('1b-')
  return model.size == ('1b' if large else '60m') and not (model.layers or model.d_model)


def _training(run: RunRecord) -> Iterator[str]:
  """What is not the paper's of how long and on how much at a time a run was trained."""
  # A sweep over batch sizes has other batches by intention: what counts is the paper's number for
  # this trial.
  steps, batch = numbers.training_of(run.label.trial)
  experiment = run.known_setup.experiment
  for own, expected, fewer, more in (
      (experiment.steps, steps, 'fewer steps', 'more steps'),
      (experiment.batch_size, batch, 'smaller batches', 'larger batches')):
    if own != expected:
      yield more if own > expected else fewer


def difference(measured: float, paper: numbers.Value) -> float | None:
  """Measured minus the paper's; from a range, the distance to its nearer end."""
  if paper is None or isinstance(paper, bool):
    return None
  low, high = paper if isinstance(paper, tuple) else (paper, paper)
  # A number inside of the range is no difference.
  nearest = measured if high is None else min(measured, high)
  return measured - (nearest if low is None else max(nearest, low))
