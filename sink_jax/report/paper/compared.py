"""When our numbers may be set against the paper's, and the difference where they may."""

from __future__ import annotations

import re
from collections.abc import Iterable

CONTEXT, VOCABULARY, DOMAIN = 2048, 50432, 'pilecc'
CRITERION = (
    f'A validation loss is compared where the context is {CONTEXT}, model.vocab_size is '
    f'{VOCABULARY}, the tokenizer is a HuggingFace one and there is a validation loss of a domain '
    f'called Pile-CC (its letters are "{DOMAIN}"), which then is the loss compared. Elsewhere the '
    'difference is withheld: other data. Sink rates are compared everywhere, steps at the full '
    'budget alone, and nothing before the last step. Differences are marked where model, data or '
    'number of steps are not the paper\'s. Sink_* is the mean weight of the slot over queries; '
    'the paper\'s code counts a dummy row of weight one as well, which report.json has as '
    'sink_bias_slot_released.')
_LOSSES = ('valid_loss',)
_STEPS = ('emergence_step', 'overfit_step')
_SIZES = ('60m', '1b')  # of the paper's models


def same_data(run: dict) -> bool:
  """Are context, vocabulary and tokenizer the paper's?"""
  data, model = run['config']['data'], run['config']['model']
  return (data['context'] == CONTEXT and model['vocab_size'] == VOCABULARY
          and data['tokenizer'].startswith('HuggingFace('))


def pile_cc_loss(run: dict) -> float | None:
  """The validation loss of the domain that the paper reports; None without that domain."""
  for domain, loss in run.get('losses', {}).items():
    if re.sub(r'[^a-z]', '', domain.lower()) == DOMAIN:
      return loss
  return None


def comparable_loss(run: dict) -> bool:
  return same_data(run) and pile_cc_loss(run) is not None


def remark(measure: str, runs: Iterable[dict]) -> tuple[bool, str]:
  """Is a measure of these runs compared with the paper's, and what has to be said of it?"""
  runs = list(runs)
  if measure in _LOSSES and not all(map(comparable_loss, runs)):
    return False, 'other data'
  if measure in _STEPS and any(run['label']['budget'] != 'full' for run in runs):
    return False, 'other number of steps'
  model = all(run['config']['model']['size'] in _SIZES for run in runs)
  data = all(map(same_data, runs))
  if not model or not data:
    kinds = [word for word, same in (('model', model), ('data', data)) if not same]
    return True, f'other {" and ".join(kinds)}'
  return True, 'fewer steps' if any(run['label']['budget'] != 'full' for run in runs) else ''


def difference(ours: float, paper) -> float | None:
  """Ours minus the paper's; from a range, the distance to its nearer end."""
  if paper is None or isinstance(paper, bool):
    return None
  if isinstance(paper, list):
    low, high = paper
    if low is not None and ours < low:
      return ours - low
    return ours - high if high is not None and ours > high else 0.0
  return ours - paper
