"""The trials that a report left undecided, with two more seeds of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sink_jax.io.paths import to_path
from sink_jax.sweep.trials import Trial


def read_second_look(path: str | Path, trials: Mapping[str, Trial]
                     ) -> tuple[frozenset[str], list[int]]:
  """What report.json says is to be run once more for this sweep.

  Args:
    path: a report.json of the paper.
    trials: of the config file at this budget and protocol, without seeds.

  Returns:
    (the names of trials, as their labels have them; the new seeds)

  Raises:
    ValueError: no such report, one of other runs or of another budget, or nothing undecided that
      two more seeds could decide.
  """
  looks = _read(path)
  if not looks:
    raise ValueError(f'--undecided={path}: two more seeds would decide no claim of it. Each is '
                     'judged, cannot be judged for another reason, or was looked at before: '
                     'trials with more than three seeds are not asked again, so that a second look '
                     'that was interrupted is finished with the report that it began with.')
  key = lambda labels: (labels.get('budget') or '', labels.get('protocol') or '')
  mine = {key(trial.label) for trial in trials.values()}
  names = {trial.label.get('trial') or trial.name for trial in trials.values()}
  # Labels of the synthetic task have no budget, nor have those of other tasks: trials tell them.
  found = [look for look in looks if key(look) in mine and names & set(look['trials'])]
  if not found:
    said = lambda pairs: ' and '.join(sorted(
        f'{budget or "no"} budget, {protocol or "no"} protocol' for budget, protocol in pairs))
    raise ValueError(f'--undecided={path}: its undecided claims are of runs at '
                     f'{said(map(key, looks))}; the trials of this sweep are at {said(mine)}.')
  look = found[0]
  return frozenset(look['trials']) & names, list(look['seeds'])


def _read(path: str | Path) -> list[dict[str, Any]]:
  try:
    report = json.loads(to_path(path).read_text(encoding='utf-8'))
    looks = report['undecided']
    for look in looks:
      if not (look['trials'] and all(isinstance(seed, int) for seed in look['seeds'])):
        raise ValueError
  except OSError as error:
    raise ValueError(f'--undecided={path}: {error.strerror or error}.') from None
  except (ValueError, KeyError, TypeError):
    raise ValueError(f'--undecided={path} is no report.json of the paper that says what is '
                     'undecided; make one with python -m sink_jax.report --runs=WORKDIR --out=DIR '
                     '--kind=paper.') from None
  return looks
